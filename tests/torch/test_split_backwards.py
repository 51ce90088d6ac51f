"""Laws of convolutions and batch norms whose backward runs in slices.

They have the plain forward's bits, and gradients at most twice as far from float64; their backward takes less memory. Calls
that are too small or not plain are left alone. The minimum of a CNN falls, and a budget below the former minimum is then held.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from harness import heap, trained_under
from lowtide.base.errors import BudgetError
from torch import nn
from torch.nn import functional as F

import lowtide

ALLOW = ("split-ops",)

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], float]] = {
    "3x3": (lambda: nn.Conv2d(32, 32, 3, padding=1), (8, 32, 40, 40), 0.6),
    "strided, no bias, batch of nine": (lambda: nn.Conv2d(32, 48, 3, padding=1, stride=2, bias=False), (9, 32, 40, 40), 0.7),
    "depthwise": (lambda: nn.Conv2d(32, 32, 7, padding=3, groups=32), (8, 32, 40, 40), 0.8),
    "dilated, one side": (lambda: nn.Conv1d(32, 32, 5, dilation=2), (20, 32, 600), 0.9),
    "three sides": (lambda: nn.Conv3d(8, 8, 3), (5, 8, 16, 24, 24), 1.05),
    "transposed": (lambda: nn.ConvTranspose2d(32, 16, 3, 2, 1, 1), (8, 32, 40, 40), 0.6),
    "batch norm": (lambda: nn.BatchNorm2d(40), (8, 40, 40, 40), 0.7),
    "batch norm, evaluating": (lambda: nn.BatchNorm2d(40).eval(), (8, 40, 40, 40), 0.7),
    "batch norm, neither weight nor statistics": (
        lambda: nn.BatchNorm2d(40, affine=False, track_running_stats=False), (8, 40, 40, 40), 0.7,
    ),
    "batch norm of rows": (lambda: nn.BatchNorm1d(600), (800, 600), 0.7),
}


def _pass(layer: nn.Module, x: torch.Tensor, *, graph: bool = False) -> tuple[list[torch.Tensor], int]:
    """Output, buffers and gradients, and the bytes that the backward took above those live before it."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    out = layer(x)
    given = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    if graph:
        (slope,) = torch.autograd.grad((out * given).square().sum(), x, create_graph=True)
        out, given = slope, slope.detach()
    heap().tensor_peak = base = heap().tensor_live
    out.backward(given)
    rise = heap().tensor_peak - base
    buffers = [b.clone() for b in layer.buffers() if b.is_floating_point()]
    assert x.grad is not None
    return [out.detach(), *buffers, x.grad, *(p.grad.clone() for p in layer.parameters() if p.grad is not None)], rise


def _in_pieces(layer: nn.Module, x: torch.Tensor, **how: Any) -> tuple[list[torch.Tensor], int, bool]:
    with lowtide.budget(None, allow=ALLOW, without="move-gradients") as run:
        found, rise = _pass(layer, x, **how)
        return found, rise, any(lever.used for lever in run.outcome.levers if lever.name in ALLOW)


def _errors(found: list[torch.Tensor], exact: list[torch.Tensor]) -> list[float]:
    return [float((a.double() - e).norm() / (e.norm() + 1e-30)) for a, e in zip(found, exact, strict=True)]


@pytest.mark.parametrize("name", LAYERS)
def test_a_split_backward_keeps_forward_bits_and_nearly_exact_gradients(name: str) -> None:
    """Gradients are at most twice as far from float64 as the baseline's, and the backward's rise falls as stated for each
    layer.
    """
    make, shape, share = LAYERS[name]
    torch.manual_seed(0)
    layer, x = make(), torch.randn(shape)
    exact, _ = _pass(copy.deepcopy(layer).double(), x.double())
    _pass(copy.deepcopy(layer), x)
    plain, before = _pass(copy.deepcopy(layer), x)
    pieces, after, used = _in_pieces(copy.deepcopy(layer), x)
    assert used
    assert torch.equal(pieces[0], plain[0])
    assert after < share * before
    for ours, theirs in zip(_errors(pieces, exact), _errors(plain, exact), strict=True):
        assert ours <= 2 * theirs + 2**-24


@pytest.mark.parametrize("name", ["3x3", "transposed", "batch norm"])
def test_a_differentiable_backward_of_split_layers_agrees_with_plain(name: str) -> None:
    make, shape, _ = LAYERS[name]
    torch.manual_seed(0)
    layer, x = make(), torch.randn(shape)
    plain, _ = _pass(copy.deepcopy(layer), x, graph=True)
    pieces, _, used = _in_pieces(copy.deepcopy(layer), x, graph=True)
    assert used
    assert all(e < 1e-5 for e in _errors(pieces, [t.double() for t in plain]))


