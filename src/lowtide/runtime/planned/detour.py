"""Finds the way back to a plan for a unit that runs other operators than recorded for a stretch.

Loops go round more or less often than in the recording, branches are taken or not. What lies before and after is still as
planned. A unit on a detour therefore goes on with its plan where the last few operators stand in it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, final

from lowtide.runtime.storage.value import Anchor, Value

RUN: Final = 3
"""Consecutive operators that show where in its plan a unit is."""
FEW: Final = 64
"""A unit may run so many operators that its plan does not expect, or as many as the plan has."""
OTHERWISE: Final = 10
"""If more than this part (one in so many) of a unit's operators were others than recorded, the recording does not suit it."""

Places = Mapping[tuple[Any, ...], tuple[int, ...]]


def places_of(funcs: Sequence[Any]) -> Places:
    """For each run of :data:`RUN` operators, the places at which its last one stands, in order."""
    found: dict[tuple[Any, ...], list[int]] = {}
    for last in range(RUN - 1, len(funcs)):
        found.setdefault(tuple(funcs[last - RUN + 1 : last + 1]), []).append(last)
    return {run: tuple(places) for run, places in found.items()}


@final
class Detour:
    """A stretch of operators that a plan does not expect.

    Attributes:
        left_at: the place in the plan at which the first of them ran.
    """

    __slots__ = ("_expected", "_places", "_recent", "left_at")

    def __init__(self, funcs: Sequence[Any], places: Places, left_at: int) -> None:
        """Begin at a place of a plan, whose operators before it have run."""
        self._places = places
        self._recent = tuple(funcs[max(0, left_at - RUN + 1) : left_at])
        self._expected = funcs[left_at]
        self.left_at = left_at

    def ran(self, func: Any) -> None:
        """Note an operator that ran outside the plan."""
        self._recent = (*self._recent[-RUN + 2 :], func)

    def way_back(self, func: Any) -> int | None:
        """The place of the plan at which to go on with ``func``; None if there is none.

        That is where the plan was left, if it expects ``func`` there: the operators in between were additional ones. Else it
        is the place, nearest to that one, at which ``func`` and the operators before it stand; of two, the later.
        """
        if func is self._expected:
            return self.left_at
        places = self._places.get((*self._recent, func), ())
        i = bisect_left(places, self.left_at)
        near = places[max(0, i - 1) : i + 1]
        return min(near, key=lambda place: (abs(place - self.left_at), -place), default=None)


def make_independent(values: Iterable[Value]) -> list[Anchor]:
    """Make replays rely on nothing that is resident only because operators run in the recorded order.

    A plan counts on values without records of their own to live as long as in the recording. Where operators differ from here
    on, they may die earlier. So records that read them hold them from now on.

    Args:
        values: all values that records refer to.

    Returns:
        The anchors that hold them.
    """
    anchors: dict[int, Anchor] = {}
    for value in sorted((v for v in values if v.record is not None), key=_order):
        record = value.record
        assert record is not None
        for argument, source in record.reads():
            if source.record is not None or source.ticket is not None:
                continue
            if source.storage() is None:  # the plan holds what was made from it
                value.record = None
                break
            anchor = argument.hold()
            anchors[id(anchor)] = anchor
    return list(anchors.values())


def _order(value: Value) -> int:
    assert value.record is not None
    return value.record.order
