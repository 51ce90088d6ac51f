"""Law: where torch computes a derivative another way under a dispatch mode, gradients and peaks are still those of the
baseline.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from harness import TOLERANCE_BYTES, above_of, budgeted, gradient_of, kept, looking_on, plain_of
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.recording import file_format, reader

ROWS, COLUMNS = 512, 256


def _mask(h: torch.Tensor) -> torch.Tensor:
    return torch.arange(h.numel()).view_as(h) % 3 == 0


def _with_zeros(h: torch.Tensor) -> torch.Tensor:
    return h * (torch.arange(h.numel()).view_as(h) % 97 != 0)


def _small(h: torch.Tensor) -> torch.Tensor:
    return 1 + h / 64


def _filled_view(h: torch.Tensor) -> torch.Tensor:
    out = h.clone()
    part = out[:, :128]
    part.masked_fill_(_mask(part), h.mean())
    return out


def _singular(matrices: torch.Tensor) -> torch.Tensor:
    """Some of the determinants are zero; these have another formula."""
    return matrices * (torch.arange(16) > 0) * (torch.arange(len(matrices)) % 7 > 0)[:, None, None] + torch.eye(16)


OTHERWISE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "prod": lambda h: _small(h[0]).prod(),
    "prod of rows": lambda h: _small(h).prod(1),
    "prod of rows with zeros": lambda h: _with_zeros(_small(h)).prod(1, keepdim=True),
    "cumprod": lambda h: _small(h).cumprod(1),
    "filled by a tensor": lambda h: h.masked_fill(_mask(h), h.mean()),
    "weighed entropy": lambda h: F.binary_cross_entropy_with_logits(h, torch.rand_like(h), pos_weight=h.detach()[0].exp()),
    "determinants": lambda h: torch.linalg.det(_singular(h.view(-1, 16, 16))),
    "a view filled by a tensor": lambda h: _filled_view(h),
    "in a checkpoint": lambda h: checkpoint(lambda x: _small(x).prod(1).cumprod(0), h, use_reentrant=False),
    "in a reentrant checkpoint": lambda h: checkpoint(lambda x: _small(x).prod(1).cumprod(0), h, use_reentrant=True),
}


def _backward(make: Callable[[torch.Tensor], torch.Tensor], around: AbstractContextManager[Any]) -> tuple[torch.Tensor, int]:
    return gradient_of(lambda leaf: make(leaf * 1.5), (ROWS, COLUMNS), around)


def _twice(make: Callable[[torch.Tensor], torch.Tensor], around: AbstractContextManager[Any]) -> torch.Tensor:
    """The gradient of a gradient's square."""
    torch.manual_seed(0)
    leaf = torch.randn(32, 16, requires_grad=True)
    with around:
        (slope,) = torch.autograd.grad(make(leaf * 1.5).square().sum(), leaf, create_graph=True)
        (found,) = torch.autograd.grad(slope.square().sum(), leaf)
    return found


@pytest.mark.parametrize("how", ["recording", "budget"])
@pytest.mark.parametrize("name", OTHERWISE)
def test_gradients_have_the_baselines_bits_and_bytes(name: str, how: str, tmp_path: Path) -> None:
    _backward(OTHERWISE[name], nullcontext())
    plain, before = _backward(OTHERWISE[name], nullcontext())
    watched, after = _backward(OTHERWISE[name], looking_on(how, tmp_path))
    assert torch.equal(watched, plain)
    assert abs(after - before) <= TOLERANCE_BYTES


@pytest.mark.parametrize("how", ["recording", "budget"])
@pytest.mark.parametrize("name", [n for n in OTHERWISE if "reentrant" not in n])
def test_second_derivatives_have_the_baselines_bits(name: str, how: str, tmp_path: Path) -> None:
    plain = _twice(OTHERWISE[name], nullcontext())
    found = _twice(OTHERWISE[name], looking_on(how, tmp_path))
    assert torch.equal(found.view(torch.int32), plain.view(torch.int32)), "where a determinant is zero it is no number"


