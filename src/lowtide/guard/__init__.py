"""Keeps a long run alive: watches its memory, has it stop and start again before it is killed, and says why it ended."""
