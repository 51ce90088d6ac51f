"""The leak laboratory: programs watched in fresh processes, and what their growth says."""