def test_nested_backwards_and_the_scripts_hooks_keep_the_bits(tmp_path: Path) -> None:
    """A custom function that runs a backward in its own, beside saved-tensor hooks and a gradient hook of the script."""
    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return _small(x).prod(1)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                (found,) = torch.autograd.grad(_small(x).prod(1), x, grads[0])
            return found

    def both(h: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
            mine = _small(h).prod(1)
        mine.register_hook(lambda g: g * 1.25)
        return Inner.apply(h) + mine  # type: ignore[no-untyped-call]

    plain, _ = _backward(both, nullcontext())
    for how in ("recording", "budget"):
        assert torch.equal(_backward(both, looking_on(how, tmp_path))[0], plain)


FORWARD: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "prod": lambda h: _small(h).prod(1),
    "layer norm": lambda h: F.layer_norm(h, (COLUMNS,)),
    "group norm": lambda h: F.group_norm(h, 4),
    "batch norm": lambda h: F.batch_norm(h, None, None, training=True),
    "instance norm": lambda h: F.instance_norm(h.view(8, -1, COLUMNS)),
    "norm of a module": lambda h: nn.Sequential(nn.LayerNorm(COLUMNS), nn.Tanh(), nn.BatchNorm1d(COLUMNS))(h),
}


def _tangent(make: Callable[[torch.Tensor], torch.Tensor], around: AbstractContextManager[Any]) -> list[torch.Tensor]:
    """Results, tangents, and the gradient of a loss of both: a backward after a dual level, and another forward after it."""
    torch.manual_seed(0)
    leaf, tangent = torch.randn(ROWS, COLUMNS, requires_grad=True), torch.randn(ROWS, COLUMNS)
    with around:
        with forward_ad.dual_level():
            y, slope = forward_ad.unpack_dual(make(forward_ad.make_dual(leaf * 1.5, tangent)))
        (y.square().sum() + slope.square().sum()).backward()
        again = (_small(leaf).prod(1) * 2).sum()
        again.backward()
    assert leaf.grad is not None
    return [y.detach(), slope.detach(), leaf.grad]


