"""Law: where a tensor's data is exchanged after autograd saved it, gradients are those of plain autograd.

What an operator read is read as it is by the time of the backward; what an operator made is not reached by the exchange.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import zoo
from harness import above_of, budgeted, plain_of
from torch import nn

import lowtide

STEPS, WIDTH, ROWS, BLOCKS = 7, 96, 384, 4


def _job(cell: Callable[[torch.Tensor], torch.Tensor]) -> zoo.Job:
    gates = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))

    class Cells(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gates = gates

        def forward(self, h: torch.Tensor) -> torch.Tensor:
            for gate in self.gates:
                h = cell(gate(h)) + h
            return h

    return zoo.simple(Cells(), lambda m, _: m(torch.randn(ROWS, WIDTH)).square().mean())


def what_operators_read() -> zoo.Job:
    """A tensor that two operators read, and that is kept by nobody else."""

    def cell(y: torch.Tensor) -> torch.Tensor:
        y = y * 1.5
        out = y.cos() * y.sin()
        y.data = y.data * 0.5
        return out

    return _job(cell)


def what_an_operator_made() -> zoo.Job:
    """A result that its own operator needs again: the exchange does not reach it."""

    def cell(y: torch.Tensor) -> torch.Tensor:
        out = y.exp().clamp(max=2.0)
        made = out.sigmoid()
        out = made + 1
        made.data = made.data * 0.5
        return out

    return _job(cell)


def what_one_made_and_another_read() -> zoo.Job:
    """Both at once, exchanged twice, the second time for other strides."""

    def cell(y: torch.Tensor) -> torch.Tensor:
        made = y.tanh()
        out = made * made.cos()
        made.data = made.data * 0.5
        made.data = torch.full((WIDTH, ROWS), 0.25).t()
        return out

    return _job(cell)


def what_wants_no_gradient() -> zoo.Job:
    """A mask made on the way: a leaf of autograd's graph."""

    def cell(y: torch.Tensor) -> torch.Tensor:
        mask = (y.detach() > 0).float()
        out = (y * mask * 1.5).sin() * mask
        mask.data = mask.data * 0.5
        return out

    return _job(cell)


def whose_view_was_saved() -> zoo.Job:
    """The view that was saved is another tensor: it shows the former data."""

    def cell(y: torch.Tensor) -> torch.Tensor:
        y = y * 1.5
        out = y.view(-1).sin().view_as(y)
        y.data = y.data * 0.5
        return (out * 1.5).cos()

    return _job(cell)


class Shifts(nn.Module):
    """Parameters that autograd does not save, and whose data is exchanged before the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.shifts = nn.ParameterList(torch.full((WIDTH,), 0.5) for _ in range(BLOCKS))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        for shift in self.shifts:
            h = ((h + shift).sin() * shift).cos() + h
        for shift in self.shifts:
            shift.data = shift.data * 0.75
        return h


def a_parameter_that_replays_read() -> zoo.Job:
    """What was made from it is made again from the former data; where it was saved itself, backward reads the new."""
    return zoo.simple(Shifts(), lambda m, _: m(torch.randn(ROWS, WIDTH)).square().mean())


JOBS = {f.__name__: f for f in (
    what_operators_read, what_an_operator_made, what_one_made_and_another_read, what_wants_no_gradient, whose_view_was_saved,
    a_parameter_that_replays_read)}


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("share", [1.2, 0.8])
@pytest.mark.parametrize("name", JOBS)
def test_bits_hold_where_data_is_exchanged_under_a_budget(name: str, share: float, offload: bool) -> None:
    reference = plain_of(JOBS[name], STEPS)
    run = budgeted(JOBS[name], above_of(reference, share), STEPS, offload=offload)
    assert run.bits == reference.bits
    used = any(s.recomputed_ops or s.offloaded_bytes for s in run.outcome.steps[2:])
    assert used == (share < 1)


@pytest.mark.parametrize("name", JOBS)
def test_bits_hold_where_data_is_exchanged_while_it_is_recorded(name: str, tmp_path: Path) -> None:
    reference = plain_of(JOBS[name], STEPS)
    with lowtide.record(tmp_path / "r.lowtide"):
        bits = zoo.run(JOBS[name], STEPS)
    assert bits == reference.bits
