"""A recorded step's graph as it would be with memory optimizations ("levers"), and which of them to choose."""
