"""Runs planned units with as little interception as their plan needs."""
