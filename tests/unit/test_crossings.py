"""Law: a kind of unit without a plan is refused once most of its steps cross the budget, however many other steps stay within
it.
"""

from __future__ import annotations

from lowtide.runtime.units.unit_signature import UnitSignature
from lowtide.runtime.units.plan_cache import CROSSED, BudgetCrossings

LARGE, SMALL = UnitSignature((1,)), UnitSignature((2,))


def _run(crossings: BudgetCrossings, pattern: str) -> None:
    """Runs steps: O, the large kind over the budget; o, the large kind within it; s, the small kind."""
    for step in pattern:
        if step in "Oo":
            crossings.without_plan(LARGE)
        crossings.step_ends(crossed=step == "O")


def test_a_kind_is_refused_though_other_steps_stay_within() -> None:
    """More than `CROSSED` crossings without a plan refuse a kind although every other step, of another kind, stays within the
    budget; that other kind is not refused.
    """
    crossings = BudgetCrossings()
    _run(crossings, "s" + "Os" * CROSSED)
    assert not crossings.mostly(LARGE, at_least=0)
    _run(crossings, "Os")
    assert crossings.mostly(LARGE, at_least=0)
    assert not crossings.mostly(SMALL, at_least=0)


def test_a_kind_that_mostly_stays_within_is_not_refused() -> None:
    """Three crossings in seven steps of a kind are less than half and do not refuse it."""
    crossings = BudgetCrossings()
    _run(crossings, "s" + "ossss" * 4 + "Ossss" * 3)
    assert not crossings.mostly(LARGE, at_least=0)


def test_the_first_step_does_not_count_as_within_the_budget() -> None:
    """One crossing in the second step is already the rule, since the first step is not counted as one that held; a higher
    `at_least` asks for more crossings.
    """
    crossings = BudgetCrossings()
    _run(crossings, "s")
    assert not crossings.mostly(LARGE, at_least=0)
    _run(crossings, "O")
    assert crossings.mostly(LARGE, at_least=0)
    assert not crossings.mostly(LARGE, at_least=CROSSED)
