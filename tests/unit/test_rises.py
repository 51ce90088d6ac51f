"""Law: a unit that is smaller than known ones, or a little larger, is not said to rise higher than it does, nor without evidence."""

from __future__ import annotations

import pytest
import torch
from lowtide.runtime.units.unit_signature import UnitSignature
from lowtide.runtime.units.peak_model import CONFIRMED, PROFILES, REMEMBERED, STRANGERS, UNSTEADY, PeakModel


def _kind(*shapes: tuple[int, ...], who: int = 0) -> UnitSignature:
    return UnitSignature((torch.nn.Linear, who, tuple((shape, torch.float32, False) for shape in shapes)))


def _rise(length: int) -> int:
    return 1_000_000 + 1000 * length * length


@pytest.fixture
def rises() -> PeakModel:
    found = PeakModel()
    for length in (100, 60, 90, 80, 70, 110, 50):
        found.note([_kind((4, length))], _rise(length), 0)
    return found


@pytest.mark.parametrize("length", [10, 55, 100, 110, 130, 200])
def test_what_is_said_is_at_least_what_such_a_unit_takes(rises: PeakModel, length: int) -> None:
    most = rises.most([_kind((4, length))], 0)
    assert most is not None
    assert most >= _rise(length)


def test_nothing_is_said_before_enough_units_were_compared() -> None:
    rises = PeakModel()
    for length in range(CONFIRMED):
        rises.note([_kind((4, 100 - length))], _rise(100 - length), 0)
        assert rises.most([_kind((4, 10))], 0) is None
    rises.note([_kind((4, 50))], _rise(50), 0)
    assert rises.most([_kind((4, 10))], 0) is not None


def test_nothing_is_said_of_what_is_much_larger_or_of_another_make(rises: PeakModel) -> None:
    assert rises.most([_kind((4, 300))], 0) is None
    assert rises.most([_kind((4, 50), who=1)], 0) is None
    assert rises.most([_kind((4, 50, 1))], 0) is None
    assert rises.most([_kind((4, 50)), _kind((4, 50))], 0) is None
    assert rises.most([UnitSignature(())], 0) is None


def test_a_unit_that_rose_higher_than_a_larger_one_lifts_what_is_said_of_all(rises: PeakModel) -> None:
    before = rises.most([_kind((4, 40))], 0)
    rises.note([_kind((4, 94))], 2 * _rise(94), 0)
    after = rises.most([_kind((4, 40))], 0)
    assert before is not None
    assert after is not None
    assert after >= 1.5 * before


def test_a_unit_that_crossed_the_budget_ends_the_rule(rises: PeakModel) -> None:
    rises.broke([_kind((4, 50))])
    assert rises.most([_kind((4, 50))], 0) is None


def test_later_calls_of_a_unit_are_compared_too() -> None:
    rises = PeakModel()
    for length in range(100, 90, -1):
        rises.note([_kind((4, length)), _kind((4, length), who=1)], _rise(length), 0)
    assert rises.most([_kind((4, 50))], 0) is not None
    assert rises.most([_kind((4, 50)), _kind((4, 50), who=1)], 0) is not None
    assert rises.most([_kind((4, 50)), _kind((4, 500), who=1)], 0) is None
    assert rises.most([_kind((4, 50)), _kind((4, 50), who=2)], 0) is None


def test_units_that_never_come_again_are_recorded_only_at_first_or_where_they_are_the_largest() -> None:
    rises = PeakModel()
    rises.note([_kind((4, 500))], _rise(500), 0)
    assert all(rises.worth_recording(_kind((4, length))) for length in range(STRANGERS))
    assert not rises.worth_recording(_kind((4, 300)))
    assert rises.worth_recording(_kind((4, 300)))
    assert rises.worth_recording(_kind((4, 501)))
    rises.familiar()
    assert rises.worth_recording(_kind((4, 301)))


def test_a_long_run_of_ever_new_sizes_is_remembered_within_bounds() -> None:
    rises = PeakModel()
    for length in range(2 * REMEMBERED):
        rises.worth_recording(_kind((4, length)))
    for length in range(2 * PROFILES):
        rises.note([_kind((4, length))], _rise(100), 0)
    assert len(rises._met) <= REMEMBERED
    assert len(rises._known[next(iter(rises._known))]) <= PROFILES


def test_gradients_that_known_units_found_and_this_one_does_not_are_added() -> None:
    rises = PeakModel()
    for length in (100, 60, 90, 80, 70):
        rises.note([_kind((4, length))], _rise(length), 50_000)
    there, half, none = (rises.most([_kind((4, 100))], gradients) for gradients in (50_000, 25_000, 0))
    assert there is not None
    assert (half, none) == (there + 25_000, there + 50_000)
    assert rises.most([_kind((4, 100))], 70_000) == there


def test_of_units_that_differ_though_their_sizes_do_not_the_highest_tells_and_only_after_some() -> None:
    """Packed sequences: their lengths are values, no sizes."""
    rises = PeakModel()
    rose = [900_000, 1_500_000, 1_000_000, 700_000, 1_200_000]
    for seen in rose:
        assert rises.most([_kind((4, 50))], 0, unsteady=True) is None
        rises.note([_kind((4, 50))], seen, 0)
    most = rises.most([_kind((4, 50))], 0, unsteady=True)
    assert most is not None
    assert most >= UNSTEADY * max(rose)
    assert rises.most([_kind((4, 50))], 0) is None, "units of one size say nothing of others"
    rises.broke([_kind((4, 50))])
    assert rises.most([_kind((4, 50))], 0, unsteady=True) is None
