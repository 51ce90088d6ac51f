"""``solve(problem, budget)``: selects the solver for a unit and a budget.

| problem | solver | answer |
|---|---|---|
| the floor is above the budget | ``bound.peak_bound`` | ``infeasible``, with the event that proves it |
| the plain run fits | none | ``optimal``, no decisions |
| any other | ``greedy`` and ``lp_plan.Relaxed`` | ``feasible`` with the gap to the bound; ``optimal`` if it is zero |
| nothing found that fits | | ``unknown``: no plan found, none ruled out |
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from lowtide.planning.status import Status
from lowtide.planning.unit.bound import Bound, UnitTimeBound, peak_bound
from lowtide.planning.unit.greedy import backtracked, lightened, pareto, walk
from lowtide.planning.unit.minimum_account import MinimumAccount, account_of
from lowtide.planning.unit.problem import Away, Key, Problem
from lowtide.planning.unit.state import State

if TYPE_CHECKING:
    from lowtide.planning.unit.lp_plan import Relaxed

SECONDS = 4.0
"""Default time limit of the walk, in seconds."""
PROGRAM_SECONDS = 3.0
"""Time limit of the programs for one budget, in seconds."""
PROGRAM_UNITS = 3.0
"""The same limit as a multiple of the unit's seconds; the smaller one applies. Planning must pay off for short steps, too."""
LIGHTER_SECONDS = (0.25, 1.0)
"""Time limit, in seconds, for undoing unneeded decisions of the plans for one budget: that of the unit, within these."""
WORTHWHILE_SHARE = 0.005
"""A unit that begins waits for programs only if they may save at least this share of its seconds."""
_BUDGETS = 5
"""How many budgets are searched for the least memory within a time."""
_NEAR = 0.01
"""Budgets closer than this share of (plain peak - base) share a search."""
_KEPT = 24
"""How many of the walk's states are kept for later runs, of those that need different memory."""
_SAME = 1e-9
"""Share of the unit's seconds within which plan and bound count as equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """An answer with its certificate.

    Attributes:
        status: whether there is a plan, and whether a better one is possible.
        budget_bytes: the budget.
        state: the decisions and the outcome of playing them; None if there is no plan.
        bound: lower bound on the peak of any plan.
        bound_seconds: lower bound on the extra seconds of any plan within the budget.
        lowest_bytes: lowest peak that the search reached (the plain peak if nothing was searched).
        solve_seconds: seconds spent searching so far, for all budgets of the problem.
    """

    status: Status
    budget_bytes: int
    state: State | None
    bound: Bound
    bound_seconds: float
    lowest_bytes: int
    solve_seconds: float


@dataclass(frozen=True, slots=True)
class Kept:
    """What a later run needs of a front.

    Attributes:
        states: states of various peaks, the lowest among them.
        proven: per budget that was searched, a lower bound on the extra seconds of its plans.
    """

    states: tuple[State, ...]
    proven: Mapping[int, float]


class Front:
    """Solves one problem for several budgets: a walk that is done once, and programs for each budget.

    A state that was found for one budget serves every other budget that it fits, so rising budgets get falling seconds.
    """

    def __init__(self, problem: Problem, *, seconds: float = SECONDS, program_seconds: float = PROGRAM_SECONDS) -> None:
        """Compute the peak bound; nothing is searched yet. If ``program_seconds`` is 0, no programs are set up."""
        self.problem = problem
        self.seconds = seconds
        self.program_seconds = min(program_seconds, PROGRAM_UNITS * problem.seconds)
        self.solve_seconds = 0.0
        self.bound = peak_bound(problem)
        self._time_bound = UnitTimeBound(problem)
        self._plain = State.of(problem, {})
        self._found: list[State] = []
        self._proven: dict[int, float] = {}
        self._hasty: set[int] = set()
        self._in_vain = False
        self._others = 0

    def retimed(self, problem: Problem, in_force: State) -> Front:
        """A new front of the same unit with other operator seconds; its answers cost no more than the plan in force.

        Args:
            problem: the unit with the other seconds.
            in_force: the plan in force, as a state of that problem; it holds the current budget.
        """
        front = Front(problem, seconds=self.seconds, program_seconds=self.program_seconds)
        front.solve_seconds, front._others = self.solve_seconds, self._others
        start = time.perf_counter()
        front._found = [in_force]
        front.states = pareto([State.of(problem, s.decisions) for s in (*self.states, *self._found)])
        front.solve_seconds += time.perf_counter() - start
        return front

    def kept(self) -> Kept:
        """The states that are worth keeping for a later run: those found for budgets, and some of the walk's if there was one.

        Budgets that were only searched in haste do not count as searched.
        """
        walked = pareto(self.states) if "states" in vars(self) else ()
        some = walked[:: -(-len(walked) // _KEPT)] if walked else ()
        states = pareto([*some, *walked[-1:], *self._found])
        return Kept(states, {asked: self._proven[asked] for asked in self._asked(hasty=False)})

    @classmethod
    def restored(cls, problem: Problem, plans: Iterable[dict[Key, Away]], proven: Mapping[int, float]) -> Front:
        """A front from what :meth:`kept` gave in an earlier run: plans, and bounds of the budgets that were searched.

        Raises:
            StructureError: if the runtime cannot carry out one of the plans.
        """
        front = cls(problem)
        start = time.perf_counter()
        states = pareto([front._plain, *(State.of(problem, plan) for plan in plans)])
        if len(states) > 1:
            front.states = states
            front._proven = dict(proven)
        front.solve_seconds += time.perf_counter() - start
        return front

    @cached_property
    def minimum(self) -> MinimumAccount:
        """What the peak bound consists of."""
        return account_of(self.problem, self.bound.peak_event)

    @cached_property
    def states(self) -> tuple[State, ...]:
        """The Pareto front of the walk."""
        start = time.perf_counter()
        states = walk(self.problem, seconds=self.seconds)
        self.solve_seconds += time.perf_counter() - start
        return states

    @cached_property
    def _relaxed(self) -> Relaxed:
        from lowtide.planning.unit.lp_plan import Relaxed  # imports scipy's solvers, which only planning needs

        return Relaxed(self.problem)

    def _ask(self, budget_bytes: int, *, sparing: bool = False, hasty: bool = False) -> None:
        """Search for a budget, unless that was done for almost the same one.

        A unit's budget falls a little from step to step if the script keeps something of each. From the second such budget on,
        the search is for the lowest budget that counts as the same, and its plan serves for all budgets in between.
        """
        if self._is_asked(budget_bytes, hasty=hasty):
            return
        near = self._near
        if any(budget_bytes < asked <= budget_bytes + near for asked in self._asked(hasty=hasty)):
            self._search(max(budget_bytes - near, self.bound.peak_bytes), sparing=sparing, hasty=hasty)
            if self._fitting(budget_bytes):
                return
        self._search(budget_bytes, sparing=sparing, hasty=hasty)

    @property
    def _near(self) -> int:
        return int(_NEAR * max(0, self.problem.plain_peak - self.problem.base_bytes))

    def _asked(self, *, hasty: bool) -> set[int]:
        """The budgets that were searched; those of hasty searches only if ``hasty``."""
        return self._proven.keys() - (frozenset() if hasty else self._hasty)

    def _is_asked(self, budget_bytes: int, *, hasty: bool) -> bool:
        """Whether a budget or almost the same one was searched, or needs no search."""
        needless = self._plain.peak_bytes <= budget_bytes or self.bound.peak_bytes > budget_bytes
        return needless or any(budget_bytes - self._near <= asked <= budget_bytes for asked in self._asked(hasty=hasty))

    def _search(self, budget_bytes: int, *, sparing: bool, hasty: bool) -> None:
        self._proven.setdefault(budget_bytes, 0.0)
        hasty = hasty and bool(self._fitting(budget_bytes))
        (self._hasty.add if hasty else self._hasty.discard)(budget_bytes)
        if self.program_seconds > 0 and not hasty and not (sparing and self._is_good(budget_bytes)):
            start = time.perf_counter()
            states, proven = self._relaxed.at(budget_bytes, seconds=self.program_seconds)
            self._found = list(pareto([*self._found, *states]))
            self._proven[budget_bytes] = proven.seconds
            self.solve_seconds += time.perf_counter() - start
        front = (*self.states, *self._found)
        start = time.perf_counter()
        if min(s.peak_bytes for s in front) > budget_bytes and not self._in_vain:
            lower = backtracked(self.problem, self.states, budget_bytes, seconds=self.seconds)
            front = (*front, *lower)
            self._found = list(pareto([*self._found, *lower]))
            self._in_vain = all(s.peak_bytes > budget_bytes for s in lower)  # other budgets lead the same ways
        least, most = LIGHTER_SECONDS
        lighter = lightened(self.problem, front, budget_bytes, seconds=min(most, max(least, self.problem.seconds)))
        self._found = list(pareto([*self._found, *lighter]))
        self.solve_seconds += time.perf_counter() - start

    def _is_good(self, budget_bytes: int) -> bool:
        """Whether a state that was found fits, and no other can save much time."""
        least = min((s.extra_seconds for s in self._fitting(budget_bytes)), default=float("inf"))
        return least - self._time_bound.at(budget_bytes) < WORTHWHILE_SHARE * self.problem.seconds

    def _fitting(self, budget_bytes: int) -> list[State]:
        """The states found so far that a budget holds."""
        return [s for s in (*self.states, *self._found) if s.peak_bytes <= budget_bytes]

    def at(self, budget_bytes: int, *, search: bool = True, sparing: bool = False, hasty: bool = False) -> Solution:
        """The solution for a budget: the cheapest state found that fits.

        Args:
            budget_bytes: the highest peak allowed.
            search: whether to search for it; otherwise only states that were found already are considered.
            sparing: whether a search leaves out what can save little time.
            hasty: whether a search has no programs if the walk finds a plan that fits.
        """
        if self._plain.peak_bytes <= budget_bytes:
            return self._solution(Status.OPTIMAL, budget_bytes, self._plain, self._plain, 0.0)
        seconds = self._time_bound.at(budget_bytes)
        if self.bound.peak_bytes > budget_bytes:
            return self._solution(Status.INFEASIBLE, budget_bytes, None, self.states[-1], seconds)
        if search:
            self._ask(budget_bytes, sparing=sparing, hasty=hasty)
        seconds = max(seconds, *(s for asked, s in self._proven.items() if asked >= budget_bytes), 0.0)
        found = (*self.states, *self._found)
        lowest = min(found, key=lambda s: s.peak_bytes)
        state = min(self._fitting(budget_bytes), key=lambda s: s.cost, default=None)
        if state is None:
            return self._solution(Status.UNKNOWN, budget_bytes, None, lowest, seconds)
        met = state.extra_seconds <= seconds + _SAME * self.problem.seconds
        return self._solution(Status.OPTIMAL if met else Status.FEASIBLE, budget_bytes, state, lowest, seconds)

    def at_start(self, budget_bytes: int, *, hasty: bool = False) -> Solution:
        """The solution for a unit that begins and may rise to a budget, at little cost where that is another in every step.

        Of the budgets that need a search, only the first, the second, the fourth, the eighth and so on get one, and those that
        no plan fits that was found for others.

        Args:
            budget_bytes: the highest peak allowed.
            hasty: whether a search has no programs if the walk finds a plan that fits: they take longer than a plan that is
                followed once can save.
        """
        if not self._is_asked(budget_bytes, hasty=hasty):
            self._others += 1
            if self._others & (self._others - 1):
                known = self.at(budget_bytes, search=False)
                if known.state is not None:
                    return known
        return self.at(budget_bytes, sparing=True, hasty=hasty)

    def lowest_peak(self) -> int:
        """The lowest peak, in bytes, of the plans that a search for the peak bound finds."""
        return self.at(self.bound.peak_bytes).lowest_bytes

    def least_within(self, extra_seconds: float) -> int:
        """The lowest peak, in bytes, of the plans found that take at most so many seconds more than the plain run.

        Searches a few budgets between the peak bound and the plain peak.
        """
        def least() -> int:
            found = (self._plain, *self.states, *self._found)
            return min(s.peak_bytes for s in found if s.extra_seconds <= extra_seconds)

        low = self.bound.peak_bytes
        for _ in range(_BUDGETS):
            middle = (low + least()) // 2
            state = self.at(middle).state
            if state is None or state.extra_seconds > extra_seconds:
                low = middle
        return least()

    def _solution(self, status: Status, budget: int, state: State | None, lowest: State, seconds: float) -> Solution:
        return Solution(
            status=status,
            budget_bytes=budget,
            state=state,
            bound=self.bound,
            bound_seconds=seconds,
            lowest_bytes=lowest.peak_bytes,
            solve_seconds=self.solve_seconds,
        )


def solve(problem: Problem, budget_bytes: int, *, seconds: float = SECONDS) -> Solution:
    """Find a plan for a problem within a budget in bytes."""
    return Front(problem, seconds=seconds).at(budget_bytes)
