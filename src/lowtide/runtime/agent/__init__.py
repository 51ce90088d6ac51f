"""The agent: the process that runs the user's script for a command."""
