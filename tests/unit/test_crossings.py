"""Law: a kind of unit for which no plan is found is refused once its steps mostly cross, however many others are within the budget."""

from __future__ import annotations

from lowtide.runtime.units.unit_signature import UnitSignature
from lowtide.runtime.units.plan_cache import CROSSED, BudgetCrossings

LARGE, SMALL = UnitSignature((1,)), UnitSignature((2,))


def _run(crossings: BudgetCrossings, pattern: str) -> None:
    """Steps: O, the large kind over the budget; o, the large kind within it; s, the small kind."""
    for step in pattern:
        if step in "Oo":
            crossings.without_plan(LARGE)
        crossings.step_ends(crossed=step == "O")


def test_every_second_step_over_the_budget_is_enough() -> None:
    crossings = BudgetCrossings()
    _run(crossings, "s" + "Os" * CROSSED)
    assert not crossings.mostly(LARGE, at_least=0)
    _run(crossings, "Os")
    assert crossings.mostly(LARGE, at_least=0)
    assert not crossings.mostly(SMALL, at_least=0)


def test_a_kind_that_mostly_holds_is_not_refused() -> None:
    crossings = BudgetCrossings()
    _run(crossings, "s" + "ossss" * 4 + "Ossss" * 3)
    assert not crossings.mostly(LARGE, at_least=0)


def test_the_first_step_of_all_does_not_count() -> None:
    crossings = BudgetCrossings()
    _run(crossings, "s")
    assert not crossings.mostly(LARGE, at_least=0)
    _run(crossings, "O")
    assert crossings.mostly(LARGE, at_least=0)
    assert not crossings.mostly(LARGE, at_least=CROSSED)
