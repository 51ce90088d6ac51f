"""What the user asked of a run under a budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lowtide.base.errors import BudgetError
from lowtide.base.units import Size
from lowtide.planning.unit.plan_file import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetSettings:
    """What the user asked for.

    Attributes:
        budget: bytes, a share, ``auto``, or None: no limit, only rescue from out-of-memory.
        keep: modules whose values are never dropped.
        plan: a plan loaded from a file.
        offload: whether values may be moved to the second board.
        allow: levers (:mod:`lowtide.base.lever_catalogue`) that may be used; exact ones are, where they are needed, without
            being named.
        without: levers that must not be used.
        refusal: makes what is raised when the budget cannot be held; the :class:`BudgetError` itself by default.
        steps: after which the script is ended; 0 for never.
        keep_going: whether the script goes on even where the first steps show that the budget cannot be held.
        on_step: called after each step, with its figures in place.
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
