"""Rules of the leak laboratory: which growth counts, what is noted beside it, and how batches of different sizes are
corrected.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from lowtide.studies.leak.trend import like_sized
from lowtide.probe.marks import MarkSource
from lowtide.studies.leak.verdict import Verdict, _copies, _counts, _notes

TOLERANCE = 1024.0


def counter(name: str, **trend: float) -> Any:
    """A counter of which only the given figures of the trend are known."""
    known = {"rate": 0.0, "jump_bytes": 0.0, "jump_step": 7, "before_bytes": 0.0, "steps": 100, "start": 0} | trend
    return SimpleNamespace(name=name, verdict=Verdict.CLEAN, trend=SimpleNamespace(**known))


@pytest.mark.parametrize(("name", "bearer"), [("maps", "resident"), ("files", "file_pages")])
@pytest.mark.parametrize(("rate", "pages", "counts"), [
    (8192, 2049, True), (8192, 2047, False),  # a quarter of the mapped bytes is touched, or not
    (1024, 513, True), (1024, 511, False),  # at least half of the tolerance
    (8192, None, True),  # nothing counts its pages
])
def test_growth_of_address_space_counts_if_its_pages_are_touched(
    name: str, bearer: str, rate: float, pages: float | None, counts: bool  # noqa: FBT001
) -> None:
    """Mapped bytes count as growth if more than a quarter of them, and more than half of the tolerance, shows up in touched
    pages, or if nothing counts the pages.
    """
    by = {} if pages is None else {bearer: counter(bearer, rate=pages)}
    assert _counts(counter(name, rate=rate), by, TOLERANCE, TOLERANCE) == counts


def run(**fields: Any) -> Any:
    """A run of which only the given fields are known."""
    return SimpleNamespace(**{"audits": [], "children": 1, "kind": MarkSource.OPTIMIZER} | fields)


@pytest.mark.parametrize(("jump", "noted"), [(TOLERANCE * 100 / 4 + 1, True), (TOLERANCE * 100 / 4 - 1, False)])
def test_a_jump_above_a_quarter_of_the_total_tolerance_is_noted(jump: float, noted: bool) -> None:  # noqa: FBT001
    """A single jump of more than a quarter of what the tolerance allows over the whole run is noted with its step."""
    notes, bounded = _notes(run(), {"held": counter("held", jump_bytes=jump)}, TOLERANCE)
    assert [("jumped once" in n, "near step 7" in n) for n in notes] == [(True, True)] * noted
    assert not bounded


def test_copy_on_write_is_measured_from_the_first_audit_to_the_last() -> None:
    """Only children that are in both audits count: 3 MiB in 200 steps, whatever the audit between them saw."""
    def audit(step: int, copied: int, *, others: int) -> dict[str, Any]:
        children = [{"pid": 1, "unique_bytes": 50 + copied, "bytes": 50}, {"pid": 100 + step, "unique_bytes": others, "bytes": 0}]
        return {"step": step, "children": children, "cycles_bytes": 0}

    audits = [audit(100, 0, others=0), audit(200, 1 << 20, others=1 << 30), audit(300, 3 << 20, others=1 << 30)]
    assert _copies(run(audits=audits), TOLERANCE) == (3 << 20) / 200
    assert _copies(run(audits=audits[:1]), TOLERANCE) == 0
    assert _copies(run(audits=[audit(0, 0, others=0), audit(200, 1000, others=0)]), TOLERANCE) == 0, "little"


def test_steps_without_a_known_peak_do_not_correct_for_batch_size() -> None:
    """Bytes held at the end of a step follow the size of its batch. The correction works although one step in ten has no peak.
    """
    random = np.random.default_rng(0)
    sizes = random.integers(1, 100, 400) * 4096.0
    values, peaks = 1e6 + 0.5 * sizes, 1e6 + 1.5 * sizes
    peaks[::10] = np.nan
    level = like_sized(values, peaks)
    known = np.isfinite(peaks)
    assert np.ptp(level[known]) < 1e-3 * np.ptp(values)
