"""Holding a budget without a plan: operators are retried after an eviction."""
