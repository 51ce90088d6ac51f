"""Law: the graph of a recorded step, played in its own order, has the measured height inside each operator.

The recording also shows what besides autograd holds a saved tensor, and when and for how long backward asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lowtide.base.errors import RecordingError
from lowtide.recording.recorded_step import Block, RecordedStep, laid_out
from lowtide.planning.graph import Graph
from lowtide.planning.schedule import Act, plain_row, unfold
from lowtide.recording.graph import graph_of, operator_of
from lowtide.recording.reader import read
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lowtide


def heights(graph: Graph) -> dict[int, int]:
    """For each operator's place in the step, the most bytes inside it when the graph is played in its own order."""
    ops, nodes = operator_of(graph), graph.nodes
    board, found = graph.resident_bytes, {}
    for act, v in unfold(graph, plain_row(graph)):
        if act is Act.FREE:
            board -= nodes[v].bytes
            continue
        board += sum(nodes[u].bytes for u in (v, *graph.members[v]))
        if act is Act.UPDATE:
            board -= sum(nodes[o].bytes for o in graph.olds[v])
        if v in ops:
            found[ops[v]] = board + nodes[v].workspace_bytes
    return found


def recorded(folder: Path, net: nn.Module, loss_of: Callable[[nn.Module], torch.Tensor], **how: object) -> list[RecordedStep]:
    """Steps of a training."""
    optimizer = torch.optim.AdamW(net.parameters(), **how)  # type: ignore[arg-type]
    with lowtide.record(folder / "run.lowtide"):
        for _ in range(3):
            loss = loss_of(net)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return [s for s in laid_out(read(folder / "run.lowtide")) if s.row.complete and s.row.step >= 0]


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.MultiheadAttention(64, 4, dropout=0.1, batch_first=True), nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.inner(x, x, x)[0])


class _Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(32, 64), nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x.new_zeros(x.shape[1], 64)
        for row in x:
            state = F.dropout(self.cell(row, state), 0.1)
        return self.out(state)


def _pictures() -> nn.Module:
    return nn.Sequential(*(m for i in range(3) for m in (nn.Conv2d(16 if i else 3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], torch.Tensor]]] = {
    "dense": (
        lambda: nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 64)),
        lambda net: net(torch.randn(128, 64)).square().mean(),
    ),
    "pictures": (_pictures, lambda net: net(torch.randn(8, 3, 32, 32)).square().mean()),
    "attention": (_Attention, lambda net: net(torch.randn(8, 48, 64)).pow(3).mean()),
    "classes": (lambda: nn.Linear(64, 4096), lambda net: F.cross_entropy(net(torch.randn(256, 64)), torch.randint(4096, (256,)))),
    "cells": (_Cells, lambda net: F.cross_entropy(net(torch.randn(12, 64, 32)), torch.randint(4, (64,)))),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("foreach", [False, True])
def test_each_operator_of_the_graph_has_its_measured_height(tmp_path: Path, name: str, *, foreach: bool) -> None:
    """Within 512 bytes at every operator, and 0.1 % at the highest."""
    make, loss_of = CASES[name]
    steps = recorded(tmp_path, make(), loss_of, foreach=foreach)
    assert len(steps) == 3
    for step in steps:
        found = heights(graph_of(step))
        assert len(found) == len(step.ops)
        highest = [int(peak) for peak in step.peaks]
        assert abs(max(found.values()) - max(highest)) <= 1e-3 * max(highest)
        for k, bytes_ in found.items():
            assert abs(bytes_ - highest[k]) <= 512


class _Frame(nn.Module):
    """Its product is saved by the operator that squares it, and a local variable holds it while two more operators run."""

    def __init__(self, *, deletes: bool) -> None:
        super().__init__()
        self.weights, self.deletes = nn.Linear(64, 64), deletes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.weights(x)
        y = h.square()
        if self.deletes:
            del h
        return y.tanh().sigmoid()


def block_of(step: RecordedStep, op: str, nth: int = 0) -> Block:
    """The nth block that an operator made."""
    return [b for b in step.blocks if b.op == op][nth]


