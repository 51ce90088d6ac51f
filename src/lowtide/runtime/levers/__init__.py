"""Memory optimizations ("levers"): changes of how a step runs that lower its peak."""
