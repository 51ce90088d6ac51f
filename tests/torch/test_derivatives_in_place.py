"""Law: a derivative that the baseline computes in place takes the same bytes and gives the same bits under a recording or a
budget.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import zoo
from harness import above_of, budgeted, gradient_of, kept, looking_on, plain_of
from torch import nn

SIDE = 512


def _few() -> torch.Tensor:
    """Indices of some rows; created per call, because a module-level tensor would add to the memory of every other test."""
    return torch.arange(0, SIDE, 7)


SELECTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gather": lambda h: h.gather(0, torch.arange(SIDE).repeat(SIDE, 1).flip(1)),
    "max": lambda h: h.max(0)[0],
    "min": lambda h: h.min(1)[0],
    "kthvalue": lambda h: h.kthvalue(3, 0)[0],
    "median": lambda h: h.median(0)[0],
    "topk": lambda h: h.topk(8, 0)[0],
    "sort": lambda h: h.sort(0)[0],
    "cummax": lambda h: h.cummax(0)[0],
    "index_select": lambda h: h.index_select(0, _few()),
    "indexed": lambda h: h[_few()],
    "masked": lambda h: h[h > 0],
    "masked_select": lambda h: h.masked_select(h > 0),
    "take": lambda h: h.take(_few()),
}


def penalised() -> zoo.Job:
    """A backward that builds a graph goes through derivatives of selections, and is planned like a forward."""
    model = nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 128))
    at = torch.arange(128).repeat(256, 1).flip(1)

    def loss_of(m: nn.Module, _: int) -> torch.Tensor:
        x = torch.randn(256, 128, requires_grad=True)
        out = m(x).gather(1, at).topk(16, 1)[0][::2].square().sum(1)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean() + out.mean()

    return zoo.simple(model, loss_of)


@pytest.mark.parametrize("offload", [False, True])
def test_a_planned_backward_through_selections_keeps_bits_and_budget(*, offload: bool) -> None:
    reference = plain_of(penalised, 6)
    run = budgeted(penalised, above_of(reference, 0.8), 6, offload=offload)
    assert run.bits == reference.bits
    assert kept(run), run.over
    assert [s.policy for s in run.outcome.steps[2:]] == ["planned"] * 4


@pytest.mark.parametrize("how", ["recording", "budget"])
@pytest.mark.parametrize("name", SELECTIONS)
def test_gradients_of_selections_have_the_baselines_bits_and_bytes(name: str, how: str, tmp_path: Path) -> None:
    """The rise of memory in the backward is the same within 64 KiB."""
    sides = SIDE, SIDE
    gradient_of(SELECTIONS[name], sides, nullcontext())
    plain, before = gradient_of(SELECTIONS[name], sides, nullcontext())
    watched, after = gradient_of(SELECTIONS[name], sides, looking_on(how, tmp_path))
    assert torch.equal(watched, plain)
    assert abs(after - before) <= 64 << 10
