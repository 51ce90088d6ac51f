"""Laws: a budget of the minimum, or of a slowdown, is found from the first step, held from the second on, and changes no bit."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from harness import live_now, plain_of
from lowtide.runtime.budget import SLACK_BYTES
from lowtide.runtime.control.budget_source import MINIMUM_MARGIN
from torch import nn

import lowtide

STEPS = 8
JOBS = pytest.mark.parametrize("make", [zoo.mlp, zoo.gpt_eager, zoo.lstm, zoo.cnn], ids=lambda make: make.__name__)


@JOBS
def test_the_minimum_is_held_from_the_second_step_on(make: Callable[[], zoo.Job]) -> None:
    """Law: the budget is near the lowest peak that plans reach, and every step is within it."""
    reference = plain_of(make, STEPS)
    gc.collect()
    with lowtide.budget("minimum") as run:
        bits = zoo.run(make, STEPS)
    outcome = run.outcome
    assert bits == reference.bits
    assert [step.index for step in outcome.steps[1:] if step.peak_bytes > outcome.budget_bytes] == []
    assert outcome.held
    assert outcome.plan is not None
    account = outcome.plan.minimum
    assert account is not None
    assert account.bytes == outcome.plan.bound_peak_bytes
    assert outcome.plan.to_json()["bound"]["at"]["operator"] == account.operator != ""
    lowest = outcome.plan.lowest_peak_bytes
    assert lowest <= outcome.budget_bytes < outcome.steps[0].peak_bytes
    above = outcome.budget_bytes - 2 * SLACK_BYTES - (1 + MINIMUM_MARGIN) * lowest
    assert above <= (outcome.steps[0].peak_bytes - lowest) / 4


@JOBS
@pytest.mark.parametrize("share", [2, 50])
def test_a_slowdown_is_not_exceeded_by_prediction(make: Callable[[], zoo.Job], share: int) -> None:
    """Law: the plan in force is predicted to take at most that share more, and every step that counts is within the budget."""
    reference = plain_of(make, STEPS)
    gc.collect()
    with lowtide.budget(f"slowdown {share}%") as run:
        bits = zoo.run(make, STEPS)
    outcome = run.outcome
    assert bits == reference.bits
    assert outcome.held
    assert outcome.plan is not None
    assert outcome.plan.extra_seconds is not None
    assert outcome.plan.extra_seconds <= share / 100 * outcome.plan.baseline_step_seconds
    assert outcome.origin == f"the least that plans need for {share}% more time, as predicted"


@pytest.mark.parametrize("share", [0, 20])
def test_a_slowdown_within_a_size_takes_the_less_of_both(share: int) -> None:
    """Law: where the slowdown needs more than the size, the size is the budget, held from the first step on; else the slowdown's.
    """
    reference = plain_of(zoo.gpt_eager, STEPS)
    gc.collect()
    with lowtide.budget(f"slowdown {share}%") as alone:
        zoo.run(zoo.gpt_eager, STEPS)
    assert alone.outcome.plan is not None
    least, other = alone.outcome.budget_bytes, live_now() + reference.above_bytes
    size = (least + (alone.outcome.plan.lowest_peak_bytes if share == 0 else other)) // 2
    assert (size < least) is (share == 0)
    with lowtide.budget(f"slowdown {share}% within {size}") as run:
        bits = zoo.run(zoo.gpt_eager, STEPS)
    outcome = run.outcome
    assert bits == reference.bits
    assert all(step.peak_bytes <= size for step in outcome.steps)
    assert (outcome.budget_bytes == size) is (share == 0)
    assert outcome.plan is not None
    assert outcome.plan.extra_seconds is not None
    assert share == 0 or outcome.plan.extra_seconds <= share / 100 * outcome.plan.baseline_step_seconds


def test_a_slowdown_within_too_small_a_size_is_refused() -> None:
    """Law: the size is a budget like any other."""
    reference = plain_of(zoo.gpt_eager, STEPS)
    size = live_now() + reference.resident_bytes + SLACK_BYTES
    with pytest.raises(lowtide.BudgetError), lowtide.budget(f"slowdown 20% within {size}"):
        zoo.run(zoo.gpt_eager, STEPS)


def test_a_budget_that_falls_does_not_judge_the_steps_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: where operators were timed again and less memory suffices, steps that ran before are not over the budget."""
    from lowtide.planning.unit.solve import Front

    def generous_at_first(front: Front, _: float) -> int:
        return front.lowest_peak() if front in retimed else (front.lowest_peak() + front.problem.plain_peak) // 2

    def noted(front: Front, *args: Any) -> Front:
        retimed.append(again(front, *args))
        return retimed[-1]

    again, retimed = Front.retimed, []
    monkeypatch.setattr(Front, "retimed", noted)
    monkeypatch.setattr(Front, "least_within", generous_at_first)
    monkeypatch.setattr("lowtide.runtime.control.unit_review.MATTERS_SHARE", -1.0)  # every timing replaces the front
    monkeypatch.setattr("lowtide.runtime.units.recorded_unit.CLOCKED", frozenset({0}))
    reference = plain_of(zoo.gpt_eager, STEPS)
    gc.collect()
    with lowtide.budget("slowdown 10%") as run:
        bits = zoo.run(zoo.gpt_eager, STEPS)
    assert bits == reference.bits
    outcome = run.outcome
    assert retimed
    assert outcome.steps[1].budget_bytes > outcome.budget_bytes
    assert outcome.steps[1].peak_bytes > outcome.budget_bytes
    assert outcome.held


@pytest.mark.parametrize("rows", [(64, 2048, 512, 64, 2048, 512, 64), tuple(range(128, 1200, 128))], ids=["up and down", "growing"])
@pytest.mark.parametrize("size", ["minimum", "slowdown 5%"])
def test_a_sought_budget_follows_larger_steps_and_refuses_none(size: str, rows: tuple[int, ...]) -> None:
    """Law: there is no budget of the user's that could be too small; it is raised for steps that need more."""

    def train() -> tuple[list[float], list[torch.Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 8))
        optimizer = torch.optim.AdamW(model.parameters())
        losses = []
        for count in rows:
            loss = model(torch.randn(count, 64)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, [p.detach().clone() for p in model.parameters()]

    plain, weights = train()
    with lowtide.budget(size) as run:
        losses, found = train()
    assert losses == plain
    assert all(torch.equal(a, b) for a, b in zip(found, weights, strict=True))
    outcome = run.outcome
    over = [step.index for step in outcome.steps[1:] if step.peak_bytes > step.budget_bytes]
    assert [step.index for step in outcome.over] == over
    assert outcome.held == (not over)
    if size == "minimum":
        assert outcome.budget_bytes >= max(step.peak_bytes for step in outcome.steps[1:-1])
