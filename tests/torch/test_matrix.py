"""Laws: under every budget, every model trains bit for bit as without; the heap counter's peak stays within the budget in
every step, the first included; the plan's predicted peak is the measured one; a refusal, or a budget that is said not to be
held, is backed by its bound."""

from __future__ import annotations

import pytest
import zoo
from harness import FULL, above_of, budgeted, close, kept, plain_of

import lowtide

CELLS = [(0.5, True), (0.35, False)]
REST = [(0.9, False), (0.7, False), (0.5, False), (0.35, True)]


TOO_LOW = "the lowest plan found for its sizes needs"


def _check(name: str, above: int, capfd: pytest.CaptureFixture[str], *, offload: bool) -> None:
    reference = plain_of(zoo.MODELS[name])
    without = ("move-gradients",)  # these jobs read every gradient in every step, so that they would all be back
    run = budgeted(zoo.MODELS[name], above, offload=offload, without=without)
    assert run.bits == reference.bits
    if not run.outcome.held and TOO_LOW in capfd.readouterr().err:
        return  # found too low after the third step, when a run is not ended for it: said, as a refusal is
    assert kept(run), run.over
    planned = [s for s in run.outcome.steps if s.policy == "planned"]
    plan = run.outcome.plan
    if planned and plan is not None and plan.predicted_peak_bytes is not None and planned[-1] is run.outcome.steps[-1]:
        assert close(planned[-1].peak_bytes, plan.predicted_peak_bytes)


LIKE_OTHERS = ("hf_llama", "hf_mamba")
"""At their floor these take long and did what the others did: `make test-slow` runs them there."""


@pytest.mark.long("hf_t5-0.35", "gru_seq2seq-0.35", "gru_seq2seq-0.5-True", "hf_mamba-0.35")
@pytest.mark.parametrize(("share", "offload"), [*CELLS, *(REST if FULL else ())])
@pytest.mark.parametrize("name", zoo.MODELS)
def test_bits_budget_and_prediction_hold_at_share(name: str, share: float, offload: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """By recomputation alone, and with moving: a fast second board would leave little to recompute."""
    above = above_of(plain_of(zoo.MODELS[name]), share)
    try:
        _check(name, above, capfd, offload=offload)
    except lowtide.BudgetError as refusal:
        assert max(refusal.bound_bytes, refusal.lowest_bytes) > refusal.budget_bytes


@pytest.mark.long("hf_", "gru_seq2seq-False", "gpt_eager-False", "gpt_sdpa-False")
@pytest.mark.parametrize("offload", [False, True] if FULL else [False])
@pytest.mark.parametrize("name", [n for n in zoo.MODELS if FULL or n not in LIKE_OTHERS])
def test_bits_and_budget_hold_at_smallest_feasible_budget(name: str, offload: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """Five per cent above the lowest peak that the planner found on a recording of this very run."""
    reference = plain_of(zoo.MODELS[name])
    without = ("move-gradients",)
    probe = budgeted(zoo.MODELS[name], above_of(reference, 0.92), offload=offload, without=without).outcome.plan
    assert probe is not None
    lowest = probe.lowest_peak_bytes - probe.baseline_peak_bytes + reference.above_bytes
    try:
        _check(name, lowest + (reference.above_bytes - reference.resident_bytes) // 20, capfd, offload=offload)
    except lowtide.BudgetError as refusal:  # the floor of this run was a little higher than the probe's
        assert max(refusal.bound_bytes, refusal.lowest_bytes) > refusal.budget_bytes
