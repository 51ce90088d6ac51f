"""Law: after a detour a unit goes on where its plan was left, or else at the nearest place at which the last operators stand."""

from __future__ import annotations

import sys
import weakref

import pytest
import torch
from lowtide.runtime.planned.detour import Detour, make_independent, places_of
from lowtide.runtime.storage.op_schema import info_of
from lowtide.runtime.storage.value import Argument, Record, Value
from lowtide.runtime.storage.views import as_bytes

PLAN = [*map(sys.intern, "abcdexyzabcde"), None]
SIN = torch.ops.aten.sin.default


def _back(left_at: int, others: str, func: str) -> int | None:
    detour = Detour(PLAN, places_of(PLAN), left_at)
    for other in others:
        detour.ran(sys.intern(other))
    return detour.way_back(sys.intern(func))


@pytest.mark.parametrize(("left_at", "others", "func", "place"), [
    (2, "q", "c", 2),  # one operator more
    (2, "qrs", "c", 2),
    (1, "c", "d", None),  # "b" left out: "acd" is not in the plan
    (1, "cd", "e", 4),
    (8, "xy", "z", 7),  # the same once more
    (5, "ab", "c", 2),  # the nearer of two places
    (6, "ab", "c", 10),  # both are four away
    (6, "bcd", "e", 4),  # back to the first "abcde": two away, the second is six
    (9, "bcd", "e", 12),
    (13, "q", "a", None),
])  # fmt: skip
def test_the_way_back(left_at: int, others: str, func: str, place: int | None) -> None:
    assert _back(left_at, others, func) == place


def test_what_ran_before_a_detour_counts() -> None:
    """One operator is left out, so the first two of the three stand before the detour."""
    assert _back(7, "", "a") is None  # expected "z"
    detour = Detour(PLAN, places_of(PLAN), 3)  # "abc" ran, "d" is left out
    assert detour.way_back("e") is None
    detour.ran("e")
    assert detour.way_back("x") is None
    detour.ran("x")
    assert detour.way_back("y") == 6


def _made(source: Value, of: torch.Tensor) -> Value:
    record = Record(SIN, info_of(SIN), (), {}, [Argument(source, of, anchored=False)], source.number + 1)
    value = Value(of.nbytes, record)
    value.number = source.number + 1
    return value


def test_what_only_the_plan_keeps_is_held_by_the_records_that_read_it() -> None:
    """A value that cannot be made again used to die with the script's reference, and with it what is made from it."""
    tensor = torch.ones(16)
    source = Value(tensor.nbytes, None)
    source.weak = weakref.ref(tensor.untyped_storage())  # type: ignore[assignment]
    made = _made(source, tensor)
    further = _made(made, tensor)
    anchors = make_independent([further, made, source])
    assert len(anchors) == 1
    del tensor
    assert made.record is not None
    assert torch.equal(made.record.inputs[0].tensor(), torch.ones(16))
    assert further.record is not None
    assert further.record.inputs[0].anchor is None, "it can be made again"


def test_what_is_made_from_a_dead_value_is_not_made_again() -> None:
    """The plan holds it as long as it is needed."""
    tensor = torch.ones(16)
    source = Value(tensor.nbytes, None)
    made = _made(source, tensor)
    made.tensor = as_bytes(tensor.untyped_storage())
    further = _made(made, tensor)
    anchors = make_independent([made, further])
    assert made.record is None
    assert further.record is not None
    assert [a.held.untyped_storage()._cdata for a in anchors if a.held is not None] == [tensor.untyped_storage()._cdata]
