"""Units of training as the runtime sees them: how one runs, what was recorded of it, what is known of its kind."""
