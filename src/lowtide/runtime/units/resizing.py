"""Predicts the peak of a unit that follows the plan of another one with other sizes, from the bytes of their inputs.

Where lengths or numbers of boxes, nodes and words change from step to step, no two units are alike, and none would ever follow
a plan of its own. But they run the same operators, so decisions by operator fit all of them; only the bytes differ. How much
larger or smaller everything is follows at first from the bytes of the inputs, and is corrected by what units turn out to take.
A wrong prediction costs time, not memory: the forward runs under the allocator's cap, and before a backward starts, the bytes
that are live and the sizes that the forward's operators had say whether the plan still fits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, final

from lowtide.runtime.units.unit_signature import UnitSignature, input_bytes, likeness

LARGEST: Final = 1.25
"""A unit follows the plan of another one if its inputs are at most so many times as large."""
SAME: Final = 0.98
"""Of the recorded units, the smallest is chosen whose inputs are at least this share of the unit's."""
MARGIN: Final = 1.02
"""Factor by which units may be larger than the last ones were, in relation to their inputs."""
NEAR: Final = 0.1
"""Ratios of input bytes are near each other if they differ by at most this share: one unit then speaks for the other."""
REMEMBERED: Final = 16
"""Units of one likeness that are remembered."""
EXTREME: Final = 4.0
"""What units make does not grow more than this factor differently from their inputs."""
SHOWS: Final = 0.25
"""A rise shows how a unit's sizes matter if at least this share of it does not consist of gradients."""
STRAYED: Final = 2
"""Units that ran other operators than the plan of their like, after which none follows such a plan ..."""
TRIALS: Final = 4
"""... except one more for every so many that followed it to their end."""


@final
@dataclass(frozen=True, slots=True)
class Resizing:
    """The relation between a unit and the recorded one whose plan it follows.

    Attributes:
        ratio: bytes of its inputs, divided by those of the recorded unit.
        growth: factor by which what it makes is expected to be larger.
        fixed_bytes: gradients that it will allocate: they do not depend on the sizes of inputs.
    """

    ratio: float
    growth: float
    fixed_bytes: int

    def rise(self, recorded_bytes: int) -> int:
        """How far this unit is expected to rise above its base where the recorded one rose by ``recorded_bytes``."""
        fixed = self._fixed(recorded_bytes)
        return fixed + int(self.growth * (recorded_bytes - fixed))

    def recorded_rise(self, rise_bytes: int) -> int:
        """How far the recorded unit may rise, so that this one rises by no more than ``rise_bytes``."""
        fixed = self._fixed(rise_bytes)
        return fixed + int((rise_bytes - fixed) / self.growth)

    def _fixed(self, rise_bytes: int) -> int:
        """The part of a rise that has one size; none of a larger unit's, as gradients of sparse embeddings grow, too."""
        return 0 if self.growth > 1 else min(self.fixed_bytes, rise_bytes)

    def observed(self, recorded_bytes: int, rise_bytes: int) -> float | None:
        """The growth that turned out: the recorded unit's plan rose by the first, this unit by the second.

        None if that shows nothing, because most of it are gradients.
        """
        resized = recorded_bytes - self.fixed_bytes
        return (rise_bytes - self.fixed_bytes) / resized if resized > SHOWS * recorded_bytes else None


@final
class SizeGrowth:
    """What a run has learnt about units that follow plans of others with other sizes."""

    def __init__(self) -> None:
        """Start with no observations: what units make is then taken to grow as their inputs do."""
        self._seen: dict[Any, deque[tuple[float, float]]] = {}
        self._strayed: dict[Any, int] = {}
        self._followed: dict[Any, int] = {}

    def nearest(self, kind: UnitSignature, others: Iterable[UnitSignature]) -> UnitSignature | None:
        """Of units that differ only in sizes, the one whose plan suits ``kind`` best; None if all are much smaller."""
        sizes = {other: input_bytes(other) for other in others}
        if not sizes:
            return None
        mine = input_bytes(kind)
        enough = [other for other, size in sizes.items() if size >= SAME * mine]
        if enough:
            return min(enough, key=lambda other: sizes[other])
        largest = max(sizes, key=lambda other: sizes[other])
        return largest if mine <= LARGEST * sizes[largest] else None

    def relation(self, kind: UnitSignature, other: UnitSignature, fixed_bytes: int) -> Resizing:
        """The relation between a unit and the recorded one whose plan it is to follow."""
        ratio = max(1, input_bytes(kind)) / max(1, input_bytes(other))
        seen = self._seen.get(likeness(kind), ())
        near = [growth / before for before, growth in seen if abs(before - ratio) <= NEAR * ratio]
        correction = max(near) if near else max((growth / before for before, growth in seen), default=1.0)
        return Resizing(ratio, ratio * (correction if near else max(1.0, correction)) * MARGIN, fixed_bytes)

    def note(self, kind: UnitSignature, relation: Resizing, growth: float) -> None:
        """Note by which factor what a unit made was larger than what the recorded one made; extremes are cut off."""
        growth = min(max(growth, relation.ratio / EXTREME), relation.ratio * EXTREME)
        self._seen.setdefault(likeness(kind), deque(maxlen=REMEMBERED)).append((relation.ratio, growth))

    def followed(self, kind: UnitSignature) -> None:
        """A unit followed the plan of another one to its end."""
        key = likeness(kind)
        self._followed[key] = self._followed.get(key, 0) + 1

    def strayed(self, kind: UnitSignature) -> None:
        """A unit ran other operators than the plan of its like."""
        key = likeness(kind)
        self._strayed[key] = self._strayed.get(key, 0) + 1

    def may_follow(self, kind: UnitSignature) -> bool:
        """Whether units like this one may follow plans of others, because they run the same operators."""
        key = likeness(kind)
        return bool(kind.call) and self._strayed.get(key, 0) < STRAYED + self._followed.get(key, 0) // TRIALS
