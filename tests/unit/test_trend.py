"""How the growth of a counter is measured: rates, warm-up, jumps, and what must not be called certain."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.studies.leak.trend import like_sized, settled, trend
from lowtide.studies.leak.verdict import Counter, Verdict, part_of

KIB = 1024
STEPS = 300


def line(rate, start=5e6, steps=STEPS):
    return start + rate * np.arange(steps)


@given(st.floats(-20_000, 20_000), st.floats(0, 1e9))
@settings(max_examples=40, deadline=None)
def test_a_straight_line_gives_its_slope_with_a_tiny_interval(rate, start):
    found = trend(line(rate, start), KIB)
    low, high = found.interval(0.01)
    assert found.rate == pytest.approx(rate, abs=1e-2)
    assert low - 1 <= rate <= high + 1
    assert high - low < 2


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("noise", ["white", "follows", "walk", "batches"])
def test_the_interval_contains_the_true_rate_under_noise(seed, noise):
    """With an error probability of one in a thousand on either side, none of 32 draws may miss by more than a tenth of the
    tolerance.
    """
    rng = np.random.default_rng(seed)
    white = rng.normal(0, 20 * KIB, STEPS)
    follows = np.zeros(STEPS)
    for i in range(1, STEPS):
        follows[i] = 0.6 * follows[i - 1] + white[i] / 2
    made = {"white": white, "follows": follows, "walk": np.cumsum(white) / 50, "batches": rng.integers(8, 64, STEPS) * 2048.0}
    low, high = trend(line(3 * KIB) + made[noise], KIB).interval(0.001)
    assert low - 0.1 * KIB <= 3 * KIB <= high + 0.1 * KIB


@pytest.mark.parametrize("period", [7, 20, 36, 45])
@pytest.mark.parametrize("rate", [0, 2 * KIB])
def test_a_sawtooth_of_garbage_collection_does_not_hide_the_rate(period, rate):
    """A sawtooth of 15 KiB a step on top of the growth."""
    found = trend(line(rate) + 15 * KIB * (np.arange(STEPS) % period), KIB)
    assert found.rate == pytest.approx(rate, abs=KIB / 20)
    low, high = found.interval(0.001)
    assert high - low < KIB / 2


@pytest.mark.parametrize("length", [20, 60, 120])
def test_warm_up_growth_is_left_out_of_the_rate(length):
    """Growth of 30 KiB a step that ends after `length` steps: the measured range starts there, and the growth before it is
    reported as such.
    """
    values = line(0.0)
    values += 30 * KIB * np.minimum(np.arange(STEPS), length)
    found = trend(values, KIB)
    assert length - 12 <= found.start <= length + 12
    assert abs(found.rate) < KIB / 4
    assert found.before_bytes == pytest.approx(30 * KIB * max(0, length - 30), rel=0.3, abs=400 * KIB)


def test_growth_that_begins_late_is_not_taken_for_warm_up():
    values = line(0.0)
    values += 5 * KIB * np.maximum(0, np.arange(STEPS) - 100)
    assert trend(values, KIB).late_rate == pytest.approx(5 * KIB, rel=0.05)
    assert settled(values, KIB) <= 100


@pytest.mark.parametrize("at", [50, 101, 170, 260])
@pytest.mark.parametrize("size", [300 * KIB, 5000 * KIB])
def test_a_single_jump_is_reported_and_is_not_growth(at, size):
    values = line(0.0)
    values[at:] += size
    found = trend(values, KIB)
    assert abs(found.rate) < KIB / 4
    told = found.jump_bytes if found.start < at else found.before_bytes
    assert told == pytest.approx(size, rel=0.02)


@pytest.mark.parametrize("every", [40, 60, 70, 80])
@pytest.mark.parametrize("first", range(0, 80, 10))
def test_recurring_jumps_are_never_called_clean(every, first):
    """Memory that is kept once every 40 to 80 steps (say, per epoch), 4 KiB a step on average: the interval reaches above the
    tolerance.
    """
    values = 5e6 + 4 * KIB * every * ((np.arange(STEPS) + first) // every)
    _, high = trend(values, KIB).interval(0.02)
    assert high > KIB


def test_memory_that_rises_and_falls_is_not_called_a_leak():
    values = line(0.0) + 4 * KIB * (np.arange(STEPS) % 100)
    low, _ = trend(values, KIB).interval(0.001)
    assert low < KIB


def test_a_few_drops_do_not_make_a_floor():
    """Drops in the first third of the run do not define a floor for the rest; the rate is still known."""
    values = line(0.0)
    values[:100] += 40 * KIB * (np.arange(100) % 15)
    low, high = trend(values, KIB).interval(0.01)
    assert math.isfinite(low)
    assert math.isfinite(high)


def test_missing_readings_do_not_change_the_rate():
    values = line(3 * KIB)
    values[np.arange(STEPS) % 6 != 0] = np.nan
    assert trend(values, KIB).rate == pytest.approx(3 * KIB, rel=1e-3)


@pytest.mark.parametrize("steps", [0, 1, 5, 30])
def test_too_few_steps_give_an_infinite_interval(steps):
    low, high = trend(line(50 * KIB, steps=steps), KIB).interval(0.01)
    assert low == -math.inf
    assert high == math.inf


@pytest.mark.parametrize("rate", [0, 2 * KIB, 8 * KIB])
@pytest.mark.parametrize("seed", range(8))
def test_repeating_with_the_requested_steps_soon_gives_a_verdict(rate, seed):
    """A program that holds arrays of random sizes, replaced at each step: the requested number of steps converges within three
    rounds.
    """
    rng = np.random.default_rng(seed)

    def judged(steps):
        held = rng.uniform(0, 1.5e6, (steps, 8)).sum(axis=1) / 2 + line(rate, steps=steps)
        return trend(held, KIB)

    def tells(found):
        low, high = found.interval(0.001)
        return (low > KIB and found.steady_rate > KIB) or high < KIB

    steps, rounds = STEPS, 0
    while not tells(found := judged(steps)):
        more, rounds = found.steps_to_tell(KIB, 0.001, 0.001), rounds + 1
        assert 1.3 * steps < more < 20 * STEPS
        steps = more
    assert rounds <= 3
    assert (found.rate > KIB) == (rate > KIB)


def test_a_known_rate_asks_for_slightly_more_steps_only():
    assert STEPS < trend(line(0.0), KIB).steps_to_tell(KIB, 0.01, 0.02) <= 1.6 * STEPS


def test_the_steady_rate_of_noisy_growth_equals_its_rate():
    """The steady rate, which tells growth from jumps, is not pulled down by noise: as many of the smallest increments are left
    out as of the largest. Two large jumps have none.
    """
    rng = np.random.default_rng(3)
    found = [trend(line(2 * KIB) + rng.uniform(0, 1.5e6, STEPS), KIB) for _ in range(20)]
    assert np.mean([t.steady_rate for t in found]) == pytest.approx(2 * KIB, rel=0.2)
    jumps = np.where(np.arange(STEPS) > 100, 4e6, 0.0) + np.where(np.arange(STEPS) > 200, 4e6, 0.0)
    assert trend(jumps, KIB).steady_rate < KIB


def test_growth_near_the_tolerance_asks_for_more_steps_than_no_growth():
    """A rate 10 % above the tolerance, in noise that is small beside it."""
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 6e4, STEPS)
    near, none = (trend(line(rate) + noise, KIB).steps_to_tell(KIB, 0.001, 0.02) for rate in (1.1 * KIB, 0.0))
    assert near > none


@pytest.mark.parametrize("steps", [50, 100])
def test_a_late_change_in_a_short_run_still_leaves_a_rate(steps):
    """Growth slows down after 65 % of the steps; the rest is enough for a finite error and the rate there."""
    at = np.arange(steps)
    values = 40_000.0 * np.minimum(at, 0.65 * steps) + 5_000.0 * np.maximum(0, at - 0.65 * steps)
    assert math.isfinite(trend(values, KIB).error)
    assert trend(values, KIB).rate > 4_000


@pytest.mark.parametrize("end", [150, 180, 200])
def test_growth_that_ends_by_two_thirds_of_the_run_is_bounded(end):
    found = trend(20.0 * KIB * np.minimum(np.arange(STEPS), end), KIB)
    assert found.interval(0.02)[1] < KIB
    assert found.before_bytes > 10 * KIB * end


def test_batch_sizes_are_corrected_for_by_the_steps_peak():
    """Memory held at the end of a step follows the size of its batch, and the step's peak shows that size."""
    rng = np.random.default_rng(0)
    rows = rng.integers(8, 300, STEPS)
    values = line(2 * KIB) + 2048.0 * rows
    peaks = values + 8192.0 * rows + rng.normal(0, 500, STEPS)
    clear = like_sized(values, peaks)
    assert np.std(np.diff(clear)) < np.std(np.diff(values)) / 50
    assert trend(clear, KIB).rate == pytest.approx(2 * KIB, rel=0.02)


def test_batch_sizes_are_not_corrected_for_if_they_explain_nothing():
    rng = np.random.default_rng(0)
    values = line(2 * KIB) + rng.normal(0, 5000, STEPS)
    assert like_sized(values, values + rng.normal(1e6, 1e5, STEPS)) is values


def counter(name, rate, low, high):
    values = line(rate)
    return Counter(name=name, trend=trend(values, KIB), low=low, high=high, verdict=Verdict.LEAK if low > KIB else Verdict.INCONCLUSIVE)


@pytest.mark.parametrize(("heap", "python", "name"), [(1900, 100, "heap"), (200, 1800, "python"), (1000, 1000, "held")])
def test_a_certain_sum_is_named_after_its_main_part(heap, python, name):
    """Where only the sum "held" grows with certainty, it takes the name of the part that makes up most of it, if one does, and
    keeps its own figures.
    """
    held = counter("held", 2000, 1500, 2500)
    by = {"held": held, "heap": counter("heap", heap, 100, 3000), "python": counter("python", python, 0, 3000)}
    found = part_of(held, by)
    assert found.name == name
    assert (found.low, found.high, found.trend) == (held.low, held.high, held.trend)
