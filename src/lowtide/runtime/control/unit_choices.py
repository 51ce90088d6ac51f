"""The ways in which a unit that begins can be run: what :mod:`.plan_choice` returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from lowtide.planning.unit.solve import Solution
from lowtide.runtime.run_figures import PlanFigures
from lowtide.runtime.units.recorded_unit import RecordedUnit
from lowtide.runtime.units.resizing import Resizing
from lowtide.runtime.units.unit_mode import OnlineReason


@final
@dataclass(frozen=True, slots=True)
class Hold:
    """Hold the budget online.

    Attributes:
        reason: why the unit is not recorded; None if it is recorded.
        planned: whether to drop at once what a plan for another base drops.
    """

    reason: OnlineReason | None
    planned: bool = False

    @property
    def is_planned(self) -> bool:
        """Whether the plan's figures apply to this unit: it is on the way to a plan, not held online permanently."""
        return self.planned and self.reason is not OnlineReason.WORN


@final
@dataclass(frozen=True, slots=True)
class Follow:
    """Follow a plan.

    Attributes:
        entry: the recorded unit.
        solution: the plan.
        resizing: the relation to the recorded unit, if that one had other sizes.
    """

    entry: RecordedUnit
    solution: Solution
    resizing: Resizing | None = None


@final
@dataclass(frozen=True, slots=True)
class Ignore:
    """Intercept nothing: the unit is predicted to stay within the budget."""


@final
@dataclass(frozen=True, slots=True)
class MoveGradients:
    """Engage the lever that offloads gradients, and record the unit as it runs with it."""


@final
@dataclass(frozen=True, slots=True)
class MoveStates:
    """Engage the levers that offload optimizer states and gradients, and choose again with the memory that is left."""


@final
@dataclass(frozen=True, slots=True)
class Refuse:
    """End the script: the budget cannot be held (``proven``), or no plan was found and steps keep crossing the budget."""

    figures: PlanFigures
    proven: bool


@final
@dataclass(frozen=True, slots=True)
class AsWritten:
    """Leave the script's own checkpoints as they are written: they hold the budget better, or at less cost."""


Choice = Hold | Follow | Ignore | MoveGradients | MoveStates | AsWritten | Refuse
