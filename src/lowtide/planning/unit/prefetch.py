"""Chooses fetches that start before their need, so that transfers run while the device computes.

A fetch starts once an earlier need has been served, as late as still hides it, and only if its bytes fit below the plan's own
peak until they are needed. The peak found by ``simulate.py`` therefore stays the peak.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

from lowtide.base.trace import Op
from lowtide.planning.unit.problem import Problem
from lowtide.planning.unit.simulate import UnitTimeline

Need = tuple[int, int]
"""(value, index of one of its needs)."""


def fetches_ahead(problem: Problem, timeline: UnitTimeline) -> dict[Need, tuple[int, ...]]:
    """Per need, the values whose fetch starts once the need has been served.

    Args:
        problem: the problem that was solved.
        timeline: the outcome of playing its solution; the fetches do not raise its ``peak_bytes``.
    """
    if problem.bandwidth is None or not any(r.fetched for r in timeline.remakes):
        return {}
    asked = sorted((problem.needs[v][k][0], v, k) for v in timeline.intervals for k in range(len(problem.needs[v])))
    moments = [e for e, _, _ in asked]
    clock = _clock(problem)
    height = timeline.peak_bytes_at.copy()
    found: dict[Need, tuple[int, ...]] = {}
    fetched: dict[int, int] = {}
    for remake in sorted(timeline.remakes, key=lambda r: problem.needs[r.value][r.need][0]):
        end = problem.needs[remake.value][remake.need][0]
        for v in remake.fetched:
            size = problem.trace.buffers[v].bytes
            enough = clock[end] - problem.bandwidth.read_seconds(size)
            since = max(_absent_since(timeline, v, end), fetched.get(v, 0))
            fetched[v] = end
            last = bisect_left(moments, end)
            first = max(bisect_left(moments, since), int(np.searchsorted(clock[moments[:last]], enough, side="right")) - 1)
            for at in range(first, last):
                start = moments[at]
                if height[start:end].max(initial=0) + size <= timeline.peak_bytes:
                    height[start:end] += size
                    key = asked[at][1:]
                    found[key] = (*found.get(key, ()), v)
                    break
    return found


def _clock(problem: Problem) -> NDArray[np.float64]:
    """Seconds of the plain run before each event."""
    seconds = [e.seconds if isinstance(e, Op) else 0.0 for e in problem.trace.events]
    return np.concatenate(([0.0], np.cumsum(seconds)))


def _absent_since(timeline: UnitTimeline, value: int, event: int) -> int:
    """First event of the value's absence that lasts until ``event``; ``event`` itself if the value is present."""
    spans = [start for start, end in timeline.intervals.get(value, ()) if start <= event <= end]
    return spans[-1] if spans else event
