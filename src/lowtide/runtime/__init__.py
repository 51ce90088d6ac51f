"""The torch edge: recording a live step, and running a plan."""
