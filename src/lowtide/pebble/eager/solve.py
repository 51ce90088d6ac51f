"""``solve(problem, budget)``: which solver answers what.

| problem | solver | answer |
|---|---|---|
| the floor is above the budget | ``bound.peak_bound`` | ``infeasible``, with the event that proves it |
| the plain run fits | none | ``optimal``, no decisions |
| fixed order | ``greedy.walk`` | ``feasible`` with the gap to ``bound.time_bound``; ``optimal`` where the gap is zero |
| fixed order, greed finds nothing that fits | | ``unknown``: no plan found, none ruled out |
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from lowtide.pebble.eager.bound import Bound, peak_bound, time_bound
from lowtide.pebble.eager.play import play
from lowtide.pebble.eager.problem import Problem
from lowtide.pebble.eager.walk import State, walk

SECONDS = 4.0
"""How long a search may take by default."""


class Status(StrEnum):
    """What is known of an answer."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """An answer, with its certificate.

    Attributes:
        status: what is known of it.
        budget_bytes: what was asked.
        state: decisions and how they play; None where there is no plan.
        bound: lower bound on the peak of any plan.
        bound_seconds: lower bound on the extra seconds of any plan within the budget.
        lowest_bytes: lowest peak that the search reached (the plain one where nothing was searched).
        solve_seconds: how long the search took.
    """

    status: Status
    budget_bytes: int
    state: State | None
    bound: Bound
    bound_seconds: float
    lowest_bytes: int
    solve_seconds: float


class Front:
    """The walk of one problem, done once, when first asked for, and asked for many budgets."""

    def __init__(self, problem: Problem, *, seconds: float = SECONDS) -> None:
        """Nothing is searched yet."""
        self.problem = problem
        self.seconds = seconds
        self.solve_seconds = 0.0
        self.bound = peak_bound(problem)
        self._plain = State({}, play(problem, {}))

    @cached_property
    def states(self) -> tuple[State, ...]:
        """The walk's Pareto front."""
        start = time.perf_counter()
        states = walk(self.problem, seconds=self.seconds)
        self.solve_seconds = time.perf_counter() - start
        return states

    def at(self, budget_bytes: int) -> Solution:
        """The cheapest state within a budget."""
        if self._plain.timeline.peak_bytes <= budget_bytes:
            return self._solution(Status.OPTIMAL, budget_bytes, self._plain, self._plain, 0.0)
        seconds = time_bound(self.problem, budget_bytes)
        if self.bound.peak_bytes > budget_bytes:
            return self._solution(Status.INFEASIBLE, budget_bytes, None, self.states[-1], seconds)
        fitting = [s for s in self.states if s.timeline.peak_bytes <= budget_bytes]
        state = min(fitting, key=lambda s: s.cost, default=None)
        if state is None:
            return self._solution(Status.UNKNOWN, budget_bytes, None, self.states[-1], seconds)
        status = Status.OPTIMAL if state.timeline.extra_seconds <= seconds else Status.FEASIBLE
        return self._solution(status, budget_bytes, state, self.states[-1], seconds)

    def _solution(self, status: Status, budget: int, state: State | None, lowest: State, seconds: float) -> Solution:
        return Solution(
            status=status,
            budget_bytes=budget,
            state=state,
            bound=self.bound,
            bound_seconds=seconds,
            lowest_bytes=lowest.timeline.peak_bytes,
            solve_seconds=self.solve_seconds,
        )


def solve(problem: Problem, budget_bytes: int, *, seconds: float = SECONDS) -> Solution:
    """A plan for a problem within a budget."""
    return Front(problem, seconds=seconds).at(budget_bytes)
