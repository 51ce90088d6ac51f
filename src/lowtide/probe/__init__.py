"""What runs inside a watched process. Standard library only: the process may be any Python, without Lowtide installed."""
