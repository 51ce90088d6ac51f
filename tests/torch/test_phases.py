"""Law: the phase of a step follows the script's calls, also where they nest."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import MagicMock

import pytest
import torch
from lowtide.base.trace import Phase
from lowtide.runtime.intercept.phases import PhaseTracker
from torch import nn


@pytest.fixture
def clock() -> Iterator[PhaseTracker]:
    """A tracker that nobody listens to."""
    tracker = PhaseTracker(MagicMock())
    tracker.install()
    yield tracker
    tracker.remove()


class Force(nn.Module):
    """A forward that needs a derivative, as interatomic potentials do."""

    def __init__(self, clock: PhaseTracker) -> None:
        super().__init__()
        self.layer, self.seen, self.clock = nn.Linear(4, 4), [clock.phase], clock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        energy = self.layer(x).square().sum()
        (slope,) = torch.autograd.grad(energy, x, create_graph=True)
        self.seen.append(self.clock.phase)
        return slope


def test_a_derivative_within_a_forward_leaves_the_step_in_the_forward(clock: PhaseTracker) -> None:
    model = Force(clock)
    loss = model(torch.randn(3, 4, requires_grad=True)).square().sum()
    assert model.seen == [Phase.DATA, Phase.FORWARD]
    assert clock.phase is Phase.LOSS
    loss.backward()
    assert clock.phase is Phase.DATA


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("closure", [True, False])
def test_a_loss_goes_on_after_a_derivative_that_builds_a_graph(clock: PhaseTracker, *, closure: bool, graph: bool) -> None:
    """A physics-informed loss asks for derivatives one after the other, perhaps within an optimizer's closure: what it does in
    between belongs to what plans follow. A backward without a graph of its own ends the loss.
    """
    model, seen = nn.Linear(4, 4), []

    def once() -> torch.Tensor:
        x = torch.randn(3, 4, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=graph)
        seen.append((clock.phase, clock.scripted))
        return slope.square().sum()

    if closure:
        torch.optim.SGD(model.parameters(), lr=0.1).step(once)  # type: ignore[arg-type, call-overload]
    else:
        once()
    rest = Phase.OPTIMIZER if closure else Phase.DATA
    phase = Phase.LOSS if graph else rest
    assert seen == [(phase, phase is not Phase.OPTIMIZER)]
    assert clock.phase is (Phase.DATA if closure else phase)
