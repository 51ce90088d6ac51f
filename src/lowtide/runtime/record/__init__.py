"""What is noted of operators and saved tensors while they run."""
