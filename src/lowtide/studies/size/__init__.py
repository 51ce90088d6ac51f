"""How much memory a script needs: the least that works, the batch that fits, and what larger sizes would take."""
