"""Where torch is intercepted: dispatch modes, hooks, patched functions, phases of a step."""
