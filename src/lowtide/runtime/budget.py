"""The budget in bytes: the limit for plans, and the limit that the online policy enforces now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

SLACK_BYTES: Final = 16 << 10
"""Bytes left free for what the interception itself takes from torch's allocator: a generator's state."""


@final
@dataclass(slots=True)
class Budget:
    """One per run; the planner and the evictor read the same object.

    Attributes:
        bytes: the limit for plans; 0 without a budget, or while a share is not yet known in bytes.
        limit_bytes: the limit that the online policy enforces now: the budget, minus what unseen code is about to take; or,
            while a share is not yet known in bytes, the memory that the machine has. 0 means no limit.
        is_sought: whether the bytes are what plans need: then each step is judged by those in force when it ended.
    """

    bytes: int = 0
    limit_bytes: int = 0
    is_sought: bool = False

    def put(self, size: int) -> None:
        """Set the budget: plans and the online policy stay below ``size`` bytes from now on."""
        self.bytes = self.limit_bytes = size

    def limit_to(self, size: int) -> None:
        """Limit only the online policy to ``size`` bytes, until the budget is known."""
        self.limit_bytes = size

    def lift(self) -> None:
        """Remove the online policy's limit; figures still report the budget."""
        self.limit_bytes = 0
