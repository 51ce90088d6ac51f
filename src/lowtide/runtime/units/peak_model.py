"""Predicts how far a unit rises above its base when nothing is evicted, from the sizes of its inputs.

Where sequence lengths change from step to step, no two units are alike, and none would ever follow a plan. But a unit whose
sizes are at most those of a known unit rises no higher, and the rise of a slightly larger one grows at most with the square
of the growth of its sizes. If a unit is seen to exceed this limit, later limits for its like are raised by the same factor.
Where the limit fits into the budget, nothing needs to be intercepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, final

from lowtide.runtime.units.unit_signature import UnitSignature, sizes_of

CONFIRMED = 4
"""Units that must have been compared with known ones before anything is predicted."""
UNSTEADY = 2.0
"""Safety factor for units that run different operators although their sizes are equal: the next may rise to this multiple of
the highest rise seen."""
TOLERANCE_SHARE = 0.05
"""A smaller unit may rise higher than a known one by this share of the known rise, ..."""
TOLERANCE_BYTES = 64 << 10
"""... or by this many bytes, whichever is larger. If one was seen to rise higher still, all others may, too."""
MARGIN_SHARE = 0.1
"""What is added to a rise that was seen, where no plan and no limit could correct it: malloc's holes take memory, too."""
STRANGERS = 8
"""After this many units in a row without a recording, a unit is recorded only if its kind was met before, or if no known unit
is at least as large."""
GROWTH = 2.0
"""Two units are not comparable if sizes grew by more than this from one to the other, as a product over all dimensions."""
REMEMBERED = 4096
"""Kinds of units that are remembered as met before."""
PROFILES = 64
"""Size profiles that are kept for each kind of first call."""
CALLS = 64
"""Units with more root calls than this are neither recorded here nor predicted."""

Calls = tuple[tuple[Any, tuple[int, ...]], ...]
"""For each root call of a unit: its kind without sizes, and all sizes of the tensors passed to it."""


class _Rise(NamedTuple):
    """How far a unit rose, and the bytes of the gradients that existed when it began."""

    bytes: int
    gradient_bytes: int


@final
class PeakModel:
    """The rises seen in one run, and the limits that follow from them."""

    def __init__(self) -> None:
        """Start without observations."""
        self._known: dict[Any, dict[Calls, _Rise]] = {}
        self._confirmed: dict[Any, int] = {}
        self._again: dict[Any, int] = {}
        self._slack: dict[Any, float] = {}
        self._broken: set[Any] = set()
        self._met: dict[UnitSignature, None] = {}
        self._strangers = 0

    def note(self, kinds: Sequence[UnitSignature], rise_bytes: int, gradient_bytes: int) -> None:
        """Add how far a unit rose above its base, or would have risen had nothing been evicted.

        Args:
            kinds: its root calls.
            rise_bytes: how far it rose.
            gradient_bytes: gradients that existed when it began.
        """
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
        """Upper bound, in bytes, on the rise of a unit that begins with these root calls; None if too little is known.

        Gradients that existed when a known unit began, and do not exist now, are allocated within this one and are added.

        Args:
            kinds: the root calls.
            gradient_bytes: gradients that exist when it begins.
            unsteady: whether such units differ although their sizes do not, because they depend on the values of their inputs
                (packed sequences).
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

    def rise_of(self, kinds: Sequence[UnitSignature], gradient_bytes: int) -> int | None:
        """The highest rise, in bytes, of units that began with exactly these root calls, and a margin; None if none was seen.

        Args:
            kinds: the root calls.
            gradient_bytes: gradients that exist when the unit begins; the others are added, as in :meth:`most`.
        """
        calls = _calls(kinds)
        if calls is None or calls[0][0] in self._broken:
            return None
        known = self._known.get(calls[0][0], {}).items()
        rises = [r.bytes + max(0, r.gradient_bytes - gradient_bytes) for other, r in known if other[: len(calls)] == calls]
        return int((1 + MARGIN_SHARE) * max(rises)) if rises else None

    def forget(self, kinds: Sequence[UnitSignature]) -> None:
        """Forget the rises of units that began with exactly these root calls: the next such unit is to be watched."""
        calls = _calls(kinds)
        if calls is not None:
            known = self._known.get(calls[0][0], {})
            for other in [other for other in known if other[: len(calls)] == calls]:
                del known[other]

    def worth_recording(self, kind: UnitSignature) -> bool:
        """Whether to record a unit of a kind that has no recording: recording takes time."""
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
        """A unit of a recorded kind came again: start counting strangers anew."""
        self._strangers = 0

    def broke(self, kinds: Sequence[UnitSignature]) -> None:
        """A unit that was predicted to fit did not: predict nothing for its like any more."""
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
    """A unit's root calls, split into kind and sizes; None if there are none or too many, or if a size is not a number."""
    if not 0 < len(kinds) <= CALLS or not all(kind.call for kind in kinds):
        return None
    calls = tuple(sizes_of(kind) for kind in kinds)
    numbers = all(type(size) is int for _, sizes in calls for size in sizes)  # a nested tensor's sizes are not
    return calls if numbers else None


def _growth(calls: Calls, other: Calls) -> float | None:
    """Growth of a unit's sizes over another's, as a product over all dimensions; None where the calls differ otherwise.

    The unit may have made fewer calls than the other; then only these are compared.
    """
    if len(calls) > len(other) or any(a != b for (a, _), (b, _) in zip(calls, other, strict=False)):
        return None
    growth = 1.0
    for (_, xs), (_, ys) in zip(calls, other, strict=False):
        for x, y in zip(xs, ys, strict=True):
            growth *= max(1.0, x / max(1, y))
    return growth
