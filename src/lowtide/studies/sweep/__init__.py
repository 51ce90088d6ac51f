"""Sweeps: a matrix of configurations of one command, each run in fresh processes."""
