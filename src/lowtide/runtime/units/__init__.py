"""Units of training at run time: their modes, their recordings, and what is known about each kind of unit."""