@pytest.mark.parametrize("how", ["recording", "budget"])
@pytest.mark.parametrize("name", FORWARD)
def test_dual_numbers_have_the_baselines_bits(name: str, how: str, tmp_path: Path) -> None:
    plain = _tangent(FORWARD[name], nullcontext())
    watched = _tangent(FORWARD[name], looking_on(how, tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


BATCHED: dict[str, Callable[[torch.Tensor], Any]] = {
    "jacrev": lambda x: torch.func.jacrev(lambda v: _small(v).prod(1))(x),
    "jacobian": lambda x: torch.autograd.functional.jacobian(lambda v: _small(v).prod(1), x, vectorize=True),
    "forward jacobian": lambda x: torch.autograd.functional.jacobian(
        lambda v: _small(v).prod(1), x, vectorize=True, strategy="forward-mode"
    ),
    "hessian": lambda x: torch.autograd.functional.hessian(lambda v: _small(v).prod(1).sum(), x, vectorize=True),
    "several gradients": lambda x: torch.autograd.grad(
        _small(x.requires_grad_()).prod(1), x, torch.eye(len(x)), is_grads_batched=True
    )[0],
}


@pytest.mark.parametrize("how", ["recording", "budget"])
@pytest.mark.parametrize("name", BATCHED)
def test_batched_gradients_have_the_baselines_bits(name: str, how: str, tmp_path: Path) -> None:
    x = torch.randn(16, 24)
    plain = BATCHED[name](x.clone())
    with looking_on(how, tmp_path):
        watched = BATCHED[name](x.clone())
    assert torch.equal(watched, plain)


def test_dual_levels_in_a_training_loop_keep_the_bits_under_a_budget() -> None:
    """Modes come and go between levels, so the active modes are checked when a level begins."""

    def train() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Tanh(), nn.Linear(64, 64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        found = []
        for _ in range(8):
            optimizer.zero_grad()
            with forward_ad.dual_level():
                y, slope = forward_ad.unpack_dual(model(forward_ad.make_dual(torch.randn(32, 64), torch.randn(32, 64))))
            (y.square().mean() + slope.square().mean()).backward()
            optimizer.step()
            found += [y.detach(), slope.detach()]
        return [*found, *(p.detach() for p in model.parameters())]

    plain = train()
    with lowtide.budget("64GiB"):
        found = train()
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))


@pytest.mark.parametrize("how", ["recording", "budget"])
def test_a_budget_or_recording_begun_inside_a_level_keeps_its_bits(how: str, tmp_path: Path) -> None:
    """No dispatch mode is left afterwards."""
    x, tangent = torch.randn(64, 64), torch.randn(64, 64)
    with forward_ad.dual_level():
        plain = forward_ad.unpack_dual(F.layer_norm(forward_ad.make_dual(x, tangent), (64,))).tangent
    with forward_ad.dual_level():
        with looking_on(how, tmp_path):
            watched = forward_ad.unpack_dual(F.layer_norm(forward_ad.make_dual(x, tangent), (64,))).tangent
    assert torch.equal(plain, watched)
    assert not _get_current_dispatch_mode_stack()


def test_a_recording_that_ends_inside_a_level_leaves_no_mode(tmp_path: Path) -> None:
    recording = lowtide.record(tmp_path / "b.lowtide")
    recording.__enter__()
    level = forward_ad.dual_level()
    level.__enter__()  # type: ignore[no-untyped-call]
    recording.__exit__(None, None, None)
    level.__exit__(None, None, None)
    assert not _get_current_dispatch_mode_stack()


def test_recording_goes_on_after_a_failing_autograd_node(tmp_path: Path) -> None:
    """A hook raises before the node runs; operators of the next backward are still recorded."""
    def broken(*_: Any) -> None:
        raise KeyError("mine")

    with lowtide.record(tmp_path / "run.lowtide"):
        leaf = torch.randn(64, 32, requires_grad=True)
        out = _small(leaf).prod(1)
        out.grad_fn.register_prehook(broken)  # type: ignore[union-attr]
        with pytest.raises(KeyError, match="mine"):
            out.sum().backward()
        model = nn.Linear(32, 32)
        model(leaf).prod(1).sum().backward()
    recording = reader.read(tmp_path / "run.lowtide")
    ran = [recording.names[e["a"]] for step in recording.steps if step.entries is not None
           for e in step.entries if e["kind"] == file_format.EntryKind.OP]
    assert ran.count("ProdBackward1") == 1  # the other never began
    assert "aten.mm.default" in ran[ran.index("ProdBackward1"):]


class Products(nn.Module):
    """Products of rows between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(4))
        self.value = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
            x = x.masked_fill(x > 0.9, self.value) * _small(x).prod(1, keepdim=True) + _small(x).cumprod(1)
        return x


def products() -> zoo.Job:
    """Derivatives that run without the dispatch mode, in recorded, planned and online steps."""
    return zoo.simple(Products(), lambda m, _: m(torch.randn(1024, 128)).square().mean())


@pytest.mark.parametrize(("share", "offload"), itertools.product((0.8, 0.6), (False, True)))
def test_mode_sensitive_derivatives_are_planned_under_a_budget(share: float, *, offload: bool) -> None:
    """Bits and budget hold, and all steps after the first two follow a plan."""
    reference = plain_of(products, 6)
    run = budgeted(products, above_of(reference, share), 6, offload=offload)
    assert run.bits == reference.bits
    assert kept(run), run.over
    assert [s.policy for s in run.outcome.steps[2:]] == ["planned"] * 4
