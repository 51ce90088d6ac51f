"""The leak laboratory: watches programs in fresh processes and judges their growth."""
