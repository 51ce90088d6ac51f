"""What each unit of a run does: record, follow a plan, or hold the budget on line."""
