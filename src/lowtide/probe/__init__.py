"""Code that runs inside a watched process. Standard library only: it may be any Python, without Lowtide installed."""