def test_split_layers_keep_types_and_outputs_under_autocast() -> None:
    torch.manual_seed(0)
    layer, x = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32)), torch.randn(8, 32, 40, 40)

    def once() -> list[torch.Tensor]:
        twin, given = copy.deepcopy(layer), x.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = twin(given)
        out.float().square().sum().backward()
        assert given.grad is not None
        return [out.detach(), given.grad, *(p.grad for p in twin.parameters() if p.grad is not None)]

    plain = once()
    with lowtide.budget(None, allow=ALLOW) as run:
        pieces = once()
        assert run.outcome.levers[-1].used
    assert torch.equal(pieces[0], plain[0])
    assert [t.dtype for t in pieces] == [t.dtype for t in plain]
    assert all(e < 0.02 for e in _errors(pieces[1:3], [t.double() for t in plain[1:3]]))


def _small(layer: nn.Module) -> Any:
    return layer(torch.randn(8, 32, 8, 8))


def _one(layer: nn.Module) -> Any:
    return layer(torch.randn(1, 32, 128, 128))


def _unbatched(layer: nn.Module) -> Any:
    return layer(torch.randn(32, 128, 128))


def _transformed(layer: nn.Module) -> Any:
    weights = {k: v.detach() for k, v in layer.named_parameters()}
    x = torch.randn(8, 32, 40, 40)
    return torch.func.grad(lambda w: torch.func.functional_call(layer, w, (x,)).sum())(weights)


def _forward_mode(layer: nn.Module) -> Any:
    x = torch.randn(8, 32, 40, 40)
    return torch.func.jvp(layer, (x,), (torch.ones_like(x),))


def _as_dual(layer: nn.Module) -> Any:
    x = torch.randn(8, 32, 40, 40)
    with torch.autograd.forward_ad.dual_level():
        return torch.autograd.forward_ad.unpack_dual(layer(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))).tangent


def _without_gradients(layer: nn.Module) -> Any:
    with torch.no_grad():
        return layer(torch.randn(8, 32, 40, 40))


@pytest.mark.parametrize(
    "job", [_small, _one, _unbatched, _transformed, _forward_mode, _as_dual, _without_gradients],
)
def test_small_inputs_and_transforms_are_not_split(job: Callable[[nn.Module], Any]) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(32, 32, 3, padding=1)
    with lowtide.budget(None, allow=ALLOW) as run:
        job(layer)
        assert not run.outcome.levers[-1].used


def test_torchs_functions_are_restored_after_split_ops() -> None:
    before = (torch.conv2d, F.conv2d, F.conv_transpose1d, torch.batch_norm)
    with lowtide.budget(None, allow=ALLOW):
        assert torch.conv2d is not before[0]
    assert (torch.conv2d, F.conv2d, F.conv_transpose1d, torch.batch_norm) == before


def _net() -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in ((3, 24), (24, 24), (24, 24), (24, 24)):
        layers += [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10))


def _train(steps: int = 5) -> list[torch.Tensor]:
    zoo.seed(0)
    model = _net()
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    for _ in range(steps):
        opt.zero_grad()
        loss = F.cross_entropy(model(torch.randn(16, 3, 48, 48)), torch.randint(0, 10, (16,)))
        loss.backward()
        opt.step()
        found.append(loss.detach().clone())
        del loss
    return [*found, *(t.detach().clone() for t in (*model.parameters(), *model.buffers()))]


BELOW = 0.95
"""The budget, as a share of the floor without the lever: a convolution's workspace, and so the floor, differs by processor."""


@pytest.mark.parametrize("offload", [False, True])
def test_a_cnn_holds_a_budget_below_its_minimum_without_split_ops(*, offload: bool) -> None:
    """Without the lever this budget is refused; with it, it is held with the bits of a roomier run."""
    torch.use_deterministic_algorithms(mode=True)
    _train(1)
    gc.collect()
    heap().tensor_peak = base = heap().tensor_live
    _train()
    plain = heap().tensor_peak - base

    _, outcome, at, _ = trained_under(_train, int(0.9 * plain), offload=offload)
    assert outcome.plan is not None
    asked = int(BELOW * (outcome.plan.bound_peak_bytes - at))
    with pytest.raises(BudgetError):
        trained_under(_train, asked, offload=offload)
    free, *_ = trained_under(_train, int(0.9 * plain), offload=offload, allow=ALLOW)
    held, outcome, _, peak = trained_under(_train, asked, offload=offload, allow=ALLOW)
    assert all(torch.equal(a, b) for a, b in zip(held, free, strict=True))
    assert outcome.held, [(s.policy, s.peak_bytes - at) for s in outcome.steps]  # planned, or online if time is short
    assert peak <= asked + (64 << 10)
