"""Following a plan with as little interception as it needs."""
