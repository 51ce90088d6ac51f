"""Law: what a node holds while a backward runs within it is foreseen: such steps keep their budget and peak where it was said."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from harness import above_of, budgeted, kept, plain_of
from torch import nn
from torch.utils.checkpoint import checkpoint

STEPS, WIDTH, ROWS, BLOCKS = 7, 96, 384, 4


class Cells(nn.Module):
    """Each cell's backward runs another one."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """Rows (rows, width) to rows of the same width."""
        for gate in self.gates:
            h = self.cell(gate(h) * 1.1) + h
        return h

    def cell(self, y: torch.Tensor) -> torch.Tensor:
        """Computed again in the backward."""
        raise NotImplementedError


class Reentrant(Cells):
    """As torch's own checkpoints do it."""

    def cell(self, y: torch.Tensor) -> torch.Tensor:
        """Three operators."""
        return checkpoint(lambda a: ((a * 1.3).sin() * (a * 1.3).sigmoid()).cos(), y, use_reentrant=True)


class Again(torch.autograd.Function):
    """A custom function that differentiates what it computes again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Saves what it reads."""
        ctx.save_for_backward(x)
        return ((x * 1.3).sin() * 1.2).cos()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """By a graph of its own."""
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            again = x.detach().requires_grad_()
            out = ((again * 1.3).sin() * 1.2).cos()
        (found,) = torch.autograd.grad(out, again, grad)
        return found + 0 * x


class Custom(Cells):
    """By a custom function."""

    def cell(self, y: torch.Tensor) -> torch.Tensor:
        """Applied."""
        return Again.apply(y)


def reentrant() -> zoo.Job:
    """Checkpoints."""
    return zoo.simple(Reentrant(), lambda m, _: m(torch.randn(ROWS, WIDTH)).square().mean())


def custom() -> zoo.Job:
    """A function."""
    return zoo.simple(Custom(), lambda m, _: m(torch.randn(ROWS, WIDTH)).square().mean())


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("share", [0.85, 0.8])
@pytest.mark.parametrize("make", [reentrant, custom])
def test_budget_and_prediction_hold(make: Any, share: float, offload: bool) -> None:
    reference = plain_of(make, STEPS)
    run = budgeted(make, above_of(reference, share), STEPS, offload=offload)
    assert run.bits == reference.bits
    assert kept(run), run.over
    plan = run.outcome.plan
    assert plan is not None
    assert any(s.recomputed_ops or s.offloaded_bytes for s in run.outcome.steps[2:])
    assert {s.peak_bytes for s in run.outcome.steps[-2:]} == {plan.predicted_peak_bytes}
