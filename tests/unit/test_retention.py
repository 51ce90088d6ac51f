"""Law: memory that only an allocator keeps is a leak if it goes on growing, but not in a run too short to tell."""

from __future__ import annotations

import numpy as np
import pytest
from lowtide.studies.leak.verdict import SETTLED_STEPS, Verdict, judge
from lowtide.studies.leak.watch import Run
from lowtide.probe.counters import ABSENT, COLUMNS

KIB = 1024


def kept_more_each_step(steps: int) -> Run:
    """A run whose heap in use is constant while resident memory grows by 40 KiB a step."""
    rows = np.full((steps, len(COLUMNS)), ABSENT, dtype=np.int64)
    at = np.arange(steps)
    for name, values in {
        "time_ns": at * 10_000_000, "heap_bytes": 50_000 * KIB + 0 * at, "peak_bytes": 50_000 * KIB + 0 * at,
        "anonymous_bytes": 100_000 * KIB + 40 * KIB * at, "shared_bytes": 0 * at,
    }.items():
        rows[:, COLUMNS.index(name)] = values
    return Run(rows=rows, kind=None, audits=(), census=(), code=0, ended="enough", seconds=1.0)


@pytest.mark.parametrize(("steps", "verdict"), [(60, Verdict.INCONCLUSIVE), (SETTLED_STEPS, Verdict.LEAK), (300, Verdict.LEAK)])
def test_growing_retention_is_a_leak_only_in_a_long_enough_run(steps: int, verdict: Verdict) -> None:
    """From `SETTLED_STEPS` steps on it is a leak of "resident"; a shorter run is inconclusive and asks for that many steps."""
    found = judge(kept_more_each_step(steps), KIB)
    assert found.verdict is verdict
    assert found.culprit is not None
    assert found.culprit.name == "resident"
    assert found.more_steps == (SETTLED_STEPS if steps < SETTLED_STEPS else 0)
