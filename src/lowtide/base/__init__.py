"""Errors, units, messages and files that every other package uses; imports none of them."""
