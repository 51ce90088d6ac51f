"""All exceptions that Lowtide raises, and its special exit codes.

    LowtideError
    ├── UsageError            bad options or input; the command line exits with 2
    │   ├── SizeError         a size that cannot be read
    │   ├── PlanFileError     a plan file that cannot be used
    │   ├── GraphError        a graph or a schedule file that cannot be used
    │   └── RecordingError    a recording that cannot be read or written
    ├── CheckpointError       a checkpoint that cannot be written or restored; earlier checkpoints are intact
    │   └── StateError        an object whose state cannot be saved, or does not match the saved state
    ├── MicroBatchError       a batch that does not fit even one sample at a time, or cannot be split
    ├── ReaderError           data that cannot be read, or a reader that fails
    ├── BudgetError           the budget cannot be held; the command line exits with 1
    ├── LeverError            a lever is no longer exact for what the script does; raised instead of a wrong result
    ├── ReplayError           a dropped value cannot be recomputed bit for bit; raised instead of a wrong gradient
    └── StructureError        a planning problem, or a move in it, that breaks the rules of the game

Every message says what went wrong, where, and what to do about it.
"""

from __future__ import annotations

from typing import Final

NOT_HELD: Final = 3
"""Exit code of ``lowtide run`` when the script succeeded but the budget was not held."""
INTERRUPTED: Final = 130
"""Exit code of the command line after Ctrl-C, by the shells' convention: 128 plus the signal's number."""


class LowtideError(Exception):
    """Base class of all errors raised by Lowtide itself."""


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
        budget_bytes: the requested budget.
        bound_bytes: a proven lower bound on the peak of any plan that only recomputes and offloads saved values.
        lowest_bytes: the lowest peak among the plans found; the budget is below it, or below the bound.
    """

    def __init__(self, message: str, *, budget_bytes: int, bound_bytes: int, lowest_bytes: int) -> None:
        """Store the figures with the message."""
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.bound_bytes = bound_bytes
        self.lowest_bytes = lowest_bytes


class LeverError(LowtideError):
    """A lever is no longer exact for what the script does, or cannot be used as requested."""


class ReplayError(LowtideError):
    """A dropped value cannot be recomputed bit for bit."""


class CheckpointError(LowtideError):
    """A checkpoint that cannot be written or restored."""


class StateError(CheckpointError):
    """An object whose state cannot be saved, or does not match the saved state."""


class MicroBatchError(LowtideError):
    """A batch that does not fit even one sample at a time, or that cannot be split."""


class ReaderError(LowtideError):
    """Data that cannot be read, or a reader that fails."""


class StructureError(LowtideError):
    """A planning problem, or a move in it, that breaks the rules of the game."""
