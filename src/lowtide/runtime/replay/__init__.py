"""Rematerializes dropped values, bit for bit."""
