"""Law: a recorded step's graph, played in the order in which it was run, is as high inside each operator as was measured; or lower,
where an operator that ran just before was as high."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lowtide.recording.explanation import Step, steps_of
from lowtide.planning.graph import Graph
from lowtide.planning.schedule import Act, plain_row, unfold
from lowtide.recording.graph import graph_of, operator_of
from lowtide.recording.reader import read
from torch import nn
from torch.nn import functional as F

import lowtide


def heights(graph: Graph) -> dict[int, int]:
    """By an operator's place in the step, the most bytes inside it where the graph's own order is played."""
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


def recorded(folder: Path, net: nn.Module, loss_of: Callable[[nn.Module], torch.Tensor], **how: object) -> list[Step]:
    """Steps of a training."""
    optimizer = torch.optim.AdamW(net.parameters(), **how)  # type: ignore[arg-type]
    with lowtide.record(folder / "run.lowtide"):
        for _ in range(3):
            loss = loss_of(net)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return [s for s in steps_of(read(folder / "run.lowtide")) if s.row.complete and s.row.step >= 0]


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
def test_each_operator_is_as_high_as_was_measured(tmp_path: Path, name: str, *, foreach: bool) -> None:
    make, loss_of = CASES[name]
    steps = recorded(tmp_path, make(), loss_of, foreach=foreach)
    assert len(steps) == 3
    for step in steps:
        found = heights(graph_of(step))
        assert len(found) == len(step.ops)
        highest = [int(peak) for peak in step.peaks]
        assert abs(max(found.values()) - max(highest)) <= 1e-3 * max(highest)
        for k, bytes_ in found.items():
            before = max(highest[max(0, k - 8) : k + 1])  # what a node holds to its end decides nothing where it rises no further
            assert abs(bytes_ - highest[k]) <= 512 or (bytes_ < highest[k] <= before * (1 + 1e-3))
