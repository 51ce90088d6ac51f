"""Recordings of runs: the file format, what a recording explains, and what would lower its peak."""
