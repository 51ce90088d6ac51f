"""Law: what traces, scripts, exports or fakes a model works under a budget, under a recording and with layers in pieces as without."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
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
    """Large enough for a layer to be cut."""
    return torch.randn(8, 3, 112, 112)


def traced() -> None:
    """``torch.jit.trace``."""
    torch.jit.trace(net(), pictures())(pictures()).sum().backward()


def scripted() -> None:
    """``torch.jit.script``."""
    torch.jit.script(net())(pictures()).sum().backward()


def exported() -> None:
    """``torch.export``."""
    torch.export.export(net().eval(), (pictures(),)).module()(pictures()).sum().backward()


def symbolic() -> None:
    """``torch.fx.symbolic_trace``."""
    torch.fx.symbolic_trace(net())(pictures()).sum().backward()


def proxies() -> None:
    """``make_fx``, with tensors and with fake ones."""
    for mode in ("real", "fake"):
        make_fx(lambda a: (a * 2).sin(), tracing_mode=mode)(torch.randn(4))


def fakes() -> None:
    """A whole step of tensors without bytes, and a real one after it."""
    with FakeTensorMode():
        net()(pictures()).sum().backward()
    net()(pictures()).sum().backward()


def metas() -> None:
    """The same on the meta device."""
    with torch.device("meta"):
        net()(pictures()).sum().backward()


def compiled() -> None:
    """``torch.compile`` without code of its own."""
    torch.compile(net(), backend="aot_eager")(pictures()).sum().backward()


def hessian() -> None:
    """Loads torch's scripted decompositions the first time."""
    torch.func.hessian(lambda a: (a**3).sum())(torch.randn(4))


def lazy() -> None:
    """Parameters that have no bytes yet."""
    model = nn.Sequential(nn.LazyConv2d(8, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4))
    for _ in range(2):
        model(torch.randn(4, 3, 16, 16)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def lazy_in_turn() -> None:
    """One lazy module after another: the next has no bytes yet where what is resident is looked at."""
    for _ in range(3):
        lazy()


def under(how: str, folder: Path) -> AbstractContextManager[Any]:
    """What it all runs under."""
    if how == "recording":
        return lowtide.record(folder / "run.lowtide")
    return contextlib.nullcontext() if how == "plain" else lowtide.budget("1GiB", allow=("split-ops",) if how == "pieces" else ())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["budget", "recording", "pieces"])
@pytest.mark.parametrize(
    "job", [traced, scripted, exported, symbolic, proxies, fakes, metas, compiled, lazy, lazy_in_turn, hessian], ids=lambda f: f.__name__
)
def test_tracers_work_as_they_do_without_us(job: Callable[[], None], how: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    for _ in range(2):
        with under(how, tmp_path):
            job()
    job()
