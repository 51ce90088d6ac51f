"""Times the operators, replays and transfers of a warm planned unit, and updates its problem with these seconds.

A unit is recorded when it is seen first, while kernels are still being looked up, pages are faulted in, and replays of the
online policy come in between. Its seconds can be several times those of later units. If that changes the plan's extra time
enough, the unit is planned again. Later units are timed now and then: an operator takes the least of what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import mean, median
from typing import Any, final

from lowtide.base.trace import Op
from lowtide.planning.unit.problem import FRESH_BYTES, Bandwidth, Problem

LEAST_BYTES = 1 << 20
"""Minimum bytes transferred for a measurement of the offload tier's speed."""
MATTERS_SHARE = 0.005
"""A unit is planned again if its current plan's extra time changes by more than this share of the unit's time, ..."""
MATTERS_LATER_SHARE = 0.02
"""... and if it was timed before, by more than this share: what two warm units take differs, too."""
OTHERS_SHARE = 0.1
"""Another plan may be cheaper now if the seconds of operators changed by more than this share of the unit's time, summed."""


@final
@dataclass(eq=False)
class Stopwatch:
    """The times of one planned unit on the CPU.

    Attributes:
        forward: seconds of each operator that the plan follows, in order.
        again: per index of such an operator, the seconds of each of its replays.
        written: (bytes, seconds) of each transfer to the offload tier.
        read: (bytes, seconds) of each transfer back.
        recording, noting: seconds that the interception took at each operator that left a record, and at each that left none,
            besides the operator itself.
        serving: (operators run again, seconds besides these and transfers) of each need of a value that was away.
    """

    forward: list[float] = field(default_factory=list)
    again: dict[int, list[float]] = field(default_factory=dict)
    written: list[tuple[int, float]] = field(default_factory=list)
    read: list[tuple[int, float]] = field(default_factory=list)
    recording: list[float] = field(default_factory=list)
    noting: list[float] = field(default_factory=list)
    serving: list[tuple[int, float]] = field(default_factory=list)

    def problem(self, problem: Problem, funcs: Sequence[tuple[int, Any]], *, warm: bool = False) -> Problem:
        """A copy of a problem with these seconds, and with the offload tier's speed as measured.

        A replayed operator takes the mean of its replays; any other the smaller of its recorded and measured seconds. Where
        the problem's seconds are those of warm units already, the smaller ones count for replayed operators, too.

        Args:
            problem: the problem as recorded, or as it was timed before.
            funcs: operators that the unit followed, as (event, operator), in the order of ``forward``.
            warm: whether it was timed before.
        """
        events = list(problem.trace.events)
        for i, ((e, _), seconds) in enumerate(zip(funcs, self.forward, strict=False)):
            op = events[e]
            assert isinstance(op, Op)
            runs = self.again.get(i)
            measured = mean(runs) if runs else seconds
            events[e] = replace(op, seconds=measured if runs and not warm else min(op.seconds, measured))
        trace = replace(problem.trace, events=tuple(events))
        return replace(
            problem, trace=trace, bandwidth=self.bandwidth(problem.bandwidth),
            replay_seconds=self.replay_seconds(problem.replay_seconds),
            fetch_seconds=self.fetch_seconds(problem.fetch_seconds),
        )

    @property
    def extra_seconds(self) -> float:
        """What the unit took for its plan: operators that ran again, transfers, and the interception of both."""
        moved = sum(seconds for _, seconds in (*self.written, *self.read))
        again = sum(sum(runs) for runs in self.again.values())
        served = sum(seconds for _, seconds in self.serving)
        return again + moved + served + sum(self.recording) + sum(self.noting)

    def replay_seconds(self, assumed: float) -> float:
        """What the interception adds to an operator that is run again; ``assumed`` if none was."""
        served = [seconds / count for count, seconds in self.serving if count]
        return median(self.recording) + median(served) if self.recording and served else assumed

    def fetch_seconds(self, assumed: float) -> float:
        """What the interception adds to a value that is moved; ``assumed`` if none was."""
        served = [seconds for count, seconds in self.serving if not count]
        return median(self.noting or [0.0]) + median(served) if served else assumed

    def bandwidth(self, probed: Bandwidth | None) -> Bandwidth | None:
        """The offload tier's speed as measured in this unit, and as ``probed`` where too few bytes were transferred.

        None if nothing may be offloaded (``probed`` is None).
        """
        if probed is None:
            return None
        small = [r for r in self.read if r[0] < FRESH_BYTES]
        large = [r for r in self.read if r[0] >= FRESH_BYTES]
        return Bandwidth(
            write=_speed(self.written, probed.write),
            read=_speed(small, probed.read),
            read_fresh=_speed(large, probed.read_fresh),
        )


def changed_seconds(before: Problem, after: Problem) -> float:
    """How much the seconds of a problem's operators differ from those of another timing of it, summed."""
    both = zip(before.trace.events, after.trace.events, strict=True)
    return sum(abs(a.seconds - b.seconds) for a, b in both if isinstance(a, Op) and isinstance(b, Op))


def _speed(transfers: Sequence[tuple[int, float]], probed: float) -> float:
    """Median bytes per second over the bytes transferred; a median, because one transfer may have waited for a busy core.

    Returns ``probed`` for less than :data:`LEAST_BYTES`.
    """
    total = sum(size for size, _ in transfers)
    if total < LEAST_BYTES:
        return probed
    passed = 0
    for size, seconds in sorted((t for t in transfers if t[0]), key=lambda t: t[1] / t[0]):
        passed += size
        if 2 * passed >= total:
            return size / seconds if seconds > 0 else probed
    return probed
