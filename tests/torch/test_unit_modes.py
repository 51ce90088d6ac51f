"""Law: a unit runs in one of six modes and passes from one to another only as the table of transitions says.

Each row of the table is walked by a training that takes it, and no training takes one that is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import zoo
from harness import above_of, budgeted, heap, kept, plain_of
from lowtide.runtime.control.runtime import Runtime
from lowtide.runtime.units import unit as unit_module
from lowtide.runtime.units.unit import Unit
from lowtide.runtime.units.unit_mode import (
    TRANSITIONS,
    Beginning,
    Diverged,
    Following,
    Online,
    OnlineReason,
    Recording,
    UnitMode,
    Unmonitored,
)
from torch import nn

import lowtide

Passage = tuple[type[UnitMode], type[UnitMode]]
SHARE = 0.6
"""The budget, as a share of what a baseline step adds: a plan has to drop something."""


class Net(nn.Module):
    """Three layers; with ``detour`` the forward runs an operator that it did not run before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(128, 128), nn.GELU())])
        self.detour = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(x)
        return y.sin().cos() if self.detour else y.sin()


def training(step: Callable[[Net, torch.optim.Optimizer, int], None], steps: int) -> list[torch.Tensor]:
    """Train a new model; returns its weights."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for number in range(steps):
        step(net, optimizer, number)
    return [p.detach().clone() for p in net.parameters()]


def ordinary(net: Net, optimizer: torch.optim.Optimizer, number: int) -> None:
    """A step like any other."""
    del number
    optimizer.zero_grad()
    net(torch.randn(512, 128)).square().mean().backward()
    optimizer.step()


def detouring(net: Net, optimizer: torch.optim.Optimizer, number: int) -> None:
    """The last step runs another operator."""
    net.detour = number == 5
    ordinary(net, optimizer, number)


def penalized(net: Net, optimizer: torch.optim.Optimizer, number: int) -> None:
    """The last step's loss has a gradient in it."""
    if number < 9:
        ordinary(net, optimizer, number)
        return
    optimizer.zero_grad()
    loss = net(torch.randn(512, 128)).square().mean()
    slopes = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
    (loss + sum(slope.square().sum() for slope in slopes)).backward()
    optimizer.step()


def heavy(net: Net, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Gradients outweigh what is saved, and in the first step nothing says so beforehand."""
    del number
    net(torch.randn(64, 128)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def peak_of(step: Callable[[Net, torch.optim.Optimizer, int], None], steps: int) -> int:
    """Bytes that a baseline training adds to those live before."""
    counter = heap()
    training(step, 1)
    counter.tensor_peak = base = counter.tensor_live
    training(step, steps)
    return int(counter.tensor_peak - base)


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch, modes: list[tuple[UnitMode, UnitMode]]) -> Iterator[None]:
    """Note every transition of a unit."""
    true = Unit.become

    def become(unit: Unit, mode: UnitMode) -> None:
        modes.append((unit.mode, mode))
        true(unit, mode)

    with monkeypatch.context() as patch:
        patch.setattr(Unit, "become", become)
        yield


WALKS: dict[str, tuple[Callable[[Net, torch.optim.Optimizer, int], None], int, float | None, set[Passage]]] = {
    "a plan is made and followed": (ordinary, 5, SHARE, {(Beginning, Recording), (Beginning, Following)}),
    "a plan is left": (detouring, 6, SHARE, {(Beginning, Recording), (Beginning, Following), (Following, Diverged)}),
    "nothing has to be dropped": (ordinary, 9, 4.0, {(Beginning, Recording), (Beginning, Following), (Beginning, Unmonitored)}),
    "nobody watches, and a backward builds a graph": (
        penalized, 10, 4.0,
        {(Beginning, Recording), (Beginning, Following), (Beginning, Unmonitored), (Unmonitored, Online)},
    ),
    "gradients leave in its middle": (heavy, 4, 0.8, {(Beginning, Recording), (Recording, Online), (Beginning, Following)}),
    "only rescue": (ordinary, 3, None, {(Beginning, Online)}),
}


@pytest.mark.parametrize("walk", WALKS)
def test_a_unit_changes_mode_only_as_the_table_says(monkeypatch: pytest.MonkeyPatch, walk: str) -> None:
    """Each training takes exactly the expected transitions and keeps the baseline's bits."""
    step, steps, share, expected = WALKS[walk]
    plain = training(step, steps)
    budget = None if share is None else heap().tensor_live + int(share * peak_of(step, steps))
    modes: list[tuple[UnitMode, UnitMode]] = []
    with watched(monkeypatch, modes), lowtide.budget(budget):
        budgeted = training(step, steps)
    assert {(type(a), type(b)) for a, b in modes} == expected
    assert expected <= TRANSITIONS
    assert all(torch.equal(a, b) for a, b in zip(plain, budgeted, strict=True))


def test_every_transition_of_the_table_is_taken() -> None:
    assert set().union(*(expected for *_, expected in WALKS.values())) == TRANSITIONS


def test_a_unit_says_why_it_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a limit the reason is NO_LIMIT."""
    modes: list[tuple[UnitMode, UnitMode]] = []
    with watched(monkeypatch, modes), lowtide.budget(None):
        training(ordinary, 2)
    assert {mode.reason for _, mode in modes if isinstance(mode, Online)} == {OnlineReason.NO_LIMIT}


def test_a_transition_not_in_the_table_is_refused() -> None:
    unit = Unit((), 0, None, 0, 1, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="from Beginning to Diverged"):
        unit.become(Diverged(None))  # type: ignore[arg-type]
    assert isinstance(unit.mode, Beginning)
    assert unit_module.TRANSITIONS is TRANSITIONS


def test_a_backward_that_failed_to_begin_does_not_affect_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Preparing a backward may run out of memory; a script that catches the error goes on with its next batch."""
    failing = [3]

    def step(net: Net, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        loss = net(torch.randn(512, 128)).square().mean()
        if number in failing:
            return  # the baseline drops this batch, too
        loss.backward()
        optimizer.step()

    def caught(net: Net, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        loss = net(torch.randn(512, 128)).square().mean()
        if number in failing:
            with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
                patch.setattr(Runtime, "backward_begins", refuses)
                loss.backward()
            return
        loss.backward()
        optimizer.step()

    def refuses(_: Runtime) -> None:
        raise torch.OutOfMemoryError("no room to prepare a backward")

    plain = training(step, 6)
    modes: list[tuple[UnitMode, UnitMode]] = []
    with watched(monkeypatch, modes), lowtide.budget(heap().tensor_live + int(SHARE * peak_of(ordinary, 6))):
        budgeted = training(caught, 6)
    assert all(torch.equal(a, b) for a, b in zip(plain, budgeted, strict=True))
    assert len(modes) >= 6, "units begin after it, too"


class Lazy(nn.Module):
    """A model whose call only returns what is to be computed, as flows and distributions do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(96, 96), nn.GELU()) for _ in range(5)))

    def forward(self, scale: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: self.net(x * scale)


def test_a_call_that_saves_nothing_does_not_make_a_step_online() -> None:
    """Such a call used to be a unit of its own that ran online in every step, although everything that trains followed a plan.
    """

    def make() -> zoo.Job:
        return zoo.simple(Lazy(), lambda m, i: m(torch.ones(96))(torch.randn(2000, 96)).square().mean())

    reference = plain_of(make, 8)
    run = budgeted(make, above_of(reference, 0.6), 8)
    assert run.bits == reference.bits
    assert kept(run), run.over
    assert [s.policy for s in run.outcome.steps[3:]] == ["planned"] * 5
    assert run.outcome.units == 1
