"""The recordings of each kind of unit, and how far plans made from them can be trusted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final, final

from lowtide.runtime.units.recorded_unit import RecordedUnit, near
from lowtide.runtime.units.unit_signature import UnitSignature, are_alike

SEEN_TWICE: Final = 2
"""Recordings of a kind of unit after which the nearest one is trusted on another base: its shift is then a mere offset."""
SURPRISES: Final = 2
"""Units that left their plan half-way, or crossed the budget by little, after which their kind always runs with the full
interception. One unit suffices if it crossed the budget by more than the tolerance."""
RECORDINGS: Final = 5
"""Maximum number of recordings of a kind of unit whose predictions keep being off."""
CROSSED: Final = 2
"""More steps than this must have crossed the budget, and more than have held it, before "no plan found" is believed of a
recording that began with retained graphs, or of one of several kinds of units that take turns."""
KINDS: Final = 64
"""Kinds of units whose recordings are kept; the oldest kind is discarded first."""


@final
class PlanCache:
    """The recordings of one run, by kind of unit."""

    def __init__(self) -> None:
        """Start without recordings."""
        self._entries: dict[UnitSignature, list[RecordedUnit]] = {}
        self._recorded: dict[UnitSignature, int] = {}
        self._kept = 0
        self._surprises: dict[UnitSignature, int] = {}
        self._misses: dict[UnitSignature, int] = {}

    def __iter__(self) -> Iterator[RecordedUnit]:
        """Iterate over all recordings."""
        return (entry for entries in self._entries.values() for entry in entries)

    def has(self, kind: UnitSignature) -> bool:
        """Whether a unit of exactly this kind was recorded."""
        return bool(self._entries.get(kind))

    def nearest(self, kind: UnitSignature, base_bytes: int, *, tried: bool = False) -> RecordedUnit | None:
        """The recording whose base is nearest, of this kind of unit or else of its nearest sibling; None if there is none.

        Args:
            kind: the kind of unit.
            base_bytes: live bytes where the unit begins.
            tried: whether recordings of earlier runs that no unit of this run has borne out are left out.
        """
        for other in (kind, *kind.siblings()):
            found = [e for e in self._entries.get(other, ()) if not (tried and e.is_untried)]
            if found:
                return min(found, key=lambda e: abs(e.trace.base_bytes - base_bytes))
        return None

    def alike(self, kind: UnitSignature) -> list[UnitSignature]:
        """The recorded kinds that differ from this one only in the sizes of their tensors."""
        return [other for other, entries in self._entries.items() if entries and are_alike(kind, other)]

    def forget_alike(self, kind: UnitSignature) -> None:
        """Discard the recordings of all kinds like this one: their operators are no longer those that run."""
        for other in self.alike(kind):
            del self._entries[other]

    def discard(self, kind: UnitSignature) -> None:
        """Discard the recordings of a kind."""
        self._entries.pop(kind, None)

    def keep(self, kind: UnitSignature, entry: RecordedUnit) -> None:
        """Keep the recording of a unit in place of those of the same kind on the same base."""
        if len(self._entries) >= KINDS and kind not in self._entries:
            self._entries.pop(next(iter(self._entries)))
        if not entry.nth:
            self._kept += 1
            entry.nth = self._kept
        base, peak = entry.trace.base_bytes, entry.problem.plain_peak
        others = [e for e in self._entries.get(kind, ()) if not near(e.trace.base_bytes, base, peak)]
        self._entries[kind] = [*others[-(RECORDINGS - 1):], entry]
        self._recorded[kind] = self._recorded.get(kind, 0) + 1

    def adopt(self, kind: UnitSignature, entry: RecordedUnit) -> None:
        """Keep a recording of an earlier run, which stands for several: another base is a mere offset."""
        self.keep(kind, entry)
        self._recorded[kind] = max(SEEN_TWICE, self._recorded[kind])

    def reject(self, entry: RecordedUnit) -> None:
        """Discard a recording of an earlier run: units of this run are others, or no plan of it fits."""
        for kind in [kind for kind, entries in self._entries.items() if any(e is entry for e in entries)]:
            self.discard(kind)
            self._recorded.pop(kind, None)

    def latest(self) -> Iterator[tuple[UnitSignature, RecordedUnit]]:
        """Each kind with its latest recording."""
        return ((kind, entries[-1]) for kind, entries in self._entries.items() if entries)

    def is_worn(self, kind: UnitSignature) -> bool:
        """Whether a kind was recorded often enough for another base to be a mere offset."""
        return self._recorded.get(kind, 0) >= SEEN_TWICE

    def is_warm(self, kind: UnitSignature) -> bool:
        """Whether the last recording of a kind is not its first: by then libraries have allocated the memory that they keep.

        Recordings of the siblings count, too, and of the kind without levers that take gradients or with checkpoints as they
        are written: these units run the same operators.
        """
        others = (kind, replace(kind, engaged=False), replace(kind, engaged=False, plain_checkpoints=False))
        alike = {other for k in others for other in (k, *k.siblings())}
        return sum(self._recorded.get(k, 0) for k in alike) >= SEEN_TWICE

    def missed(self, kind: UnitSignature, entry: RecordedUnit) -> None:
        """A plan's prediction was off: discard its recording so that a new one is made, unless that happened too often."""
        misses = self._misses[kind] = self._misses.get(kind, 0) + 1
        if misses < RECORDINGS:
            self._entries[kind] = [e for e in self._entries.get(kind, ()) if e is not entry]  # perhaps forgotten meanwhile
            self._recorded[kind] = min(self._recorded.get(kind, 0), SEEN_TWICE - 1)

    def surprised(self, kind: UnitSignature, *, decidedly: bool = False) -> None:
        """A unit did what no recording of its kind shows; if ``decidedly``, its kind follows no plan from now on."""
        self._surprises[kind] = SURPRISES if decidedly else self._surprises.get(kind, 0) + 1

    def varied(self, kind: UnitSignature) -> None:
        """A unit followed its plan, but also ran other operators."""
        self._surprises.setdefault(kind, 0)

    def is_surprising(self, kind: UnitSignature) -> bool:
        """Whether a unit of this kind ever surprised, or varied."""
        return kind in self._surprises

    def is_wild(self, kind: UnitSignature) -> bool:
        """Whether units of this kind surprised too often to follow plans."""
        return self._surprises.get(kind, 0) >= SURPRISES


