"""What a planned unit's operators, replays and transfers took once all was warm, and the problem with these seconds.

A unit is recorded when it is met first: kernels are looked up, pages are faulted in, replays of the online policy fall in
between. Seconds of that step can be several times those of the next ones; the plan is made anew where that matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import Any, final

from lowtide.base.trace import Op
from lowtide.planning.unit.problem import FRESH_BYTES, Bandwidth, Problem

LEAST_BYTES = 1 << 20
"""Fewer bytes moved say nothing of a board's speed."""
MATTERS_SHARE = 0.005
"""Plans are made anew where the extra time of the one in force changes by more than this share of the unit's."""


@final
@dataclass(eq=False)
class Stopwatch:
    """One planned unit on the CPU.

    Attributes:
        forward: seconds of each operator that the plan follows, in order.
        again: seconds of each run of one of them in a replay.
        written: (bytes, seconds) of each transfer to the second board.
        read: (bytes, seconds) of each transfer back.
    """

    forward: list[float] = field(default_factory=list)
    again: dict[int, list[float]] = field(default_factory=dict)
    written: list[tuple[int, float]] = field(default_factory=list)
    read: list[tuple[int, float]] = field(default_factory=list)

    def problem(self, problem: Problem, funcs: Sequence[tuple[int, Any]]) -> Problem:
        """The same problem with these seconds.

        Args:
            problem: as it was recorded.
            funcs: (event, operator) that the unit followed, in the order of ``forward``.
        """
        events = list(problem.trace.events)
        for i, ((e, _), seconds) in enumerate(zip(funcs, self.forward, strict=False)):
            op = events[e]
            assert isinstance(op, Op)
            runs = self.again.get(i)
            events[e] = replace(op, seconds=mean(runs) if runs else min(op.seconds, seconds))
        trace = replace(problem.trace, events=tuple(events))
        return replace(problem, trace=trace, bandwidth=self.bandwidth(problem.bandwidth))

    def bandwidth(self, probed: Bandwidth | None) -> Bandwidth | None:
        """The second board's speed as it was met; as probed in what was not met."""
        if probed is None:
            return None
        small = [r for r in self.read if r[0] < FRESH_BYTES]
        large = [r for r in self.read if r[0] >= FRESH_BYTES]
        return Bandwidth(
            write=_speed(self.written, probed.write),
            read=_speed(small, probed.read),
            read_fresh=_speed(large, probed.read_fresh),
        )


def _speed(transfers: Sequence[tuple[int, float]], probed: float) -> float:
    """Bytes per second at which half of the bytes went as fast or faster: one transfer may have waited for a busy core."""
    total = sum(size for size, _ in transfers)
    if total < LEAST_BYTES:
        return probed
    passed = 0
    for size, seconds in sorted((t for t in transfers if t[0]), key=lambda t: t[1] / t[0]):
        passed += size
        if 2 * passed >= total:
            return size / seconds if seconds > 0 else probed
    return probed
