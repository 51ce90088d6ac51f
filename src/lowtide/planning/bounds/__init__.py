"""What no plan can beat, with certificates."""
