"""The graph of a recorded step as memory optimizations ("levers") would change it, and which of them to choose."""
