"""Law: the predicted rise of a unit is never below its real one, and nothing is predicted without evidence."""

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
def test_the_predicted_rise_is_at_least_the_real_one(rises: PeakModel, length: int) -> None:
    """For sizes below, among and up to twice those seen, the prediction is an upper bound."""
    most = rises.most([_kind((4, length))], 0)
    assert most is not None
    assert most >= _rise(length)


def test_nothing_is_predicted_before_enough_units_were_compared() -> None:
    """The first prediction comes after `CONFIRMED` comparisons of a unit with known ones."""
    rises = PeakModel()
    for length in range(CONFIRMED):
        rises.note([_kind((4, 100 - length))], _rise(100 - length), 0)
        assert rises.most([_kind((4, 10))], 0) is None
    rises.note([_kind((4, 50))], _rise(50), 0)
    assert rises.most([_kind((4, 10))], 0) is not None


def test_nothing_is_predicted_for_much_larger_or_different_units(rises: PeakModel) -> None:
    """None for a unit of more than twice the size, another module, another number of dimensions, more calls, or no call."""
    assert rises.most([_kind((4, 300))], 0) is None
    assert rises.most([_kind((4, 50), who=1)], 0) is None
    assert rises.most([_kind((4, 50, 1))], 0) is None
    assert rises.most([_kind((4, 50)), _kind((4, 50))], 0) is None
    assert rises.most([UnitSignature(())], 0) is None


def test_a_unit_that_exceeds_its_limit_raises_all_predictions(rises: PeakModel) -> None:
    """One unit that rose to about twice its limit raises the predictions for all others by at least half."""
    before = rises.most([_kind((4, 40))], 0)
    rises.note([_kind((4, 94))], 2 * _rise(94), 0)
    after = rises.most([_kind((4, 40))], 0)
    assert before is not None
    assert after is not None
    assert after >= 1.5 * before


def test_a_unit_that_crossed_the_budget_ends_predictions(rises: PeakModel) -> None:
    """After a unit that was predicted to fit crossed the budget, nothing is predicted for units of its kind."""
    rises.broke([_kind((4, 50))])
    assert rises.most([_kind((4, 50))], 0) is None


def test_all_root_calls_of_a_unit_are_compared() -> None:
    """A unit may make fewer calls than known ones, but a later call of much larger size or of another module gives no
    prediction.
    """
    rises = PeakModel()
    for length in range(100, 90, -1):
        rises.note([_kind((4, length)), _kind((4, length), who=1)], _rise(length), 0)
    assert rises.most([_kind((4, 50))], 0) is not None
    assert rises.most([_kind((4, 50)), _kind((4, 50), who=1)], 0) is not None
    assert rises.most([_kind((4, 50)), _kind((4, 500), who=1)], 0) is None
    assert rises.most([_kind((4, 50)), _kind((4, 50), who=2)], 0) is None


def test_a_new_kind_of_unit_is_recorded_if_early_repeated_or_largest() -> None:
    """After `STRANGERS` new kinds in a row, a kind is worth recording only if it was met before or is larger than all known
    ones, until a recorded kind comes again.
    """
    rises = PeakModel()
    rises.note([_kind((4, 500))], _rise(500), 0)
    assert all(rises.worth_recording(_kind((4, length))) for length in range(STRANGERS))
    assert not rises.worth_recording(_kind((4, 300)))
    assert rises.worth_recording(_kind((4, 300)))
    assert rises.worth_recording(_kind((4, 501)))
    rises.familiar()
    assert rises.worth_recording(_kind((4, 301)))


def test_memory_of_ever_new_sizes_is_bounded() -> None:
    rises = PeakModel()
    for length in range(2 * REMEMBERED):
        rises.worth_recording(_kind((4, length)))
    for length in range(2 * PROFILES):
        rises.note([_kind((4, length))], _rise(100), 0)
    assert len(rises._met) <= REMEMBERED
    assert len(rises._known[next(iter(rises._known))]) <= PROFILES


def test_missing_gradients_are_added_to_the_prediction() -> None:
    """Gradients that existed when known units began, and do not exist now, will be allocated within the unit; extra ones
    change nothing.
    """
    rises = PeakModel()
    for length in (100, 60, 90, 80, 70):
        rises.note([_kind((4, length))], _rise(length), 50_000)
    there, half, none = (rises.most([_kind((4, 100))], gradients) for gradients in (50_000, 25_000, 0))
    assert there is not None
    assert (half, none) == (there + 25_000, there + 50_000)
    assert rises.most([_kind((4, 100))], 70_000) == there


def test_units_that_differ_at_equal_sizes_are_bounded_by_the_highest() -> None:
    """Packed sequences: their lengths are values, not sizes. After enough units of equal size, the bound is `UNSTEADY` times
    the highest rise; it says nothing of steady units, and ends if one crosses the budget.
    """
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
