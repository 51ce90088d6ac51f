"""Changes of how a step runs that lower its peak and keep its bits."""
