"""Interception of torch: dispatch modes, hooks, patched functions, and the phases of a step."""
