"""A program (variables, prices, rows) and its answer, from HiGHS: relaxed, or with whole variables in a process of its own."""

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
"""So much a variable may be off a whole number and still be taken for it (HiGHS allows itself 1e-6)."""
_LARGE = 4000
"""Variables, of those that are not settled, beyond which whole ones are looked for in a process that can be ended: one of
12,000 took 26 seconds where it was given two."""
_INFEASIBLE = 2
"""By which scipy says so."""
EXACT = 1e-6
"""Share of a floor by which a program of real variables may have it too high."""
_LEAST_SECONDS = 0.05
"""Time limit of a program for which none is left."""
_SCALE = 1e4
"""Costs are shares of the graph's seconds; the solver's absolute tolerances (1e-6, 1e-7) must be small beside the least."""


class Program:
    """A mixed-integer program in the making: variables in [0, 1] by name, rows, least cost."""

    def __init__(self) -> None:
        """Nothing is asked yet."""
        self.index: dict[Any, int] = {}
        self.cost: list[float] = []
        self.whole: list[bool] = []
        self.rows: list[dict[int, float]] = []
        self.low: list[float] = []
        self.high: list[float] = []

    def variable(self, name: Any, cost: float = 0.0, *, whole: bool = True) -> int:
        """The variable of a name; it is made, at its cost, when first asked for; it is whole, unless others make it so."""
        found = self.index.get(name)
        if found is None:
            found = self.index[name] = len(self.cost)
            self.cost.append(cost)
            self.whole.append(whole)
        return found

    def row(self, terms: dict[int, float], low: float, high: float = np.inf) -> int:
        """A row: ``low <= sum <= high``."""
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
        """Solve it.

        Args:
            seconds: how long the solver may take; it does not always look at the clock.
            whole: whether variables are to be whole.
            gap: it may stop when it is within this relative gap of the best.
            settled: variables whose values are given; what comes of it bounds nothing then.
            real: variables that need not be whole.
            start: an answer to begin from, where the program is solved in a process of its own.
            tell: told of every better answer; where it is, a program is solved there.
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
    """What came of a program.

    Attributes:
        value: no answer costs less.
        cost: of the best answer found; infinity where there is none.
        ended: whether it was solved to its end, so that one costs so much.
        x: the best answer found; None where none was.
        impossible: whether there is none.
    """

    value: float
    cost: float
    ended: bool
    x: Any
    impossible: bool = False
