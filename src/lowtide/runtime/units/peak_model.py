"""How far units rise above their base when nothing is let go, by the sizes that they are given.

Where lengths change from step to step no two units are alike, and none would ever be run by a plan. But a unit whose sizes are
at most those of a known one rises no higher, and one that is a little larger not by more than the square of what its sizes
have grown by; what was seen to go beyond that is added. Where that much fits into the budget, nothing needs to be intercepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, final

from lowtide.runtime.units.unit_signature import UnitSignature, sizes_of

CONFIRMED = 4
"""Units that must have been compared with others before there is a rule."""
UNSTEADY = 2.0
"""Units of the same sizes that do not always run the same operators: the next may rise so many times as high as any did."""
TOLERANCE_SHARE = 0.05
"""A smaller unit may rise higher by this share, ..."""
TOLERANCE_BYTES = 64 << 10
"""... or by so much; where one was seen to rise higher still, all may."""
STRANGERS = 8
"""Units in a row of kinds never met before after which one is recorded at its second sight, or if it is larger than others."""
GROWTH = 2.0
"""Sizes that have grown by more than this, multiplied up, say nothing."""
REMEMBERED = 4096
"""Kinds that are known again."""
STRAYED = 2
"""Units that left the plan of a larger one, or rose above it, after which none of their like follows such a plan."""
PROFILES = 64
"""Profiles that are kept."""
CALLS = 64
"""Units of more root calls than this are not told apart."""

Calls = tuple[tuple[Any, tuple[int, ...]], ...]
"""Per root call of a unit what it is apart from sizes, and all sizes of the tensors that it is given."""


class _Rise(NamedTuple):
    """How far a unit rose, and the gradients that were there when it began."""

    bytes: int
    gradient_bytes: int


@final
class PeakModel:
    """What is known of the units of one run."""

    def __init__(self) -> None:
        """Nothing is known."""
        self._known: dict[Any, dict[Calls, _Rise]] = {}
        self._confirmed: dict[Any, int] = {}
        self._again: dict[Any, int] = {}
        self._slack: dict[Any, float] = {}
        self._broken: set[Any] = set()
        self._strayed: dict[Any, int] = {}
        self._met: dict[UnitSignature, None] = {}
        self._strangers = 0

    def note(self, kinds: Sequence[UnitSignature], rise_bytes: int, gradient_bytes: int) -> None:
        """A unit of these root calls, which found such gradients, rose so far, or would have, had nothing been let go."""
        calls = _calls(kinds)
        if calls is None:
            return
        key = calls[0][0]
        known = self._known.setdefault(key, {})
        others = [(other, rise.bytes) for other, rise in known.items() if other != calls]
        limits = [(_limit(rise, calls, other), rise_bytes) for other, rise in others]
        limits += [(_limit(rise_bytes, other, calls), rise) for other, rise in others]
        over = [rise / limit for limit, rise in limits if limit is not None]
        if over:
            self._confirmed[key] = self._confirmed.get(key, 0) + 1
            self._slack[key] = max(self._slack.get(key, 1.0), *over)
        self._again[key] = self._again.get(key, 0) + (calls in known)
        former = known.get(calls, _Rise(0, 0))
        known[calls] = _Rise(max(rise_bytes, former.bytes), max(gradient_bytes, former.gradient_bytes))
        if len(known) > PROFILES:
            known.pop(next(iter(known)))

    def most(self, kinds: Sequence[UnitSignature], gradient_bytes: int, *, unsteady: bool = False) -> int | None:
        """Bytes that a unit which begins with these root calls rises by at most; None where no rule says.

        Gradients that are not there, though they were when another unit began, are made within it.

        Args:
            kinds: the root calls.
            gradient_bytes: what gradients hold when it begins.
            unsteady: whether such units differ though their sizes do not: what they are given decides (packed sequences).
        """
        calls = _calls(kinds)
        key = None if calls is None else calls[0][0]
        seen = (self._again if unsteady else self._confirmed).get(key, 0)
        if calls is None or key in self._broken or seen < CONFIRMED:
            return None
        slack = self._slack.get(key, 1.0) * (UNSTEADY if unsteady else 1.0)
        known = self._known[key].items()
        found = ((_limit(rise.bytes, calls, other), max(0, rise.gradient_bytes - gradient_bytes)) for other, rise in known)
        limits = [int(slack * limit) + missing for limit, missing in found if limit is not None]
        if unsteady:
            return max(limits, default=None)
        return min(limits, default=None)

    def worth_recording(self, kind: UnitSignature) -> bool:
        """Whether a unit of a kind that has no recording is to get one, which takes time."""
        again = kind in self._met
        self._met[kind] = None
        if len(self._met) > REMEMBERED:
            self._met.pop(next(iter(self._met)))
        self._strangers += 1
        calls = _calls([kind])
        known = {} if calls is None else self._known.get(calls[0][0], {})
        larger = calls is not None and any(_growth(calls, other) == 1 for other in known)
        return again or self._strangers <= STRANGERS or not larger

    def familiar(self) -> None:
        """A unit of a kind that was recorded came again."""
        self._strangers = 0

    def strayed(self, kind: UnitSignature) -> None:
        """A unit did not follow the plan of a larger one to its end, or rose above it."""
        alike, _ = sizes_of(kind)
        self._strayed[alike] = self._strayed.get(alike, 0) + 1

    def may_follow(self, kind: UnitSignature) -> bool:
        """Whether units like this one run the operators of larger ones."""
        return bool(kind.call) and self._strayed.get(sizes_of(kind)[0], 0) < STRAYED

    def broke(self, kinds: Sequence[UnitSignature]) -> None:
        """A unit that was expected to fit did not."""
        calls = _calls(kinds)
        if calls is not None:
            self._broken.add(calls[0][0])


def _limit(rise_bytes: int, calls: Calls, other: Calls) -> int | None:
    """Bound a unit's rise above its base by the rise of a similar unit; None if the two cannot be compared."""
    growth = _growth(calls, other)
    if growth is None or growth > GROWTH:
        return None
    return int(rise_bytes * growth**2) + max(TOLERANCE_BYTES, int(TOLERANCE_SHARE * rise_bytes))


def _calls(kinds: Sequence[UnitSignature]) -> Calls | None:
    """The root calls of a unit; None where there is none, too many, or one whose sizes are no numbers."""
    if not 0 < len(kinds) <= CALLS or not all(kind.call for kind in kinds):
        return None
    calls = tuple(sizes_of(kind) for kind in kinds)
    numbers = all(type(size) is int for _, sizes in calls for size in sizes)  # a nested tensor's are not
    return calls if numbers else None


def _growth(calls: Calls, other: Calls) -> float | None:
    """By how much the sizes of one unit exceed those of another, multiplied up; None where the calls are not alike."""
    if len(calls) > len(other) or any(a != b for (a, _), (b, _) in zip(calls, other, strict=False)):
        return None
    growth = 1.0
    for (_, xs), (_, ys) in zip(calls, other, strict=False):
        for x, y in zip(xs, ys, strict=True):
            growth *= max(1.0, x / max(1, y))
    return growth
