"""What is known of an answer."""

from __future__ import annotations

from enum import StrEnum


class Status(StrEnum):
    """Whether there is a plan, and whether one could be better."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    UNKNOWN = "unknown"

    @property
    def has_plan(self) -> bool:
        """Whether a plan was found that fits."""
        return self in (Status.OPTIMAL, Status.FEASIBLE)
