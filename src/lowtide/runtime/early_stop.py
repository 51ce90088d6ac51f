"""The exception that ends a script once the requested number of steps has run."""

from __future__ import annotations


class StepLimitReached(SystemExit):
    """Raised where the next step would begin; a `SystemExit`, which a script's ``except Exception`` does not catch."""

    def __init__(self) -> None:
        """Exit with code 0."""
        super().__init__(0)
