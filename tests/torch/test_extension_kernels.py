"""Law: kernels that autograd sees into in a plain run, and leaves of the script's own type, give the plain run's gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import zoo
from harness import above_of, budgeted, kept, looking_on, plain_of
from torch import nn

STEPS = 7
LIBRARY = torch.library.Library("lowtide_kernels", "DEF")
LIBRARY.define("gated(Tensor x, Tensor weight) -> Tensor")
LIBRARY.define("slope(Tensor x) -> Tensor")
LIBRARY.impl("gated", lambda x, weight: torch.tanh(x * weight) * weight + x, "CPU")


def _slope(x: torch.Tensor) -> torch.Tensor:
    """The derivative of a function, by autograd within the kernel."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        (found,) = torch.autograd.grad(leaf.sin().square().sum(), leaf)
    return found


LIBRARY.impl("slope", _slope, "CPU")


class Gated(nn.Module):
    """Layers between which an extension's operator is called that has no kernel for autograd."""

    def __init__(self, inner: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(96, 96), nn.GELU(), nn.LayerNorm(96)) for _ in range(5))
        self.weight, self.inner = nn.Parameter(torch.ones(96)), inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) + self.inner(x, self.weight)
        return x.square().mean()


def gated() -> zoo.Job:
    return zoo.simple(Gated(torch.ops.lowtide_kernels.gated), lambda m, _: m(torch.randn(1024, 96)))


def slope() -> zoo.Job:
    return zoo.simple(Gated(lambda x, weight: torch.ops.lowtide_kernels.slope(x) * weight), lambda m, _: m(torch.randn(1024, 96)))


@pytest.mark.parametrize("share", [0.9, 0.6])
@pytest.mark.parametrize("make", [gated, slope])
def test_gradients_through_a_kernel_in_python_are_those_of_the_plain_run(make: Callable[[], zoo.Job], share: float) -> None:
    """Online, recorded and planned steps alike; what autograd saves within the kernel is planned, too."""
    reference = plain_of(make, STEPS)
    run = budgeted(make, above_of(reference, share), STEPS)
    assert run.bits == reference.bits
    assert kept(run)
    assert run.outcome.steps[-1].policy == "planned"


@pytest.mark.parametrize("how", ["budget", "record"])
@pytest.mark.parametrize("make", [gated, slope])
def test_looking_on_changes_no_gradient_through_a_kernel_in_python(
    make: Callable[[], zoo.Job], how: str, tmp_path: Path
) -> None:
    """A recording, and a budget that is never reached."""
    reference = plain_of(make, STEPS)
    with looking_on(how, tmp_path):
        assert zoo.run(make, STEPS) == reference.bits


class Scale(torch.Tensor):
    """A type of the script's own, which handles no operators itself."""


class Scaled(nn.Module):
    """Layers that a leaf of such a type scales."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(96, 96), nn.GELU(), nn.LayerNorm(96)) for _ in range(5))
        self.scale = torch.linspace(0.5, 1.5, 96).as_subclass(Scale).requires_grad_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = (layer(x) * self.scale).as_subclass(torch.Tensor) + x
        return x.square().mean()


def scaled() -> zoo.Job:
    model = Scaled()
    optimizer = torch.optim.SGD([*model.parameters(), model.scale], lr=1e-2)

    def step(_: int) -> torch.Tensor:
        loss = model(torch.randn(1024, 96))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return torch.stack([loss.detach(), model.scale.detach().as_subclass(torch.Tensor).sum()])

    return zoo.Job(step, [model], [optimizer])


@pytest.mark.parametrize("share", [2.0, 0.6])
def test_a_leaf_of_the_scripts_own_type_is_saved_as_without_lowtide(share: float) -> None:
    """With room for all, and where saved tensors are evicted."""
    reference = plain_of(scaled, STEPS)
    run = budgeted(scaled, above_of(reference, share), STEPS)
    assert run.bits == reference.bits
    assert kept(run)


def test_autocast_is_on_in_such_a_kernel_as_without_lowtide(tmp_path: Path) -> None:
    """Products in the kernel are computed in the lower precision."""
    made: list[torch.dtype] = []

    def product(x: torch.Tensor) -> torch.Tensor:
        out = x @ x
        made.append(out.dtype)
        return out.float()

    LIBRARY.define("product(Tensor x) -> Tensor")
    LIBRARY.impl("product", product, "CPU")
    x = torch.randn(8, 8)

    def call() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.ops.lowtide_kernels.product(x)

    plain = call()
    with looking_on("record", tmp_path):
        assert torch.equal(call(), plain)
    assert made[0] is made[1] is torch.bfloat16
