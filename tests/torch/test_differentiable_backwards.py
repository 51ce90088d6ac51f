"""Law: a backward that builds a graph of its own is planned like a forward: equal bits, within the budget, with the predicted
peak.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import situations
import torch
import zoo
from harness import above_of, budgeted, close, kept, plain_of

import lowtide
from lowtide.recording import reader, recorded_step

STEPS = 7
SHARE = 0.75


@pytest.mark.long("meta_learning")
@pytest.mark.parametrize("offload", [True, False])
@pytest.mark.parametrize("make", [situations.double_backward, situations.meta_learning])
def test_saved_tensors_of_a_backward_are_planned(make: situations.Callable[[], situations.Job], *, offload: bool) -> None:
    """Values that a differentiable backward saves are recomputed or offloaded within the budget, with the baseline's bits."""
    reference = plain_of(make, STEPS)
    run = budgeted(make, above_of(reference, SHARE), STEPS, offload=offload)
    assert run.bits == reference.bits
    assert kept(run)
    last = run.outcome.steps[-1]
    assert last.policy == "planned"
    assert last.recomputed_ops or (offload and last.offloaded_bytes)
    assert run.outcome.plan is not None
    assert close(run.outcome.plan.predicted_peak_bytes, last.peak_bytes)


@cache
def now_and_then(every: int) -> situations.Callable[[], zoo.Job]:
    """A penalty on the gradient in some steps only (lazy regularization): nothing shows it before the backward."""

    def make() -> zoo.Job:
        model = torch.nn.Sequential(*(part for _ in range(4) for part in (torch.nn.Linear(96, 96), torch.nn.Tanh(), torch.nn.GELU())))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(i: int) -> torch.Tensor:
            x = torch.randn(384, 96, requires_grad=True)
            optimizer.zero_grad()
            loss = model(x).square().mean()
            if i % every == every - 1:
                (slope,) = torch.autograd.grad(loss, x, create_graph=True)
                loss = loss + slope.square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return zoo.Job(step, [model], [optimizer])

    return make


@pytest.mark.parametrize("make", [situations.double_backward, situations.meta_learning])
def test_blocks_of_a_second_backward_belong_to_the_forwards_modules(make: situations.Callable[[], zoo.Job], tmp_path: Path) -> None:
    """At least 90 % of the bytes made in a backward are attributed to a module."""
    with lowtide.record(tmp_path / "a.lowtide"):
        zoo.run(make, 3)
    steps = recorded_step.laid_out(reader.read(tmp_path / "a.lowtide"))[1:]
    assert len(steps) == 3
    for step in steps:
        made = [b for b in step.blocks if b.phase == "backward" and b.born >= 0 and b.counted]
        assert len(made) > 10
        assert sum(b.bytes for b in made if b.module) >= 0.9 * sum(b.bytes for b in made)


@pytest.mark.parametrize("share", [0.85, 0.6])
@pytest.mark.parametrize("every", [4, 7])
def test_a_first_backward_that_builds_a_graph_may_cross_only_once(every: int, share: float) -> None:
    """Whether the steps before followed a plan or ran unobserved for long; the second such backward is within the budget."""
    steps = 3 * every
    reference = plain_of(now_and_then(every), steps)
    run = budgeted(now_and_then(every), above_of(reference, share), steps, offload=False)
    assert run.bits == reference.bits
    crossed = [s.index for s in run.outcome.steps if s.peak_bytes > run.budget_bytes]
    assert crossed in ([], [every - 1])
