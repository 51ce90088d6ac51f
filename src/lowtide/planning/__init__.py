"""The pebble game: problems, schedules, bounds and solvers; no torch."""
