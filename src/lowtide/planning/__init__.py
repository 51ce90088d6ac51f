"""The pebble game: problems, schedules, bounds and solvers. Does not import torch."""
