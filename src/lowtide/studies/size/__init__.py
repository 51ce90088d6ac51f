"""Studies of how much memory a script needs: the minimum, the batch that fits, and predictions for larger sizes."""
