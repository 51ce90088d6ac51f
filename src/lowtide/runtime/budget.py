"""The budget in bytes: what plans stay below, and what the policy on line holds at the moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

SLACK_BYTES: Final = 16 << 10
"""Left free for what the interception itself takes from torch's allocator: a generator's state."""


@final
@dataclass(slots=True)
class Budget:
    """One per run; the planner and the evictor read the same object.

    Attributes:
        bytes: what plans stay below; 0 where there is no budget, or where a share is not known yet.
        limit_bytes: what the policy on line holds at the moment: the budget, less what unseen code is about to take; or,
            until a share is known, what the machine has. 0 for no limit.
    """

    bytes: int = 0
    limit_bytes: int = 0

    def put(self, size: int) -> None:
        """From now on plans and the policy on line hold so many bytes."""
        self.bytes = self.limit_bytes = size

    def limit_to(self, size: int) -> None:
        """Until the budget is known the policy on line holds so many bytes."""
        self.limit_bytes = size

    def lift(self) -> None:
        """The policy on line holds nothing any more; figures still tell the budget."""
        self.limit_bytes = 0
