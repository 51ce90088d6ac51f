"""Law: what is computed from memory that the script writes later is not recomputed from it, also if nothing was saved by then."""

from __future__ import annotations

import lowtide
import pytest
import torch
from lowtide import api
from torch import nn


class Normalized(nn.Module):
    """Running statistics of the input, without gradients: when they are written, autograd has saved nothing yet."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(128))
        self.layers = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.tanh(x - self.mean)
        self.mean.mul_(0.9).add_(z.mean(0), alpha=0.1)
        return self.layers((z * 2).sigmoid())


def gradients() -> list[torch.Tensor]:
    """Of one backward; under a budget, the result of the sigmoid is dropped as soon as it was saved, as plans drop values."""
    torch.manual_seed(0)
    model, x = Normalized(), torch.randn(512, 128)

    def drops(*_: object) -> None:
        for runtime in api._running:
            assert isinstance(runtime, api.Runtime)
            runtime.interception.evictor.planned = lambda site, slot: "sigmoid" in site.op

    model.register_forward_pre_hook(drops)
    loss = model(x).square().mean()
    loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("offload", [False, True])
def test_values_computed_from_written_statistics_keep_their_bits(offload: bool) -> None:
    """A ReplayError used to end the script: the input of the first layer was dropped, and its recompute read the statistics."""
    expected = gradients()
    with lowtide.budget("1 GiB", offload=offload):
        found = gradients()
    assert len(found) == len(expected) == 4
    assert all(map(torch.equal, found, expected))