def until(step: RecordedStep, block: Block) -> str:
    """The operator until whose end something other than autograd holds a block."""
    graph = graph_of(step)
    node = next(n for n in graph.nodes if n.id == f"block{block.number}")
    assert node.held_until is not None
    k = operator_of(graph)[node.held_until]
    return step.names[step.entries["a"][step.ops[k]]]


@pytest.mark.parametrize(("deletes", "last"), [(False, "aten.sigmoid.default"), (True, "aten.pow.Tensor_Scalar")])
def test_a_local_variable_holds_a_saved_tensor_until_its_frame_ends(tmp_path: Path, *, deletes: bool, last: str) -> None:
    """Or until it is deleted."""
    step = recorded(tmp_path, _Frame(deletes=deletes), lambda net: net(torch.randn(128, 64)).square().mean())[-1]
    assert until(step, block_of(step, "aten.addmm.default")) == last


class _HeldBase(torch.nn.Module):
    """An LSTM makes its zeros itself and saves views of them."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cells(x)[0].tanh()


def test_a_tensor_held_only_as_the_base_of_a_saved_view_is_not_held(tmp_path: Path) -> None:
    step = recorded(tmp_path, _HeldBase(), lambda net: net(torch.randn(8, 16, 64)).square().mean())[-1]
    zeros = [b for b in step.blocks if b.op == "aten.zeros.default" and b.saved]
    assert len(zeros) == 2
    assert all(b.unheld is not None and b.unheld < b.needs[0][0] for b in zeros)


class _Scaled(torch.autograd.Function):
    """Its backward runs two operators before the one that reads what it saved, and one after."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return grad.neg().abs().mul(y).add(1)


def test_a_node_holds_its_saved_tensor_until_it_ends(tmp_path: Path) -> None:
    """All operators of a custom backward that unpacked a tensor read it in the graph, also those before and after the one that
    really does.
    """
    net = nn.Linear(64, 64)
    step = recorded(tmp_path, net, lambda net: _Scaled.apply(net(torch.randn(32, 64))).mean())[-1]
    block = block_of(step, "aten.exp.default")
    graph = graph_of(step)
    node = next(v for v, n in enumerate(graph.nodes) if n.id == f"block{block.number}")
    ops = operator_of(graph)
    readers = [step.names[step.entries["a"][step.ops[ops[v]]]] for v, n in enumerate(graph.nodes) if v in ops and node in n.parents]
    assert readers[-4:] == ["aten.neg.default", "aten.abs.default", "aten.mul.Tensor", "aten.add.Tensor"]


def test_a_retained_graph_unpins_its_tensors_after_each_backward(tmp_path: Path) -> None:
    """Each need of a saved tensor ends before the step does."""
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))

    def twice(net: nn.Module) -> torch.Tensor:
        loss = net(torch.randn(32, 64)).square().mean()
        loss.backward(retain_graph=True)
        return loss

    step = recorded(tmp_path, net, twice)[-1]
    needs = block_of(step, "aten.tanh.default").needs
    assert len(needs) == 4, "by Tanh and by the product, in each of two backwards"
    assert all(a < b < len(step.entries) for a, b in needs)


def test_an_older_recording_is_refused_with_advice(tmp_path: Path) -> None:
    step = recorded(tmp_path, nn.Linear(64, 64), lambda net: net(torch.randn(32, 64)).mean())[-1]
    with pytest.raises(RecordingError, match="record again"):
        graph_of(RecordedStep(step.row, step.names, file_format=2))


class _Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 64), nn.Softplus())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.block, self.first(x), use_reentrant=False)
        return out


def test_what_a_module_makes_when_backward_calls_it_is_that_modules(tmp_path: Path) -> None:
    """A checkpoint runs its block again while another operator's node is the engine's current one."""
    step = recorded(tmp_path, _Checkpointed(), lambda net: net(torch.randn(256, 64)).square().mean())[-1]
    again = [b.module for b in step.blocks if b.phase == "backward" and b.op == "aten.addmm.default"]
    assert again == ["_Checkpointed.block.0"]
