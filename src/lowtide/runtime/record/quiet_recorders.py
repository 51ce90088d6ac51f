"""Recorders that note no events: of a unit that is not recorded, and of no unit."""

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
        """What rises is nobody's business."""

    def forget_last_look(self) -> None:
        """There was none."""


@final
class NullRecorder(TraceRecorder):
    """Between units: whatever it is told, it notes nothing."""

    notes = False
    active = False

    def __init__(self) -> None:
        """It has no unit."""

    def born(self, value: Value, slot: int) -> None:
        """A value was made."""

    def version(self, old: Value, new: Value, slot: int) -> None:
        """A value was overwritten."""

    def back(self, value: Value) -> None:
        """A dropped value's bytes are resident again."""

    def gone(self, value: Value) -> None:
        """A value's storage died."""

    def unheld(self, value: Value) -> None:
        """Nothing but autograd holds a value."""

    def saved(self, value: Value) -> None:
        """Autograd saves a tensor of a value."""

    def anchored(self, value: Value) -> None:
        """We hold a value for replays."""

    def released(self, value: Value) -> None:
        """Autograd lets go of a saved tensor."""

    def taint(self, value: Value) -> None:
        """Foreign code has a pointer to a value's bytes."""

    def need(self, value: Value) -> None:
        """Backward asks for a value."""

    def before_op(self) -> None:
        """An operator begins."""

    def forget_last_look(self) -> None:
        """There was none."""

    def begin_window(self) -> None:
        """What rises is nobody's business."""

    def close(self) -> None:
        """There is nothing to close."""


NO_UNIT: Final = NullRecorder()
"""The recorder between units."""
