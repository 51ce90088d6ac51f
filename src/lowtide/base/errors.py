"""Everything Lowtide can complain of.

    LowtideError
    ├── UsageError            bad options or input; the command line exits with 2
    │   ├── SizeError         a size that cannot be read
    │   ├── PlanFileError     a plan file that cannot be used
    │   ├── GraphError        a graph or a schedule file that cannot be used
    │   └── RecordingError    a recording that cannot be read or written
    ├── CheckpointError       a checkpoint that cannot be written or put back; what was saved before is whole
    │   └── StateError        an object whose state cannot be saved, or does not fit what was saved
    ├── MicroBatchError       a batch that does not fit even one sample at a time, or cannot be split
    ├── ReaderError           data that cannot be read, or a reader that fails
    ├── BudgetError           the budget cannot be held; the command line exits with 1
    ├── LeverError            a lever is no longer exact for what the script does; raised instead of a wrong result
    ├── ReplayError           a dropped value cannot be made again bit for bit; raised instead of a wrong gradient
    └── StructureError        a problem or a decision that breaks the rules of the game

Every message says what, where, and what to do about it.
"""

from __future__ import annotations

from typing import Final

NOT_HELD: Final = 3
"""What ``lowtide run`` exits with where the script ended well but the budget was not held."""
INTERRUPTED: Final = 130
"""What the command line exits with after Ctrl-C, as shells count it: 128 and the signal's number."""


class LowtideError(Exception):
    """Root of all errors raised by Lowtide itself."""


class UsageError(LowtideError):
    """Bad options or input."""


class SizeError(UsageError):
    """A size that cannot be read."""


class PlanFileError(UsageError):
    """A plan file that cannot be used."""


class GraphError(UsageError):
    """A graph or a schedule file that cannot be used."""


class RecordingError(UsageError):
    """A recording that cannot be read or written."""


class BudgetError(LowtideError):
    """The budget cannot be held.

    Attributes:
        budget_bytes: what was asked for.
        bound_bytes: a proven lower bound on the peak of any plan that only recomputes and moves saved values.
        lowest_bytes: the lowest peak of any plan that was found; the budget is below it, or below the bound.
    """

    def __init__(self, message: str, *, budget_bytes: int, bound_bytes: int, lowest_bytes: int) -> None:
        """Keep the figures beside the message."""
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.bound_bytes = bound_bytes
        self.lowest_bytes = lowest_bytes


class LeverError(LowtideError):
    """A lever is no longer exact for what the script does, or cannot be used as asked."""


class ReplayError(LowtideError):
    """A dropped value cannot be made again bit for bit."""


class CheckpointError(LowtideError):
    """A checkpoint that cannot be written or put back."""


class StateError(CheckpointError):
    """An object whose state cannot be saved, or does not fit what was saved."""


class MicroBatchError(LowtideError):
    """A batch that does not fit even one sample at a time, or that cannot be split."""


class ReaderError(LowtideError):
    """Data that cannot be read, or a reader that fails."""


class StructureError(LowtideError):
    """A problem or a decision that breaks the rules of the game."""
