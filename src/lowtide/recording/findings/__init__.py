"""Finders of what is avoidable in a recorded peak: one function per kind of finding."""
