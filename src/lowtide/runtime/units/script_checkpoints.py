"""Which units run with the script's own checkpoints plain, so that their plan decides what is recomputed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, final

from lowtide.base.trace import Op
from lowtide.runtime.intercept.checkpoint_calls import CheckpointCalls
from lowtide.runtime.units.plan_cache import PlanCache
from lowtide.runtime.units.recorded_unit import Baseline, RecordedUnit
from lowtide.runtime.units.unit_signature import UnitSignature, likeness

WATCHED: Final = 3
"""Units of one likeness whose checkpoints are watched at most, until one of them may be plain."""
WATCHED_LATER: Final = 16
"""The same for calls that earlier units did not make."""


@final
@dataclass(slots=True)
class _Known:
    """What is known about units of one likeness.

    Attributes:
        watched: in how many of them checkpoints were watched.
        plain: whether their checkpoints are plain.
        written_kind: a kind of unit that was recorded as written.
        written: its recording.
        again_seconds: seconds that the second runs took in it which plain checkpoints leave out.
        baseline: what units take as they are written, in relation to what they take if their checkpoints are plain.
    """

    watched: int = 0
    plain: bool = False
    written_kind: UnitSignature | None = None
    written: RecordedUnit | None = None
    again_seconds: float = 0.0
    baseline: Baseline | None = None


@final
class ScriptCheckpoints:
    """Decides, by likeness of units, whether their checkpoints are plain; one per runtime.

    The first unit runs as it is written: this shows which of its calls may be plain, and what the script takes without
    Lowtide.
    """

    def __init__(self, calls: CheckpointCalls, recordings: PlanCache) -> None:
        """Start with every call as it is written."""
        self._calls, self._recordings = calls, recordings
        self._known: dict[Any, _Known] = {}

    def _of(self, kind: UnitSignature) -> _Known:
        return self._known.setdefault(_scope(kind), _Known())

    def as_it_runs(self, kind: UnitSignature) -> UnitSignature:
        """The kind of a unit that begins, given its kind as it is written."""
        return replace(kind, plain_checkpoints=bool(kind.call) and self._of(kind).plain)

    def unit_begins(self, kind: UnitSignature) -> None:
        """A unit begins that is to run as its kind says."""
        watches = bool(kind.call) and self._of(kind).watched < (WATCHED_LATER if kind.plain_checkpoints else WATCHED)
        self._calls.unit_begins(
            _scope(kind), plain=kind.plain_checkpoints, watches=watches, accumulates=kind.accumulates
        )

    def unit_ends(self, kind: UnitSignature, base_bytes: int) -> None:
        """A unit has ended, and its recording is kept."""
        known = self._of(kind)
        known.watched += self._calls.watches
        again = self._calls.unit_ends()
        if kind.plain_checkpoints or not again:
            return
        written = self._recordings.nearest(kind, base_bytes)
        if written is not None:
            known.plain, known.written_kind, known.written = True, kind, written
            known.again_seconds = sum(
                e.seconds for start, end in again for e in written.trace.events[start:end] if isinstance(e, Op)
            )

    def recorded(self, kind: UnitSignature, entry: RecordedUnit) -> None:
        """A unit was recorded: note in its recording what such units take as they are written."""
        known = self._of(kind)
        if not kind.plain_checkpoints or known.written is None:
            return
        if known.baseline is None:
            known.baseline = Baseline.of(known.written, entry, known.again_seconds)
            assert known.written_kind is not None
            self._recordings.discard(known.written_kind)  # its plans are for other operators
        entry.baseline = known.baseline

    def written(self, kind: UnitSignature) -> RecordedUnit | None:
        """The recording of a unit of this kind, or of a sibling, as it is written; None if there is none."""
        known, as_written = self._of(kind), replace(kind, plain_checkpoints=False)
        return known.written if known.written_kind in (as_written, *as_written.siblings()) else None

    def give_up(self, kind: UnitSignature) -> UnitSignature:
        """Leave the checkpoints of such units as they are written from now on; returns the kind that a unit has then."""
        known = self._of(kind)
        known.plain, known.watched = False, WATCHED_LATER
        if known.written_kind is not None and known.written is not None:
            self._recordings.keep(known.written_kind, known.written)
        return replace(kind, plain_checkpoints=False)


def _scope(kind: UnitSignature) -> Any:
    """What units have in common whose checkpoints may be plain alike."""
    return likeness(replace(kind, accumulates=False, engaged=False, after=0, plain_checkpoints=False))
