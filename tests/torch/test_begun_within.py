"""Law: neither a budget nor a recording begins inside a function transform, where torch would refuse their hooks half-way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lowtide import api
from lowtide.base.errors import UsageError

import lowtide


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, lambda f: lambda x: torch.func.jvp(f, (x,), (x,))])
@pytest.mark.parametrize("kind", ["budget", "record"])
def test_a_budget_or_recording_inside_a_transform_is_refused(tmp_path: Path, transform: Callable[..., Callable[..., object]], kind: str) -> None:
    """The refusal leaves nothing running: a later block begins as usual."""
    begin = (lambda: lowtide.budget("1 GiB")) if kind == "budget" else (lambda: lowtide.record(tmp_path / "r.lowtide"))

    def model(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(UsageError, match="inside a torch.func transform"), begin():
            pass
        return x.sum()

    transform(model)(torch.ones(3, 3)[0] if transform is torch.func.grad else torch.ones(3, 3))
    assert not api._running
    with begin():
        pass
