"""A second account of the rules, which shares only the graph with what it checks."""
