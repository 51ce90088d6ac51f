"""Searches for plans of a graph: textbook strategies, exhaustive search, annealing, integer programs."""
