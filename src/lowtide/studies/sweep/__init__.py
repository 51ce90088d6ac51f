"""Sweeps: a matrix of configurations of one command, each in fresh processes."""
