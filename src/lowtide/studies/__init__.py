"""Studies: questions that take several runs of a program to answer."""
