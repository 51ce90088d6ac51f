"""Law: whatever a script does around its steps, it trains bit for bit as without Lowtide, within the budget."""

from __future__ import annotations

import pytest
import situations
from harness import FIRST_CALLS_BYTES, FULL, above_of, budgeted, plain_of

import lowtide

STEPS = 7
NOT_HELD_AT_ONCE = {("random_branch", False), ("compiled_part", False), ("compiled_part", True)}
"""(script, whether values may be moved) with memory that cannot be foreseen at its first sight: what a compiled region takes,
and another branch than recorded where nothing can be moved. That step may cross the budget."""


@pytest.mark.parametrize(("share", "offload"), [(0.55, False), (0.55, True), *([(0.8, True)] if FULL else [])])
@pytest.mark.parametrize("name", situations.SITUATIONS)
def test_bits_and_budget_hold(name: str, share: float, offload: bool) -> None:
    make = situations.SITUATIONS[name]
    reference = plain_of(make, STEPS)
    try:
        run = budgeted(make, above_of(reference, share), STEPS, offload=offload)
    except lowtide.BudgetError as refusal:
        assert max(refusal.bound_bytes, refusal.lowest_bytes) > refusal.budget_bytes
        return
    assert run.bits == reference.bits
    if (name, offload) not in NOT_HELD_AT_ONCE:
        assert run.peak_bytes <= run.budget_bytes + FIRST_CALLS_BYTES


@pytest.mark.parametrize("name", situations.SITUATIONS)
def test_bits_hold_with_room_to_spare(name: str) -> None:
    make = situations.SITUATIONS[name]
    reference = plain_of(make, STEPS)
    run = budgeted(make, 4 * reference.above_bytes, STEPS)
    assert run.bits == reference.bits
    assert not any(s.recomputed_ops or s.overrun for s in run.outcome.steps)
