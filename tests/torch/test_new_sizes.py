"""Law: where sizes are new in every step, the bits are the plain run's, and the budget is held."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import zoo
from harness import above_of, budgeted, plain_of
from torch import nn
from torch.nn import functional as F

STEPS = 14


def _lengths(least: int, most: int, seed: int = 0) -> list[int]:
    """All different, so that no unit comes twice."""
    return random.Random(seed).sample(range(least, most), STEPS)


def gpt() -> zoo.Job:
    """A transformer whose sequences are as long as they come."""
    lengths = _lengths(24, 65)
    return zoo.simple(zoo.GPT(fused=True, layers=3), lambda m, i: zoo.language_loss(m, length=lengths[i]))


def convolutions() -> zoo.Job:
    """Batches of different sizes; libraries choose algorithms by them."""
    sizes = _lengths(8, 40)
    model = nn.Sequential(*(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.BatchNorm2d(8)) for _ in range(4)))
    return zoo.simple(model, lambda m, i: m(torch.randn(sizes[i], 8, 24, 24)).square().mean())


def two_roots() -> zoo.Job:
    """Two models called one after the other, of whose sizes now one and now the other is large."""
    first, second = _lengths(64, 200, 1), _lengths(64, 200, 2)
    left, right = (nn.Sequential(*(nn.Sequential(nn.Linear(96, 96), nn.GELU()) for _ in range(4))) for _ in range(2))
    optimizer = torch.optim.AdamW([*left.parameters(), *right.parameters()])

    def step(i: int) -> torch.Tensor:
        loss = left(torch.randn(first[i], 96)).square().mean() + right(torch.randn(second[i], 96)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return zoo.Job(step, [left, right], [optimizer])


class Longer(nn.Module):
    """Runs another operator where a sequence is long."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
            if len(x) > 150:
                x = x.sin()
        return x


def branches() -> zoo.Job:
    """Which operators run depends on the size: what is known of smaller units says nothing of larger ones."""
    sizes = _lengths(64, 260)
    return zoo.simple(Longer(), lambda m, i: m(torch.randn(sizes[i], 96)).square().mean())


@pytest.mark.parametrize("share", [0.7, 0.5])
@pytest.mark.parametrize("make", [gpt, convolutions, two_roots, branches])
def test_bits_and_budget_hold(make: Callable[[], zoo.Job], share: float) -> None:
    reference = plain_of(make, STEPS)
    run = budgeted(make, above_of(reference, share), STEPS, offload=False)
    assert run.bits == reference.bits
    crossed = [policy for policy, over in run.over if over > 0]
    assert len(crossed) <= (make is branches), run.over  # of another branch than any that was seen nothing is known
