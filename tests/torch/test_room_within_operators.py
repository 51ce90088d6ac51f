"""Law: whatever is evicted while an operator is being called, the run keeps its bits and every value can be made again."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from harness import budgeted, plain_of
from lowtide.runtime.online.eviction import Evictor
from lowtide.runtime.online.retry import OperatorRetry
from lowtide.runtime.storage.value import Value
from torch import nn


class Scratch(nn.Module):
    """Layers that work on a buffer, which each of them overwrites in part."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(4))
        self.register_buffer("scratch", torch.zeros(16, 64, 48))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.new_zeros(())
        for layer in self.layers:
            self.scratch.narrow(1, 0, 40).copy_(x[:, :40])
            shown = self.scratch * 1.0
            total = total + F.gelu(layer(shown.sin()) * shown).mean()
        return total


def scratch() -> zoo.Job:
    """A job of :class:`Scratch`."""
    return zoo.simple(Scratch(), lambda m, _: m(torch.randn(16, 64, 48)))


@pytest.mark.long("1-gpt", "4-gpt", "5-gpt", "6-gpt", "7-gpt")
@pytest.mark.parametrize("make", [scratch, zoo.cnn, zoo.lstm, zoo.gpt_eager])
@pytest.mark.parametrize("number", range(8))
def test_anything_may_be_evicted_while_an_operator_is_called(make: Any, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for an operator is made after its arguments are recorded: what it reads may then lose what it was made from."""
    reference = plain_of(make, 2)
    chance, called, evictions = random.Random(number), OperatorRetry.call, []

    def call(self: OperatorRetry, func: Any, info: Any, args: Any, kwargs: Any) -> Any:
        if chance.random() < 0.3:
            evictor: Evictor = self._evictor
            evictions.append(evictor.make_room(1 << chance.randrange(12, 24)))
            evictor._forget({id(anchor) for anchor in evictor.anchors if chance.random() < 0.5})
        return called(self, func, info, args, kwargs)

    def seconds(self: Evictor, value: Value) -> float:
        return 10 ** chance.uniform(-8, -2)

    monkeypatch.setattr(OperatorRetry, "call", call)
    monkeypatch.setattr(Evictor, "_chain_seconds", seconds)
    run = budgeted(make, 1 << 30, 2)
    assert any(evictions)
    assert run.bits == reference.bits
