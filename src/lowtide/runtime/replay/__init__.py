"""Making a dropped value again, bit for bit."""
