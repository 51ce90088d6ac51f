"""Where units begin and end: choosing how each runs, installing the interception for it, and learning from it."""
