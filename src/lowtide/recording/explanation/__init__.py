"""What a recording says, derived once, for reports that only render it."""
