"""The user's settings for a run under a budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lowtide.base.errors import BudgetError
from lowtide.base.units import Size
from lowtide.planning.unit.plan_file import Plan
from lowtide.runtime.units.earlier_runs import EarlierRuns


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetSettings:
    """The user's settings.

    Attributes:
        budget: bytes, a share, ``auto``, ``rescue``, or None for no limit at all.
        keep: modules whose values are never dropped.
        plan: a plan loaded from a file.
        offload: whether values may be offloaded.
        allow: levers (:mod:`lowtide.base.lever_catalogue`) that may be used. Automatic levers are used where they are needed,
            without being named.
        without: levers that must not be used.
        refusal: makes the exception that is raised when the budget cannot be held; by default, the :class:`BudgetError`
            itself.
        steps: number of steps after which the script is ended; 0 for never.
        keep_going: whether the script goes on even if the first steps show that the budget cannot be held.
        on_step: called after each step, once the step's figures are available.
        earlier: what earlier runs of the script recorded; None if it is not to be used.
    """

    budget: Size | None
    keep: tuple[str, ...] = ()
    plan: Plan | None = None
    offload: bool = True
    allow: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()
    refusal: Callable[[BudgetError], BaseException] | None = None
    steps: int = 0
    keep_going: bool = False
    on_step: Callable[[], None] | None = None
    earlier: EarlierRuns | None = None
