"""Combines bounds and searches into one answer, and derives its figures."""
