"""What of a recorded peak need not be: one function per kind of finding."""
