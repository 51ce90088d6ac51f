"""What was recorded of each kind of unit, and how far plans that were made from it are to be trusted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final, final

from lowtide.runtime.units.recorded_unit import RecordedUnit, near
from lowtide.runtime.units.unit_signature import UnitSignature, is_smaller

SEEN_TWICE: Final = 2
"""PlanCache of a kind of unit after which the nearest one is trusted on another base: its shift is then only an offset."""
SURPRISES: Final = 2
"""Units that left their plan half-way (one, if it crossed the budget) after which this kind of unit is always run with the
full interception."""
RECORDINGS: Final = 5
"""PlanCache at most of a kind of unit whose predictions keep being off."""
CROSSED: Final = 2
"""How many steps must exceed the budget (and more than meet it) before "no plan" is believed of a recording that began with
retained graphs, or of one of several kinds of units in turn."""
KINDS: Final = 64
"""Kinds of units whose plans are kept."""


@final
class PlanCache:
    """Of one run."""

    def __init__(self) -> None:
        """There are none."""
        self._entries: dict[UnitSignature, list[RecordedUnit]] = {}
        self._recorded: dict[UnitSignature, int] = {}
        self._surprises: dict[UnitSignature, int] = {}
        self._misses: dict[UnitSignature, int] = {}

    def __iter__(self) -> Iterator[RecordedUnit]:
        """All of them."""
        return (entry for entries in self._entries.values() for entry in entries)

    def has(self, kind: UnitSignature) -> bool:
        """Whether a unit of exactly this kind was recorded."""
        return bool(self._entries.get(kind))

    def nearest(self, kind: UnitSignature, base_bytes: int) -> RecordedUnit | None:
        """The recording of this kind of unit, or of nearly this kind, whose base is nearest."""
        found = next((e for k in (kind, *kind.siblings()) if (e := self._entries.get(k))), None)
        return min(found, key=lambda e: abs(e.trace.base_bytes - base_bytes)) if found else None

    def larger(self, kind: UnitSignature, base_bytes: int) -> RecordedUnit | None:
        """The recording of the least of all larger units, on no lower base."""
        known = (e for other, entries in self._entries.items() if is_smaller(kind, other) for e in entries)
        fit = [e for e in known
               if base_bytes <= (its := e.trace.base_bytes) or near(base_bytes, its, e.problem.plain_peak)]
        return min(fit, key=lambda e: e.problem.plain_peak, default=None)

    def keep(self, kind: UnitSignature, entry: RecordedUnit) -> None:
        """A unit was recorded: it takes the place of those on the same base."""
        if len(self._entries) >= KINDS and kind not in self._entries:
            self._entries.pop(next(iter(self._entries)))
        base, peak = entry.trace.base_bytes, entry.problem.plain_peak
        others = [e for e in self._entries.get(kind, ()) if not near(e.trace.base_bytes, base, peak)]
        self._entries[kind] = [*others[-(RECORDINGS - 1):], entry]
        self._recorded[kind] = self._recorded.get(kind, 0) + 1

    def is_worn(self, kind: UnitSignature) -> bool:
        """Whether a kind was recorded often enough for another base to be only an offset."""
        return self._recorded.get(kind, 0) >= SEEN_TWICE

    def is_warm(self, kind: UnitSignature) -> bool:
        """Whether the last recording of a kind is not its first: libraries have the memory by then that they keep.

        A unit whose gradients are moved, or one that accumulates, runs the operators of one that does not.
        """
        alike = {other for k in (kind, replace(kind, engaged=False)) for other in (k, *k.siblings())}
        return sum(self._recorded.get(k, 0) for k in alike) >= SEEN_TWICE

    def missed(self, kind: UnitSignature, entry: RecordedUnit) -> None:
        """A plan's prediction was off: its recording is made again, unless that happened too often."""
        misses = self._misses[kind] = self._misses.get(kind, 0) + 1
        if misses < RECORDINGS:
            self._entries[kind] = [e for e in self._entries[kind] if e is not entry]
            self._recorded[kind] = min(self._recorded[kind], SEEN_TWICE - 1)

    def surprised(self, kind: UnitSignature, *, decidedly: bool = False) -> None:
        """A unit did what the recordings of its kind have not."""
        self._surprises[kind] = SURPRISES if decidedly else self._surprises.get(kind, 0) + 1

    def is_surprising(self, kind: UnitSignature) -> bool:
        """Whether a unit of this kind ever did."""
        return kind in self._surprises

    def is_wild(self, kind: UnitSignature) -> bool:
        """Whether units of this kind did so too often for plans to be followed."""
        return self._surprises.get(kind, 0) >= SURPRISES


@final
class BudgetCrossings:
    """Steps that crossed the budget: all of them, and those with a kind of unit for which no plan was found."""

    def __init__(self) -> None:
        """None yet."""
        self._all = self._steps = 0
        self._without_plan: set[UnitSignature] = set()
        self._of: dict[UnitSignature, tuple[int, int]] = {}

    @property
    def any(self) -> bool:
        """Whether any step but the first did."""
        return self._all > 0

    def without_plan(self, kind: UnitSignature) -> None:
        """In the step that runs no plan was found for such a unit."""
        self._without_plan.add(kind)

    def step_ends(self, *, crossed: bool) -> None:
        """A step is over; the first one is not yet known, and does not count."""
        self._all += crossed
        self._steps += 1
        for kind in self._without_plan:
            over, steps = self._of.get(kind, (0, 0))
            self._of[kind] = over + crossed, steps + 1
        self._without_plan = set()

    def mostly(self, kind: UnitSignature, *, at_least: int) -> bool:
        """Whether steps cross more often than not, more than so many times; or those with such a unit do."""
        over, steps = self._of.get(kind, (0, 0))
        return self._all > max(at_least, self._steps - 1 - self._all) or over > max(CROSSED, steps - over)
