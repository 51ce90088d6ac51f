"""One answer from bounds and search, and its figures."""
