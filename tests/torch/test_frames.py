"""Law: the script's holder of a tensor is named as the script would write it, and none of the script's code runs for that."""

from __future__ import annotations

import dataclasses
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lowtide.recording.explanation.explanation import explain
from lowtide.runtime.intercept import script_frames
from lowtide.runtime.intercept.script_frames import holders
from lowtide.recording.reader import read
from torch import nn

import lowtide


@dataclasses.dataclass
class State:
    last: Any = None


class Slotted:
    __slots__ = ("kept", "nothing")


class Guarded:
    """Every look-up of an attribute raises."""

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"{name} was looked up")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.seen: torch.Tensor | None = None


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()


def _closure(big: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: big.sum()


def test_only_the_scripts_own_modules_count_as_its() -> None:
    """A library's objects are not looked into for attributes, whatever its name begins with."""
    assert script_frames._is_scripts("__main__")
    assert script_frames._is_scripts(__name__)
    assert not any(script_frames._is_scripts(name) for name in ("Absent.library", "absent", "json.decoder", "torch.nn.modules"))


def test_holders_are_named_as_the_script_would_write_them() -> None:
    """Attributes, slots, modules, containers, closures and nested containers; an object whose look-ups raise is read without
    them.
    """
    tensors = [torch.zeros(3) for _ in range(8)]
    state, slotted, model = State(last=tensors[0]), Slotted(), Model()
    slotted.kept = tensors[1]
    model.block.seen = tensors[2]
    queue = deque([tensors[3]], maxlen=2)
    run, guarded = _closure(tensors[4]), Guarded(tensors[5])
    nested = {"a": [tensors[6]]}
    circle: list[Any] = [state]
    circle.append(circle)
    told = {}
    for tensor, where in holders(sys._getframe()):
        told.setdefault(id(tensor), []).append(where.rpartition(" (")[0])
    names = [told[id(t)] for t in tensors]
    wanted = ["state.last", "slotted.kept", "model.block.seen", "queue[0]", "run (its big)", "guarded.inner", "nested['a'][0]"]
    assert all(name in found for name, found in zip(wanted, names, strict=False))
    assert queue and run and guarded is not None and nested


@pytest.mark.parametrize("many", [True, False])
def test_held_results_of_one_holder_are_one_finding(many: bool, tmp_path: Path) -> None:
    """Law: a growing list is reported once, with all its bytes; so is an attribute."""
    torch.manual_seed(0)
    model = nn.Linear(64, 4096)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    state, history = State(), []
    with lowtide.record(tmp_path / "r.lowtide"):
        for _ in range(6):
            out = model(torch.randn(128, 64))
            optimizer.zero_grad()
            out.square().mean().backward()
            optimizer.step()
            if many:
                history.append(out.detach())
            else:
                state.last = out.detach()
            del out
    found = [f for f in explain(read(tmp_path / "r.lowtide")).findings if f.id == "held-result"]
    assert len(found) == 1, [f.text for f in found]
    assert ("history[...]" if many else "state.last") in found[0].text
    assert found[0].saving_bytes >= (2 if many else 1) * 128 * 4096 * 4 * 0.9
