"""Laws of the relation between a unit and the one of other sizes whose plan it follows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lowtide.runtime.units.resizing import EXTREME, LARGEST, MARGIN, SAME, STRAYED, TRIALS, Resizing, SizeGrowth
from lowtide.runtime.units.unit_signature import UnitSignature

BYTES = st.integers(0, 1 << 40)


def _kind(*rows: int) -> UnitSignature:
    return UnitSignature((torch.nn.Linear, 1, 2, 3, (None,), tuple(((n, 8), torch.float32, False) for n in rows)))


@given(st.floats(0.05, 20), BYTES, BYTES)
def test_a_rise_within_the_recorded_one_stays_within(growth: float, fixed: int, room: int) -> None:
    """A plan of the recorded unit that rises by no more than ``recorded_rise`` is expected to rise by no more than the room."""
    relation = Resizing(1.0, growth, fixed)
    recorded = relation.recorded_rise(room)
    assert 0 <= recorded
    assert relation.rise(recorded) <= room + 1


@given(st.lists(st.tuples(st.integers(1, 300), BYTES, BYTES), max_size=12), st.integers(1, 300), BYTES)
def test_the_expected_growth_stays_near_that_of_the_inputs(seen: list[tuple[int, int, int]], rows: int, fixed: int) -> None:
    """Whatever units rose by, even by nothing."""
    model, recorded = SizeGrowth(), _kind(100)
    for other, planned, risen in seen:
        relation = model.relation(_kind(other), recorded, fixed)
        if (growth := relation.observed(planned, risen)) is not None:
            model.note(_kind(other), relation, growth)
    expected = model.relation(_kind(rows), recorded, fixed)
    assert expected.ratio == rows / 100
    assert MARGIN * expected.ratio / EXTREME <= expected.growth * 1.0001
    assert expected.growth <= MARGIN * expected.ratio * EXTREME * 1.0001


def test_the_smallest_recorded_unit_that_is_large_enough_is_chosen() -> None:
    model, known = SizeGrowth(), [_kind(50, 9), _kind(100, 2), _kind(200, 1)]
    assert model.nearest(_kind(80, 30), known) == known[2]
    assert model.nearest(_kind(90, 3), known) == known[1]
    assert model.nearest(_kind(101, 3), known) == known[1], "nearly as large is large enough"
    assert 104 * SAME <= 102
    assert model.nearest(_kind(240, 1), known) == known[2]
    assert model.nearest(_kind(int(202 * LARGEST), 0), known) is None
    assert model.nearest(_kind(5), []) is None


def test_units_near_in_size_speak_for_each_other() -> None:
    model, recorded = SizeGrowth(), _kind(100)
    model.note(_kind(30), model.relation(_kind(30), recorded, 0), 0.1)
    assert model.relation(_kind(29), recorded, 0).growth == pytest.approx(0.29 * MARGIN / 3)
    assert model.relation(_kind(90), recorded, 0).growth == pytest.approx(0.9 * MARGIN), "much larger: as the inputs"
    model.note(_kind(50), model.relation(_kind(50), recorded, 0), 1.0)
    assert model.relation(_kind(90), recorded, 0).growth == pytest.approx(2 * 0.9 * MARGIN), "but never less than was seen"


def test_units_that_stray_follow_no_plan_until_others_have_followed() -> None:
    model, kind = SizeGrowth(), _kind(3)
    for _ in range(STRAYED):
        assert model.may_follow(kind)
        model.strayed(kind)
    assert not model.may_follow(_kind(4)), "sizes do not matter"
    assert model.may_follow(UnitSignature((torch.nn.Tanh, 1, 2, 3, (None,), ())))
    for _ in range(TRIALS):
        model.followed(kind)
    assert model.may_follow(kind)
    assert not model.may_follow(UnitSignature(())), "plain functions have no sizes"
