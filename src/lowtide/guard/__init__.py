"""Keeps a long run alive: watches its memory, restarts it before it is killed, and says why it ended."""
