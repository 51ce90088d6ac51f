"""Law: a core that is busy elsewhere for a moment does not make offload look slower, neither to the probe nor to the
stopwatch.
"""

from __future__ import annotations

import itertools

import pytest
from lowtide.runtime.device import file_tier, offload
from lowtide.runtime.planned.timing import Stopwatch
from lowtide.planning.unit.problem import Bandwidth, Problem
from lowtide.base.trace import Buffer, Op, Phase, Site, Trace

SLOW = Bandwidth(write=1e6, read=1e6, read_fresh=1e6)


@pytest.mark.parametrize("late", range(9))
def test_one_delayed_copy_does_not_change_the_probed_speed(late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock each copy takes a millisecond, except one of them, which takes a second."""
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


def test_one_delayed_transfer_does_not_change_the_measured_speed() -> None:
    """Nine of ten run at 4 GB/s; one waits a second."""
    watch = Stopwatch(written=[(4_000_000, 1e-3)] * 9 + [(4_000_000, 1.0)], read=[(4_000_000, 1.0), *[(4_000_000, 1e-3)] * 9])
    found = watch.bandwidth(SLOW)
    assert found is not None
    assert (found.write, found.read, found.read_fresh) == pytest.approx((4e9, 4e9, SLOW.read_fresh))


def test_many_small_transfers_do_not_outweigh_a_large_one() -> None:
    """The speed is that of half of the bytes, not of half of the transfers."""
    watch = Stopwatch(written=[(1_000, 1e-3)] * 100 + [(8_000_000, 2e-3)])
    found = watch.bandwidth(SLOW)
    assert found is not None
    assert found.write == pytest.approx(4e9)


def test_the_probed_speed_remains_where_too_little_was_moved() -> None:
    """A few bytes say nothing."""
    found = Stopwatch(written=[(1_000, 1e-3)]).bandwidth(SLOW)
    assert found == SLOW


def test_what_the_interception_adds_is_measured_apart() -> None:
    """Recording and calling an operator again; noting and fetching a value that is moved. A median, as above."""
    watch = Stopwatch(
        recording=[2e-5, 2e-5, 1.0], noting=[1e-5, 1e-5, 1.0], serving=[(2, 8e-5), (1, 4e-5), (1, 1.0), (0, 3e-5), (0, 3e-5), (0, 1.0)],
    )
    assert watch.replay_seconds(1.0) == pytest.approx(6e-5)
    assert watch.fetch_seconds(1.0) == pytest.approx(4e-5)
    assert (Stopwatch().replay_seconds(5e-5), Stopwatch().fetch_seconds(4e-5)) == (5e-5, 4e-5)


def test_what_a_plan_took_is_all_that_it_does() -> None:
    """Operators that run again, transfers, and the interception of both."""
    watch = Stopwatch(
        again={0: [1.0, 2.0], 3: [4.0]}, written=[(10, 8.0)], read=[(10, 16.0)], recording=[32.0], noting=[64.0], serving=[(1, 128.0)],
    )
    assert watch.extra_seconds == 255.0


def test_an_operator_takes_the_least_that_warm_units_measured() -> None:
    """Of a cold recording, replays replace the seconds whatever they are; of one that was timed before, only if they are less."""
    op = Op(site=Site("net", "op", 0), phase=Phase.FORWARD, seconds=2.0, inside_bytes=1, reads=(), writes=(0,))
    buffer = Buffer(bytes=1, born=0, slot=0, held_until=0, released=0, counted=True, movable=False)
    trace = Trace(
        base_bytes=0, resident_bytes=0, events=(op,), buffers=(buffer,), saves=(), other_bytes=(0,), spike_bytes=(0,), backward_event=1,
    )
    problem = Problem(trace=trace, base_bytes=0)
    for measured, warm, expected in ((3.0, False, 3.0), (3.0, True, 2.0), (1.0, True, 1.0)):
        found = Stopwatch(forward=[measured], again={0: [measured]}).problem(problem, [(0, None)], warm=warm)
        assert found.seconds == expected
