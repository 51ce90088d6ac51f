"""The end of a script whose first steps were all that was wanted."""

from __future__ import annotations


class StepLimitReached(SystemExit):
    """Raised where the next step would begin; scripts do not catch it by ``except Exception``."""

    def __init__(self) -> None:
        """Success."""
        super().__init__(0)
