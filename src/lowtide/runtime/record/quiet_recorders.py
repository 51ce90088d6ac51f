"""Recorders that record no events: for units that need no trace, and for the time between units."""

from __future__ import annotations

from typing import Final, final

from lowtide.runtime.record.trace_recorder import TraceRecorder
from lowtide.runtime.storage.value import Value


@final
class OwnershipTracker(TraceRecorder):
    """Tracks which values belong to a unit, as the eviction policy requires, without recording a trace."""

    notes = False

    def need(self, value: Value) -> None:
        """Backward asks for a value."""

    def before_op(self) -> None:
        """An operator begins."""

    def begin_window(self) -> None:
        """Ignored: no peaks are recorded."""

    def forget_last_look(self) -> None:
        """Nothing was recorded that had to be undone."""


@final
class NullRecorder(TraceRecorder):
    """The recorder between units; ignores everything that it is told."""

    notes = False
    active = False

    def __init__(self) -> None:
        """Belong to no unit."""

    def born(self, value: Value, slot: int) -> None:
        """A value was made."""

    def version(self, old: Value, new: Value, slot: int) -> None:
        """A value was overwritten."""

    def back(self, value: Value) -> None:
        """A dropped value's bytes are resident again."""

    def gone(self, value: Value) -> None:
        """A value's storage died."""

    def unheld(self, value: Value) -> None:
        """Only autograd holds a value."""

    def saved(self, value: Value) -> None:
        """Autograd saves a tensor of a value."""

    def anchored(self, value: Value) -> None:
        """Lowtide holds a value for replays."""

    def released(self, value: Value) -> None:
        """Autograd releases a saved tensor of a value."""

    def taint(self, value: Value) -> None:
        """Foreign code has a pointer to a value's bytes."""

    def need(self, value: Value) -> None:
        """Backward asks for a value."""

    def before_op(self) -> None:
        """An operator begins."""

    def forget_last_look(self) -> None:
        """Nothing was recorded that had to be undone."""

    def begin_window(self) -> None:
        """Ignored: no peaks are recorded."""

    def close(self) -> None:
        """Nothing has to be closed."""


NO_UNIT: Final = NullRecorder()
"""The recorder between units."""
