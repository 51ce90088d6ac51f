"""Law: nothing is called clean unless it was observed, and growth of child processes is a leak of the program."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from lowtide.studies.leak.study import _half_way
from lowtide.studies.leak.verdict import SETTLED_STEPS, Judgement, Verdict, judge, together
from lowtide.studies.leak.watch import Run, Watch
from lowtide.probe.counters import ABSENT, COLUMNS

KIB = 1024
STEPS = 300
OFTEN = range(0, STEPS, 10)
SELDOM = (0, 120, 280)


def rows(seen: range | tuple[int, ...], steps: int = STEPS, **columns: float) -> np.ndarray:
    """Counters that stay constant, except for the named columns, which grow by the given bytes per step and are read at some
    steps only.
    """
    found = np.full((steps, len(COLUMNS)), ABSENT, dtype=np.int64)
    at = np.arange(steps)
    for name, size in {"heap_bytes": 50_000, "peak_bytes": 50_000, "python_bytes": 9_000}.items():
        found[:, COLUMNS.index(name)] = size * KIB
    for name in ("private_bytes", "virtual_bytes", "resident_bytes", "anonymous_bytes", "system_bytes", "arena_bytes"):
        found[:, COLUMNS.index(name)] = 400_000 * KIB
    for name in ("shared_bytes", "segments_bytes", "file_bytes", "children"):
        found[:, COLUMNS.index(name)] = 0
    found[:, COLUMNS.index("time_ns")] = at * 10_000_000
    read = [step for step in seen if step < steps]
    for name, rate in columns.items():
        found[:, COLUMNS.index(name)] = ABSENT
        found[read, COLUMNS.index(name)] = 20_000 * KIB + rate * np.array(read)
    return found


def with_children(found: np.ndarray, count: int) -> np.ndarray:
    found[:, COLUMNS.index("children")] = count
    return found


def said(found: np.ndarray, audits: tuple[dict[str, Any], ...] = ()) -> Judgement:
    return judge(Run(rows=found, kind=None, audits=audits, census=(), code=0, ended="enough", seconds=1.0), KIB)


def test_observed_memory_that_does_not_grow_is_clean():
    assert said(rows(OFTEN, anonymous_bytes=0, private_bytes=0)).verdict is Verdict.CLEAN
    assert said(with_children(rows(OFTEN, children_bytes=0), 2)).verdict is Verdict.CLEAN


@pytest.mark.parametrize("rate", [0, 500 * KIB])
@pytest.mark.parametrize("column", [
    "children_bytes", "cuda_allocated_bytes", "cuda_reserved_bytes", "anonymous_bytes", "shared_bytes", "private_bytes", "python_bytes",
])
def test_a_counter_read_three_times_is_inconclusive(column, rate):
    """Whether it grows or not, the note says that it was read too few times, and more steps are asked for."""
    found = said(rows(SELDOM, **{column: rate}))
    assert found.verdict is Verdict.INCONCLUSIVE
    assert found.more_steps > STEPS
    assert any("too rarely" in note for note in found.notes)


def test_growth_of_child_processes_is_a_leak():
    """It is blamed on "workers", with its rate."""
    found = said(with_children(rows(OFTEN, children_bytes=512 * KIB), 2))
    assert (found.verdict, found.culprit.name) == (Verdict.LEAK, "workers")
    assert found.culprit.trend.rate == pytest.approx(512 * KIB, rel=0.02)
    assert any("in child processes" in note for note in found.notes)


def test_growth_of_children_in_a_short_run_is_inconclusive():
    """It may be their warm-up: `SETTLED_STEPS` steps are asked for."""
    found = said(with_children(rows(range(0, 100, 2), steps=100, children_bytes=40 * KIB), 2))
    assert (found.verdict, found.more_steps) == (Verdict.INCONCLUSIVE, SETTLED_STEPS)


@pytest.mark.parametrize(("children", "verdict"), [(2, Verdict.LEAK), (16, Verdict.CLEAN)])
def test_the_tolerance_grows_with_the_number_of_children(children, verdict):
    """10 KiB a step in all are a leak of 2 processes, not of 16."""
    found = said(with_children(rows(OFTEN, children_bytes=10 * KIB), children))
    assert (found.verdict, found.counter("workers").verdict) == (verdict, verdict)


def test_unshared_pages_are_noted_and_are_not_a_leak():
    """Unique bytes of forked children that grow at constant total bytes are copies on write."""
    audits = tuple({"step": step, "cycles_bytes": 0, "children": [
        {"pid": pid, "name": "worker", "bytes": 20_000 * KIB, "unique_bytes": 30_000 * KIB + 20 * KIB * step} for pid in range(4)
    ]} for step in (60, 150, 300))
    found = said(with_children(rows(OFTEN, children_bytes=0), 4), audits)
    assert found.verdict is Verdict.CLEAN
    assert any("copy on write" in note for note in found.notes)


def test_no_run_ends_half_way_with_its_children_unobserved():
    """The look half-way ends a clean run early only if the children were read often enough."""
    enough = _half_way(Watch(steps=2 * STEPS), KIB).enough
    assert not enough(with_children(rows(SELDOM, children_bytes=0), 2))
    assert enough(with_children(rows(OFTEN, children_bytes=0), 2))


def grown_by(increments: np.ndarray) -> Judgement:
    """The verdict on a program whose heap grows by these increments."""
    found = rows(OFTEN, steps=len(increments), anonymous_bytes=0, private_bytes=0)
    for name in ("heap_bytes", "peak_bytes"):
        found[:, COLUMNS.index(name)] += np.cumsum(increments).astype(np.int64)
    return said(found)


def test_growth_in_a_few_jumps_is_inconclusive():
    """All increments between levels, except the two largest and smallest, stay below the tolerance."""
    jumps = np.zeros(149)
    jumps[[8, 12, 27, 41, 42, 57, 67, 68, 72, 77, 87, 106, 107, 120, 131, 133, 148]] = 1
    found = grown_by(144 + 21_850 * jumps)
    held = found.counter("held")
    assert held is not None
    assert held.low > KIB >= held.trend.steady_rate
    assert found.verdict is Verdict.INCONCLUSIVE


def test_processes_watched_to_the_end_decide():
    """A leak seen in half of the steps does not count beside a process that was watched to the end; it does if there is no
    such process.
    """
    leaks, clean = grown_by(np.full(150, 8 * KIB)), grown_by(np.zeros(STEPS))
    assert (leaks.verdict, clean.verdict) == (Verdict.LEAK, Verdict.CLEAN)
    assert together([leaks, clean], STEPS) is clean
    assert together([leaks], STEPS) is leaks, "where none was, those that there are"


def test_processes_that_disagree_make_the_verdict_inconclusive():
    leaks, clean = grown_by(np.full(STEPS, 8 * KIB)), grown_by(np.zeros(STEPS))
    found = together([leaks, clean], STEPS)
    assert found.verdict is Verdict.INCONCLUSIVE
    assert found.disagree
    assert found.more_steps == 2 * STEPS
