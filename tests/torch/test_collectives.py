"""Tensors of collectives: a thread of the backend frees them whenever the system lets that thread run."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import heap, live_now
from torch import nn

import lowtide

BLOCKS = 6
WIDTH = 128
BATCH = 512
STEPS = 8
RECORDED = 3
THREADS = 2


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class _Sent(torch.autograd.Function):
    """Sends a copy of its gradient; in later steps the copy is freed late, as if by a slow thread."""

    late: bool
    held: deque[torch.Tensor]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if len(_Sent.held) == THREADS:
            _Sent.held.popleft()
        sent = gradient.clone()
        dist.all_reduce(sent)
        if _Sent.late:
            _Sent.held.append(sent)
        return gradient * 2


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sent.apply(x + self.inner(x))


def _train(*, late: bool) -> tuple[list[torch.Tensor], list[int]]:
    """Losses and weights, and each step's peak above the bytes live before it."""
    torch.manual_seed(0)
    _Sent.held = deque()
    counter = heap()
    model = nn.Sequential(*[_Block() for _ in range(BLOCKS)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    bits, peaks = [], []
    for step in range(STEPS):
        _Sent.late = late and step >= RECORDED
        before = counter.tensor_peak = counter.tensor_live
        loss = model(torch.randn(BATCH, WIDTH)).square().mean()
        loss.backward()
        _Sent.held.clear()
        optimizer.step()
        optimizer.zero_grad()
        bits.append(loss.detach().clone())
        peaks.append(counter.tensor_peak - before)
    return [*bits, *(p.detach().clone() for p in model.parameters())], peaks


@pytest.mark.parametrize("share", [0.8, 0.7, 0.6])
def test_a_plan_has_room_for_tensors_that_a_backend_frees_late(share: float) -> None:
    """Law: a plan holds its budget, with the same bits, although each collective's tensors live until two more collectives
    have started.
    """
    plain, peaks = _train(late=False)
    budget = live_now() + int(share * max(peaks))
    with lowtide.budget(budget) as run:
        bits, _ = _train(late=True)
    assert all(map(torch.equal, plain, bits))
    late = [s for s in run.outcome.steps[RECORDED:] if s.policy == "planned"]
    assert len(late) >= STEPS - RECORDED - 1
    assert [s.peak_bytes - budget for s in late if s.peak_bytes > budget] == []


def test_a_plan_is_followed_where_the_backend_frees_tensors_at_once() -> None:
    """Law: where no thread is late, all steps after the recorded ones follow a plan."""
    _, peaks = _train(late=False)
    with lowtide.budget(live_now() + int(0.6 * max(peaks))) as run:
        _train(late=False)
    assert {s.policy for s in run.outcome.steps[RECORDED:]} == {"planned"}
