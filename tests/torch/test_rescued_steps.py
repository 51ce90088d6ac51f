"""Laws: without a budget, steps that are predicted to fit are not intercepted, and those that do not fit keep their bits."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import zoo
from lowtide.runtime.control import budget_source
from lowtide.runtime.device import available_memory
from torch import nn

import lowtide
from harness import above_of, heap, plain_of


STEPS = 5


def _limited(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """The machine has memory for so many bytes of tensors."""
    monkeypatch.setattr(budget_source, "available_bytes", lambda _: max(1, most - heap().tensor_live))


@pytest.mark.parametrize("make", [zoo.mlp, zoo.gpt_eager, zoo.lstm, zoo.cnn], ids=lambda make: make.__name__)
def test_steps_that_do_not_fit_keep_their_bits(make: Callable[[], zoo.Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: with too little memory for any step, all are rescued, and end with the baseline's bits."""
    reference = plain_of(make)
    gc.collect()
    _limited(monkeypatch, above_of(reference, 0.8))
    with lowtide.budget("rescue") as run:
        bits = zoo.run(make, STEPS)
    assert bits == plain_of(make, STEPS).bits
    assert all(step.policy == "online" for step in run.outcome.steps)
    assert any(step.offloaded_bytes or step.recomputed_ops for step in run.outcome.steps)


def test_only_steps_that_may_not_fit_are_intercepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: two steps of a shape are watched; then only those whose memory is not known, or is known to be too much."""
    gc.collect()
    _limited(monkeypatch, heap().tensor_live + (48 << 20))
    rows = [256, 256, 256, 128, 128, 128, 4096, 256, 4096, 256]

    def train() -> tuple[list[float], list[torch.Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Dropout(0.1), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for count in rows:
            loss = model(torch.randn(count, 64)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, [p.detach().clone() for p in model.parameters()]

    plain, weights = train()
    with lowtide.budget("rescue") as run:
        losses, found = train()
    assert losses == plain
    assert all(torch.equal(a, b) for a, b in zip(found, weights, strict=True))
    watched = [step.index for step in run.outcome.steps if step.policy == "online"]
    assert watched == [0, 1, 3, 6, 8]
    assert run.outcome.held
    assert not run.outcome.budget_bytes


def test_steps_whose_backward_builds_a_graph_are_left_alone_too() -> None:
    """Law: what such a step took is known as soon as one was watched, as for any other."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lowtide.budget("rescue") as run:
        for step in range(9):
            batch = torch.randn(32, 16, requires_grad=True)
            loss = model(batch).square().mean()
            if step % 3 == 2:
                (slope,) = torch.autograd.grad(loss, batch, create_graph=True)
                loss = loss + slope.square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert [step.policy for step in run.outcome.steps[3:]] == ["plain"] * 6


@pytest.mark.parametrize("version", [1, 2])
def test_a_groups_idle_page_cache_counts_as_available(tmp_path: Path, version: int) -> None:
    """Law: a container that has read a large data set still has the memory for training."""
    limit, usage, idle = ("memory.max", "memory.current", "inactive_file") if version == 2 else (
        "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    )  # fmt: skip
    (tmp_path / limit).write_text(f"{1 << 30}\n")
    (tmp_path / usage).write_text(f"{900 << 20}\n")
    assert list(available_memory._limit_of(tmp_path)) == [(1 << 30, 900 << 20)]
    (tmp_path / "memory.stat").write_text(f"inactive_file 0\n{idle} {700 << 20}\nactive_file 4096\n")
    assert list(available_memory._limit_of(tmp_path)) == [(1 << 30, 200 << 20)]


def test_calls_after_the_first_are_known_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: a step that begins like a smaller one and goes on with a larger call is watched once, then left alone."""
    gc.collect()
    _limited(monkeypatch, heap().tensor_live + (1 << 30))
    encoder, decoder = nn.Linear(16, 64), nn.Linear(64, 64)
    optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.1)
    with lowtide.budget("rescue") as run:
        for step in range(10):
            hidden = encoder(torch.randn(32, 16))
            loss = decoder(hidden.repeat(64 if step >= 4 else 1, 1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    watched = [step.index for step in run.outcome.steps if step.policy == "online"]
    assert watched[:2] == [0, 1]
    assert max(watched) <= 5


@pytest.mark.parametrize("fails_in", ["forward", "backward"])
def test_a_step_that_fails_although_it_seemed_to_fit_is_watched_next(fails_in: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: where the script catches the error and goes on, the next step of that shape is rescued."""
    gc.collect()
    _limited(monkeypatch, heap().tensor_live + (1 << 30))
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lowtide.budget("rescue") as run:
        for step in range(9):
            loss = model(torch.randn(32, 16)).square().mean()
            optimizer.zero_grad()
            if step != 5:
                loss.backward()
            elif fails_in == "backward":
                with pytest.raises(MemoryError):
                    _failing(loss).backward()
            optimizer.step()
    policies = [step.policy for step in run.outcome.steps]
    assert policies[:5] == ["online"] * 2 + ["plain"] * 3
    assert policies[5 if fails_in == "forward" else 6] == "online"
    assert policies[-1] == "plain"


def _failing(loss: torch.Tensor) -> torch.Tensor:
    """A loss whose backward runs out of memory."""
    failing = loss * 1

    def fail(_: torch.Tensor) -> None:
        raise MemoryError

    failing.register_hook(fail)
    return failing
