"""Law: code that a compiler traces reads every gradient and state that is offloaded, as in a plain run.

Compilers trace the script past Lowtide's wrappers, and their guards read gradients in C++: neither meets the properties that
bring back what is offloaded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import lowtide
import pytest
import torch
import zoo
from torch import nn

LEVERS = ("move-gradients", "move-states")
STEPS = 5
Loss = Callable[[], torch.Tensor]


def _compiled(function: Any) -> Any:
    return torch.compile(function, backend="eager")


def in_a_function(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    @_compiled
    def step() -> None:
        optimizer.step()

    return lambda: (_loss(model).backward(), step(), optimizer.zero_grad())


def as_a_method(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    optimizer.step = _compiled(optimizer.step)  # type: ignore[method-assign]
    return lambda: (_loss(model).backward(), optimizer.step(), optimizer.zero_grad())


def with_the_backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    @_compiled
    def whole(x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return lambda: whole(torch.randn(64, 128))


def in_a_module(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    class Step(nn.Module):
        def forward(self) -> None:
            optimizer.step()

    step = _compiled(Step())
    return lambda: (_loss(model).backward(), step(), optimizer.zero_grad())


def over_two_backwards(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """Only the model is compiled; gradients of the first backward are offloaded when the second begins."""
    compiled = _compiled(model)
    return lambda: (_loss(compiled).backward(), _loss(compiled).backward(), optimizer.step(), optimizer.zero_grad())


def norms_in_a_function(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    @_compiled
    def norm() -> torch.Tensor:
        return torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()

    def step() -> None:
        _loss(model).backward()
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + norm().item())
        optimizer.step()
        optimizer.zero_grad()

    return step


def _loss(model: Any) -> torch.Tensor:
    loss: torch.Tensor = model(torch.randn(64, 128)).square().mean()
    return loss


def _train(form: Callable[..., Callable[[], object]]) -> list[bytes]:
    torch._dynamo.reset()
    zoo.seed(0)
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(128, 128), nn.Tanh())))
    step = form(model, torch.optim.Adam(model.parameters(), lr=1e-2))
    for _ in range(STEPS):
        step()
    return [zoo.bits(p) for p in model.parameters()]


@pytest.mark.parametrize("lever", LEVERS)
@pytest.mark.parametrize(
    "form", [in_a_function, as_a_method, with_the_backward, in_a_module, over_two_backwards, norms_in_a_function],
    ids=lambda f: f.__name__,
)
def test_a_compiled_step_reads_what_is_offloaded(form: Callable[..., Callable[[], object]], lever: str) -> None:
    """A compiled optimizer step used to find no gradient, and to update nothing, without a word."""
    plain = _train(form)
    with lowtide.budget(None, allow=lever) as run:
        ours = _train(form)
        moved = {x.name for x in run.outcome.levers if x.used}
    assert ("move-gradients" in moved) is (form is not with_the_backward)
    assert ours == plain


@pytest.mark.long
@pytest.mark.parametrize("lever", LEVERS)
def test_a_step_that_was_compiled_before_the_budget_computes_what_it_computes_without(lever: str) -> None:
    """Its arithmetic is Inductor's. Parameters used to be updated one by one before it, by torch's own."""

    def train(how: Any) -> list[bytes]:
        torch._dynamo.reset()
        zoo.seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=0.1)
        compiled = torch.compile(optimizer.step)

        def step() -> None:
            model(torch.randn(8, 64)).square().mean().backward()
            compiled()
            optimizer.zero_grad()

        step()
        with how:
            for _ in range(3):
                step()
        return [zoo.bits(p) for p in model.parameters()]

    assert train(lowtide.budget(None, allow=lever)) == train(contextlib.nullcontext())


def test_dynamo_is_as_before_after_a_budget() -> None:
    """Lowtide's own functions, which Dynamo leaves alone under a budget, are in none of its lists afterwards."""
    from torch._dynamo import trace_rules

    before = list(trace_rules.SKIP_DIRS)
    with lowtide.budget("1GiB"):
        assert any("lowtide" in folder for folder in set(trace_rules.SKIP_DIRS) - set(before))
    assert before == trace_rules.SKIP_DIRS
