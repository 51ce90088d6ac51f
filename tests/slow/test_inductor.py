"""Law: a model that is partly compiled by Inductor trains with the same bits as without Lowtide; planned steps are in budget.
"""

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
def test_a_model_with_an_inductor_region_keeps_bits_and_budget(share: float, offload: bool) -> None:
    reference = plain_of(compiled_by_inductor, 6)
    run = budgeted(compiled_by_inductor, above_of(reference, share), 6, offload=offload)
    assert run.bits == reference.bits
    planned = [s for s in run.outcome.steps[2:] if s.policy == "planned"]
    assert planned
    assert all(s.peak_bytes <= run.budget_bytes for s in planned)
