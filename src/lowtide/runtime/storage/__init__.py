"""Storages, their versions, and what an operator's schema says about them."""
