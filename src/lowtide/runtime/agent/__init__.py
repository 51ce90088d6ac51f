"""The process that runs a verb's script."""
