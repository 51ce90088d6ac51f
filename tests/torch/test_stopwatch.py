"""Law: a core that is busy elsewhere for a moment makes moving look no dearer, neither to the probe nor to the stopwatch."""

from __future__ import annotations

import itertools

import pytest
from lowtide.runtime.device import file_tier, offload
from lowtide.runtime.planned.timing import Stopwatch
from lowtide.planning.unit.problem import Bandwidth

SLOW = Bandwidth(write=1e6, read=1e6, read_fresh=1e6)


@pytest.mark.parametrize("late", range(9))
def test_one_copy_that_waited_is_not_the_boards_speed(late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each copy takes a millisecond by the clock; one of them, whichever, a second."""
    now, calls = 0.0, itertools.count()

    def clock() -> float:
        nonlocal now
        call = next(calls)
        if call % 2:
            now += 1.0 if call // 2 == late else 1e-3
        return now

    monkeypatch.setattr(offload.time, "perf_counter", clock)
    speed = file_tier.FileTier().measure()
    assert next(calls) == 2 * 9
    expected = (8 << 20) / 1e-3
    assert (speed.write, speed.read, speed.read_fresh) == pytest.approx((expected, expected, expected))


def test_one_transfer_that_waited_is_not_the_speed_of_all() -> None:
    """Nine of ten go at 4 GB/s; one waits a second."""
    watch = Stopwatch(written=[(4_000_000, 1e-3)] * 9 + [(4_000_000, 1.0)], read=[(4_000_000, 1.0), *[(4_000_000, 1e-3)] * 9])
    found = watch.bandwidth(SLOW)
    assert found is not None
    assert (found.write, found.read, found.read_fresh) == pytest.approx((4e9, 4e9, SLOW.read_fresh))


def test_many_small_transfers_do_not_speak_for_the_large_ones() -> None:
    """Half of the bytes count, not half of the transfers."""
    watch = Stopwatch(written=[(1_000, 1e-3)] * 100 + [(8_000_000, 2e-3)])
    found = watch.bandwidth(SLOW)
    assert found is not None
    assert found.write == pytest.approx(4e9)


def test_the_probe_stands_where_too_little_was_moved() -> None:
    """A few bytes say nothing."""
    found = Stopwatch(written=[(1_000, 1e-3)]).bandwidth(SLOW)
    assert found == SLOW
