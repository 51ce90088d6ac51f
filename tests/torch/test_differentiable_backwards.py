"""Law: a backward that builds a graph of its own is planned like a forward: bit-equal, within the budget, as predicted."""

from __future__ import annotations

import pytest
import situations
from harness import above_of, budgeted, close, kept, plain_of

STEPS = 7
SHARE = 0.75


@pytest.mark.long("meta_learning")
@pytest.mark.parametrize("offload", [True, False])
@pytest.mark.parametrize("make", [situations.double_backward, situations.meta_learning])
def test_saved_tensors_of_a_backward_are_planned(make: situations.Callable[[], situations.Job], *, offload: bool) -> None:
    reference = plain_of(make, STEPS)
    run = budgeted(make, above_of(reference, SHARE), STEPS, offload=offload)
    assert run.bits == reference.bits
    assert kept(run)
    last = run.outcome.steps[-1]
    assert last.policy == "planned"
    assert last.recomputed_ops or (offload and last.offloaded_bytes)
    assert run.outcome.plan is not None
    assert close(run.outcome.plan.predicted_peak_bytes, last.peak_bytes)
