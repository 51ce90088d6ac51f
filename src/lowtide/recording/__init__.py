"""The file of a recorded run, what it explains, and what would lower its peak."""
