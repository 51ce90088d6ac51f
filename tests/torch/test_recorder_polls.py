"""Laws: what a recorder polls before each operator does not grow with the model, and what the unit's base loses is still seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lowtide.runtime.record.trace_recorder import TraceRecorder
from lowtide.runtime.record.watched_items import Polled

import lowtide

LAYERS = 120
MORE_THAN_ANY_NEED = "8GiB"


def _recorded_traces(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The traces that recorders finish from here on."""
    traces = []
    finish = TraceRecorder.finish

    def noted(self: TraceRecorder, *args: Any, **kwargs: Any) -> Any:
        traces.append(finish(self, *args, **kwargs))
        return traces[-1]

    monkeypatch.setattr(TraceRecorder, "finish", noted)
    return traces


def test_parameters_are_polled_a_few_per_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: a step of many parameters polls at most ten values per operator (64 before)."""
    polls = 0
    is_unheld = TraceRecorder._is_unheld

    def counted(self: TraceRecorder, value: Any) -> bool:
        nonlocal polls
        polls += 1
        return is_unheld(self, value)

    monkeypatch.setattr(TraceRecorder, "_is_unheld", counted)
    traces = _recorded_traces(monkeypatch)
    weights = [torch.randn(16, 16, requires_grad=True) for _ in range(LAYERS)]
    with lowtide.budget(MORE_THAN_ANY_NEED):
        hidden = torch.randn(16, 16)
        for weight in weights:
            hidden = torch.tanh(hidden @ weight)
        hidden.sum().backward()
    assert traces
    assert polls <= 10 * len(traces[0].events)


@pytest.mark.parametrize("is_saved", [False, True], ids=["read", "saved"])
def test_the_base_falls_where_the_script_frees_what_it_had_before(monkeypatch: pytest.MonkeyPatch, *, is_saved: bool) -> None:
    """Law: a batch made before the unit and freed within it leaves the plain run's base at once, or once autograd releases it."""
    traces = _recorded_traces(monkeypatch)
    rows = 1 << 16
    weight = torch.randn(8, 8, requires_grad=True)
    with lowtide.budget(MORE_THAN_ANY_NEED):
        weight.detach().clone().requires_grad_().sum().backward()
        batch = torch.randn(rows, 8)
        hidden = torch.relu(batch @ weight) if is_saved else torch.relu((batch * 2) @ weight)
        del batch
        for _ in range(4):
            hidden = hidden * 2
        hidden.sum().backward()
    trace = traces[-1]
    fallen = [event for event, other in enumerate(trace.other_bytes) if -other > rows * 4 * 4]
    assert fallen
    assert (fallen[0] >= trace.backward_event) is is_saved


def test_a_round_of_polls_looks_at_each_item_once() -> None:
    """Law: what happens is seen in the round in which it can be seen (one item was looked at twice, and one not at all)."""
    seen: list[int] = []

    def look(number: int) -> bool:
        seen.append(number)
        return False

    waiting = Polled([1, 2, 3])
    for _ in range(3):
        waiting.look(look)
    assert sorted(seen) == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    seen.clear()
    few = Polled(list(range(10)), most=3)
    for _ in range(10):
        few.look(look)
    assert sorted(seen) == sorted(3 * list(range(10)))
