"""Law: tracing, scripting, exporting and faking a model work under a budget, a recording and split ops as without Lowtide."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import lowtide


def net() -> nn.Sequential:
    """Two convolutions and a batch norm."""
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))


def pictures() -> torch.Tensor:
    """Large enough for a layer to be split."""
    return torch.randn(8, 3, 112, 112)


def ran(model: Callable[..., torch.Tensor], parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Output and gradients of a step."""
    held = list(parameters)
    out = model(pictures())
    out.square().mean().backward()
    return [out.detach(), *(p.grad for p in held if p.grad is not None)]


def traced() -> list[torch.Tensor]:
    """``torch.jit.trace``."""
    model = torch.jit.trace(net(), pictures())
    return ran(model, model.parameters())


def scripted() -> list[torch.Tensor]:
    """``torch.jit.script``."""
    model = torch.jit.script(net())
    return ran(model, model.parameters())


def exported() -> list[torch.Tensor]:
    """``torch.export``."""
    model = torch.export.export(net().eval(), (pictures(),)).module()
    return ran(model, model.parameters())


def symbolic() -> list[torch.Tensor]:
    """``torch.fx.symbolic_trace``."""
    model = torch.fx.symbolic_trace(net())
    return ran(model, model.parameters())


def proxies() -> list[torch.Tensor]:
    """``make_fx``, with tensors and with fake ones."""
    made = [make_fx(lambda a: (a * 2).sin(), tracing_mode=mode)(torch.randn(4)) for mode in ("real", "fake")]
    return [graph(torch.randn(4)) for graph in made]


def fakes() -> list[torch.Tensor]:
    """A whole step of tensors without bytes, and a real one after it."""
    with FakeTensorMode():
        net()(pictures()).sum().backward()
    model = net()
    return ran(model, model.parameters())


def metas() -> list[torch.Tensor]:
    """The same on the meta device."""
    with torch.device("meta"):
        net()(pictures()).sum().backward()
    model = net()
    return ran(model, model.parameters())


def compiled() -> list[torch.Tensor]:
    """``torch.compile`` without code of its own."""
    model = net()
    return ran(torch.compile(model, backend="aot_eager"), model.parameters())


def hessian() -> list[torch.Tensor]:
    """Loads torch's scripted decompositions the first time."""
    return [torch.func.hessian(lambda a: (a**3).sum())(torch.randn(4))]


def lazy() -> list[torch.Tensor]:
    """Parameters that have no bytes yet."""
    model = nn.Sequential(nn.LazyConv2d(8, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4))
    for _ in range(2):
        model(torch.randn(4, 3, 16, 16)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    return [p.grad for p in model.parameters() if p.grad is not None]


def lazy_in_turn() -> list[torch.Tensor]:
    """One lazy module after another: the next one has no bytes yet when resident bytes are counted."""
    return [tensor for _ in range(3) for tensor in lazy()]


def under(how: str, folder: Path) -> AbstractContextManager[Any]:
    """The context in which a job runs."""
    if how == "recording":
        return lowtide.record(folder / "run.lowtide")
    return contextlib.nullcontext() if how == "plain" else lowtide.budget("1GiB", allow=("split-ops",) if how == "pieces" else ())


@pytest.mark.long("traced")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["budget", "recording", "pieces"])
@pytest.mark.parametrize(
    "job", [traced, scripted, exported, symbolic, proxies, fakes, metas, compiled, lazy, lazy_in_turn, hessian], ids=lambda f: f.__name__
)
def test_tracers_work_under_lowtide_as_without(job: Callable[[], list[torch.Tensor]], how: str, tmp_path: Path) -> None:
    """With equal outputs and gradients, twice in a row and once more afterwards; split ops agree up to rounding."""
    torch.manual_seed(0)
    plain = job()
    assert plain
    for _ in range(2):
        torch.manual_seed(0)
        with under(how, tmp_path):
            found = job()
        assert len(found) == len(plain)
        for a, b in zip(found, plain, strict=True):
            assert torch.equal(a, b) if how != "pieces" else torch.allclose(a, b, rtol=1e-4, atol=1e-5)
    job()
