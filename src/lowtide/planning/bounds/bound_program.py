"""A mixed-integer program (variables, costs, rows) and its solution by HiGHS, relaxed or with whole variables.

Large programs with whole variables are solved in a separate process (``solver_process``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

from lowtide.planning.bounds.solver_process import SolverAnswer, is_kept, solved_apart

WHOLE = 1e-4
"""A variable within this distance of a whole number counts as whole (HiGHS's own tolerance is 1e-6)."""
_LARGE = 4000
"""A program with more unsettled variables than this is solved for whole ones in a process that can be killed: HiGHS took 26
seconds for one of 12,000 variables that was given two."""
_INFEASIBLE = 2
"""scipy's status code for an infeasible program."""
EXACT = 1e-6
"""Share of a floor by which a program of continuous variables may overestimate it."""
_LEAST_SECONDS = 0.05
"""Shortest time limit of a program, in seconds, used even if no time is left."""
_SCALE = 1e4
"""Factor on costs, which are shares of the graph's seconds: HiGHS's absolute tolerances (1e-6, 1e-7) must be small beside
the smallest of them."""


class Program:
    """Builds a mixed-integer program: named variables in [0, 1], rows, and a cost to minimize."""

    def __init__(self) -> None:
        """An empty program."""
        self.index: dict[Any, int] = {}
        self.cost: list[float] = []
        self.whole: list[bool] = []
        self.rows: list[dict[int, float]] = []
        self.low: list[float] = []
        self.high: list[float] = []

    def variable(self, name: Any, cost: float = 0.0, *, whole: bool = True) -> int:
        """The index of the variable of that name; the first call creates it with its cost.

        Pass ``whole=False`` for a variable that may be continuous, for example because others force it to be whole.
        """
        found = self.index.get(name)
        if found is None:
            found = self.index[name] = len(self.cost)
            self.cost.append(cost)
            self.whole.append(whole)
        return found

    def row(self, terms: dict[int, float], low: float, high: float = np.inf) -> int:
        """Add the row ``low <= sum <= high`` and return its index."""
        self.rows.append(terms)
        self.low.append(low)
        self.high.append(high)
        return len(self.rows) - 1

    def _arrays(self, settled: Mapping[int, float]) -> dict[str, Any]:
        lengths = [len(r) for r in self.rows]
        size = sum(lengths)
        lower, upper = np.zeros(len(self.cost)), np.ones(len(self.cost))
        for j, value in settled.items():
            lower[j] = upper[j] = value
        return {
            "cost": _SCALE * np.asarray(self.cost),
            "lower": lower,
            "upper": upper,
            "whole": np.asarray(self.whole, dtype=bool),
            "low": np.asarray(self.low),
            "high": np.asarray(self.high),
            "starts": np.cumsum([0, *lengths]),
            "columns": np.fromiter(itertools.chain.from_iterable(self.rows), dtype=np.int64, count=size),
            "values": np.fromiter(itertools.chain.from_iterable(map(dict.values, self.rows)), dtype=float, count=size),
        }

    def solve(
        self,
        seconds: float,
        *,
        whole: bool = True,
        gap: float = 0.0,
        settled: Mapping[int, float] = MappingProxyType({}),
        real: Iterable[int] = (),
        start: Any = None,
        tell: Callable[[Solved], None] | None = None,
    ) -> Solved:
        """Solve the program for the lowest cost.

        Args:
            seconds: time limit of the solver, which does not always look at the clock.
            whole: whether variables must be whole; False solves the relaxation.
            gap: the solver may stop within this relative gap of the optimum.
            settled: variables with fixed values; the result is then no bound for the program.
            real: variables that need not be whole.
            start: an answer to start from; used only if the program is solved in a separate process.
            tell: called with every better answer. If it is given and ``whole``, the program is solved in a separate process.
        """
        if not self.cost:
            return Solved(value=0.0, cost=0.0, ended=True, x=np.zeros(0))
        asked = self._arrays(settled)
        asked["whole"][list(real)] = False
        if whole and (tell is not None or (is_kept() and len(self.cost) - len(settled) > _LARGE)):
            hear = None if tell is None else lambda told: tell(_solved_as(told))
            told = solved_apart(asked, seconds=seconds, gap=gap, start=start, tell=hear) if seconds > 0 else SolverAnswer()
        else:
            told = _solved_here(asked, seconds, whole=whole, gap=gap)
        return _solved_as(told)


def _solved_as(told: SolverAnswer) -> Solved:
    least = min(told.bound, told.cost)
    value = max(0.0, least) / _SCALE if np.isfinite(least) else 0.0
    return Solved(value=value, cost=told.cost / _SCALE, ended=told.ended, x=told.x, impossible=told.impossible)


def _solved_here(asked: Mapping[str, Any], seconds: float, *, whole: bool, gap: float) -> SolverAnswer:
    shape = (len(asked["low"]), len(asked["cost"]))
    result = milp(
        asked["cost"],
        constraints=LinearConstraint(
            csr_matrix((asked["values"], asked["columns"], asked["starts"]), shape=shape), asked["low"], asked["high"]
        ),
        bounds=Bounds(asked["lower"], asked["upper"]),
        integrality=asked["whole"] & whole,
        options={"time_limit": max(_LEAST_SECONDS, seconds), "mip_rel_gap": gap},
    )
    ended = result.status == 0
    least = result.mip_dual_bound if whole else result.fun if ended else None
    return SolverAnswer(
        bound=-np.inf if least is None else least,
        cost=np.inf if result.x is None else result.fun,
        x=result.x,
        ended=ended and not gap,
        impossible=result.status == _INFEASIBLE,
    )


@dataclass(frozen=True, slots=True)
class Solved:
    """The result of solving a program.

    Attributes:
        value: lower bound on the cost of every answer.
        cost: cost of the best answer found; infinity if none was found.
        ended: whether the program was solved to optimality, so that an answer of cost ``value`` exists.
        x: the best answer found; None if none was found.
        impossible: whether the program was proven to have no answer.
    """

    value: float
    cost: float
    ended: bool
    x: Any
    impossible: bool = False
