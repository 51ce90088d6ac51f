"""Law: whatever script is drawn, under every budget it gives the plain run's bits; a budget is held, or it is refused within
three steps, or the run says that it was not held; and no floor is above what a run has held."""

from __future__ import annotations

import functools

import lowtide
from harness import FIRST_CALLS_BYTES, FULL, TOLERANCE_BYTES, above_of, budgeted, close, plain
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from drawn import Program, job_of, programs

STEPS = 6
PROGRAMS = 2000 if FULL else 20
REFUSED_WITHIN = 3


@settings(max_examples=PROGRAMS, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=not FULL)
@given(programs(), st.sampled_from([0.9, 0.75, 0.6, 0.4]), st.booleans())
def test_any_script_gives_the_same_bits_under_any_budget(program: Program, share: float, offload: bool) -> None:  # noqa: FBT001
    holds(program, share, offload=offload)


def holds(program: Program, share: float, *, offload: bool) -> None:
    """The laws, of one program under one budget."""
    make = functools.partial(job_of, program)
    reference = plain(make, STEPS)
    above = above_of(reference, share)
    try:
        run = budgeted(make, above, STEPS, offload=offload)
    except lowtide.BudgetError as refused:
        outside = refused.budget_bytes - above
        assert refused.bound_bytes - outside <= reference.above_bytes + TOLERANCE_BYTES
        assert max(refused.bound_bytes, refused.lowest_bytes) > refused.budget_bytes
        return
    outcome = run.outcome
    assert run.bits == reference.bits
    assert len(outcome.steps) >= 1
    if outcome.held:
        counted = outcome.steps[outcome.excused :]
        assert max(s.peak_bytes for s in counted) <= run.budget_bytes + FIRST_CALLS_BYTES, run.over
    else:
        assert outcome.over
    last, plan = outcome.steps[-1], outcome.plan
    if last.policy == "planned" and plan is not None and plan.predicted_peak_bytes is not None and outcome.held:
        assert last.peak_bytes <= plan.predicted_peak_bytes or close(last.peak_bytes, plan.predicted_peak_bytes)
