"""Records operators and saved tensors while a script runs."""