@final
class BudgetCrossings:
    """Counts of steps that crossed the budget: all of them, and by kind of unit those in which it had no plan."""

    def __init__(self) -> None:
        """Start without steps."""
        self._all = self._steps = 0
        self._without_plan: set[UnitSignature] = set()
        self._of: dict[UnitSignature, tuple[int, int]] = {}

    @property
    def any(self) -> bool:
        """Whether any step but the first crossed the budget."""
        return self._all > 0

    def without_plan(self, kind: UnitSignature) -> None:
        """No plan was found for a unit of this kind in the running step."""
        self._without_plan.add(kind)

    def step_ends(self, *, crossed: bool) -> None:
        """Count a step that is over. The first step ran before anything was known, so callers never report it as crossed."""
        self._all += crossed
        self._steps += 1
        for kind in self._without_plan:
            over, steps = self._of.get(kind, (0, 0))
            self._of[kind] = over + crossed, steps + 1
        self._without_plan = set()

    def mostly(self, kind: UnitSignature, *, at_least: int) -> bool:
        """Whether budget crossings are the rule: in all steps, or in those in which such a unit had no plan.

        Args:
            kind: of the unit.
            at_least: of all steps, more than this many must have crossed, and more than have held the budget. Of the steps
                in which the unit had no plan, more than :data:`CROSSED` must have, and more than have held it.
        """
        over, steps = self._of.get(kind, (0, 0))
        return self._all > max(at_least, self._steps - 1 - self._all) or over > max(CROSSED, steps - over)
