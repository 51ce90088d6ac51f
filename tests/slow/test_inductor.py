"""Law: a part of the model under ``torch.compile`` with Inductor trains bit for bit as without Lowtide; planned steps are within
the budget."""

from __future__ import annotations

import shutil

import pytest
import situations
import torch
import zoo
from harness import above_of, budgeted, plain_of
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")


def compiled_by_inductor() -> zoo.Job:
    """The first half of the model is one compiled region."""
    torch._dynamo.reset()
    part = torch.compile(situations._net(depth=2)[:2])

    def loss_of(model: nn.Module, _: int) -> torch.Tensor:
        x, y = situations._batch()
        return F.cross_entropy(model(x), y)

    return zoo.simple(nn.Sequential(part, situations._net()), loss_of)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("share", [0.9, 0.7])
def test_bits_hold_and_planned_steps_are_within_the_budget(share: float, offload: bool) -> None:
    reference = plain_of(compiled_by_inductor, 6)
    run = budgeted(compiled_by_inductor, above_of(reference, share), 6, offload=offload)
    assert run.bits == reference.bits
    planned = [s for s in run.outcome.steps[2:] if s.policy == "planned"]
    assert planned
    assert all(s.peak_bytes <= run.budget_bytes for s in planned)
