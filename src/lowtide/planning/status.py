"""The status of a planner's answer."""

from __future__ import annotations

from enum import StrEnum


class Status(StrEnum):
    """Whether there is a plan, and whether a better one is possible."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    UNKNOWN = "unknown"

    @property
    def has_plan(self) -> bool:
        """Whether a plan was found that fits the budget."""
        return self in (Status.OPTIMAL, Status.FEASIBLE)
