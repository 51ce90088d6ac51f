"""Memory optimizations ("levers") of the loss and of layers: they run an operator in pieces, or not at all."""
