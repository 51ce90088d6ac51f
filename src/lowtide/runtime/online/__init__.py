"""Holding the budget without a plan: an operator that does not fit is retried after an eviction."""
