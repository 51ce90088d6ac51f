"""Law: where a tensor's ``.data`` is replaced after autograd saved the tensor, gradients are those of plain autograd.

Backward reads an operator's input as it is by then; an operator's result that was saved is not reached by the replacement.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from harness import above_of, budgeted, plain_of
from torch import nn
from torch.utils.checkpoint import checkpoint

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
    """A tensor that two operators read and nothing else keeps."""

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


def what_was_detached_in_place() -> zoo.Job:
    """It has no node any more when its data is exchanged: what its operator saved of it is not reached even so."""

    def cell(y: torch.Tensor) -> torch.Tensor:
        h = (y * 1.5).tanh()
        out = h * 1.0 + 1
        h.detach_()
        h.data = h.data * 0.5
        return (out * 1.5).sin()

    return _job(cell)


class Steep(torch.autograd.Function):
    """Whose forward builds a graph of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Saves its input and its result."""
        with torch.enable_grad():
            (x.detach().requires_grad_() * 2).sum()
        out = x.exp().clamp(max=3.0)
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """By both."""
        x, out = ctx.saved_tensors
        return grad * out * x.cos()


def what_a_function_made() -> zoo.Job:
    """A custom function's result, and its input."""

    def cell(y: torch.Tensor) -> torch.Tensor:
        x = y * 0.5
        made = Steep.apply(x)
        out = made + 1
        made.data, x.data = made.data * 0.5, x.data * 0.75
        return (out * 1.5).sin()

    return _job(cell)


def what_a_checkpoint_reads() -> zoo.Job:
    """No node saves it; recomputed values are computed from the new data."""

    def cell(y: torch.Tensor) -> torch.Tensor:
        a = y * 1.1
        out = checkpoint(lambda a: (a.sin() * 1.5).cos(), a, use_reentrant=False)
        a.data = a.data * 0.5
        return (out * 1.5).sin()

    return _job(cell)


def whose_former_data_is_written() -> zoo.Job:
    """A saved result shows writes to the former data, although the tensor's data has been replaced."""

    def cell(y: torch.Tensor) -> torch.Tensor:
        b = (y * 1.3).sigmoid()
        out = ((y * 1.3).sin() * b).cos()
        former = b.data
        b.data = b.data * 0.5
        former.mul_(3.0)
        return out

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
    """Values computed from it are recomputed from the former data; where it was saved itself, backward reads the new data."""
    return zoo.simple(Shifts(), lambda m, _: m(torch.randn(ROWS, WIDTH)).square().mean())


JOBS = {f.__name__: f for f in (
    what_operators_read, what_an_operator_made, what_one_made_and_another_read, what_wants_no_gradient, whose_view_was_saved,
    what_was_detached_in_place, what_a_function_made, what_a_checkpoint_reads, whose_former_data_is_written,
    a_parameter_that_replays_read)}
EAGER_ONLY = {"what_a_function_made"}
"""Recordings do not tell custom functions apart."""


@pytest.mark.long("0.8-False", "1.2-True")
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("share", [1.2, 0.8])
@pytest.mark.parametrize("name", JOBS)
def test_replaced_data_keeps_bits_under_a_budget(name: str, share: float, offload: bool) -> None:
    """Values are recomputed or offloaded only where the budget needs it."""
    reference = plain_of(JOBS[name], STEPS)
    run = budgeted(JOBS[name], above_of(reference, share), STEPS, offload=offload)
    assert run.bits == reference.bits
    used = any(s.recomputed_ops or s.offloaded_bytes for s in run.outcome.steps[2:])
    assert used == (share < 1)


@pytest.mark.parametrize("name", [name for name in JOBS if name not in EAGER_ONLY])
def test_replaced_data_keeps_bits_while_recorded(name: str, tmp_path: Path) -> None:
    reference = plain_of(JOBS[name], STEPS)
    with lowtide.record(tmp_path / "r.lowtide"):
        bits = zoo.run(JOBS[name], STEPS)
    assert bits == reference.bits
