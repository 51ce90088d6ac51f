"""Rules of the leak laboratory: which growth counts, what is noted beside it, and what batches of many sizes took."""

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
    """A counter of which only some of the trend is known."""
    known = {"rate": 0.0, "jump_bytes": 0.0, "jump_step": 7, "before_bytes": 0.0, "steps": 100, "start": 0} | trend
    return SimpleNamespace(name=name, verdict=Verdict.CLEAN, trend=SimpleNamespace(**known))


@pytest.mark.parametrize(("name", "bearer"), [("maps", "resident"), ("files", "file_pages")])
@pytest.mark.parametrize(("rate", "pages", "counts"), [
    (8192, 2049, True), (8192, 2047, False),  # a quarter of what is mapped is touched, or not
    (1024, 513, True), (1024, 511, False),  # at least half of the tolerance
    (8192, None, True),  # nobody counts its pages
])
def test_address_space_counts_where_pages_bear_it_out(
    name: str, bearer: str, rate: float, pages: float | None, counts: bool  # noqa: FBT001
) -> None:
    by = {} if pages is None else {bearer: counter(bearer, rate=pages)}
    assert _counts(counter(name, rate=rate), by, TOLERANCE, TOLERANCE) == counts


def run(**fields: Any) -> Any:
    """What was seen of a process of two steps."""
    return SimpleNamespace(**{"audits": [], "children": 1, "kind": MarkSource.OPTIMIZER} | fields)


@pytest.mark.parametrize(("jump", "noted"), [(TOLERANCE * 100 / 4 + 1, True), (TOLERANCE * 100 / 4 - 1, False)])
def test_a_jump_of_a_quarter_of_what_is_tolerated_in_all_is_noted(jump: float, noted: bool) -> None:  # noqa: FBT001
    notes, bounded = _notes(run(), {"held": counter("held", jump_bytes=jump)}, TOLERANCE)
    assert [("jumped once" in n, "near step 7" in n) for n in notes] == [(True, True)] * noted
    assert not bounded


def test_copies_on_write_are_counted_from_the_first_look_to_the_last() -> None:
    """Of the children that were there at both: 3 MiB in 200 steps, though the look between them saw less."""
    def audit(step: int, copied: int, *, others: int) -> dict[str, Any]:
        children = [{"pid": 1, "unique_bytes": 50 + copied, "bytes": 50}, {"pid": 100 + step, "unique_bytes": others, "bytes": 0}]
        return {"step": step, "children": children, "cycles_bytes": 0}

    audits = [audit(100, 0, others=0), audit(200, 1 << 20, others=1 << 30), audit(300, 3 << 20, others=1 << 30)]
    assert _copies(run(audits=audits), TOLERANCE) == (3 << 20) / 200
    assert _copies(run(audits=audits[:1]), TOLERANCE) == 0
    assert _copies(run(audits=[audit(0, 0, others=0), audit(200, 1000, others=0)]), TOLERANCE) == 0, "little"


def test_steps_whose_peak_is_not_known_take_no_part_in_what_batches_took() -> None:
    """What a step holds at its end follows its size; of a tenth of the steps nobody read the peak."""
    random = np.random.default_rng(0)
    sizes = random.integers(1, 100, 400) * 4096.0
    values, peaks = 1e6 + 0.5 * sizes, 1e6 + 1.5 * sizes
    peaks[::10] = np.nan
    level = like_sized(values, peaks)
    known = np.isfinite(peaks)
    assert np.ptp(level[known]) < 1e-3 * np.ptp(values)
