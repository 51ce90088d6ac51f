"""Memory optimizations of gradients, optimizer states and the optimizer's update."""
