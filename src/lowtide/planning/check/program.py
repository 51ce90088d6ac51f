"""Sets up the linear programs behind claimed bounds again, from the graph alone, and solves them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import csr_array

from lowtide.planning.check.points import Points

TOLERANCE = 1e-6
"""Relative tolerance between the bounds of two runs of the solver."""
_LIMIT = 120.0
"""Time limit for solving a bound's program, in seconds."""
_IMPOSSIBLE = 2
"""The solver's status for an infeasible program."""
_WAITED = 1000.0
"""Upper limit for the waiting time in one stretch, as a multiple of the graph's seconds."""
_SCALE = 1e4
"""Costs are multiplied by this, so that the solver's absolute tolerances are negligible beside them."""


def _matrix(rows: list[dict[int, float]], width: int) -> Any:
    """Rows of a program as a sparse matrix of ``width`` columns; it has at least one row, which the solvers require."""
    entries = [(i, j, a) for i, terms in enumerate(rows) for j, a in terms.items()]
    at, of, data = zip(*entries, strict=True) if entries else ((), (), ())
    return csr_array((data, (at, of)), shape=(max(1, len(rows)), width))


class Program:
    """A bound's program, set up from the graph alone: named variables in [0, 1], their costs, rows ``sum >= least``.

    In the names of variables, instants are numbered from 0, and stretch ``t`` lies between the instants ``t - 1`` and ``t``.
    """

    def __init__(self, points: Points, budget: int, base: float) -> None:
        """An empty program.

        Args:
            points: the graph's program points.
            budget: in bytes.
            base: seconds of running every operator once; costs are shares of them.
        """
        self.points = points
        self.nodes = points.graph.nodes
        self.budget = budget
        self.base = base
        self.names: dict[Any, int] = {}
        self.cost: list[float] = []
        self.whole: list[bool] = []
        self.rows: list[dict[int, float]] = []
        self.low: list[float] = []
        self.tied: set[tuple[int, int, int]] = set()

    def var(self, name: Any, price: float = 0.0, *, whole: bool = True) -> int:
        """The variable of that name; it is created on first use."""
        if name not in self.names:
            self.names[name] = len(self.cost)
            self.cost.append(price)
            self.whole.append(whole)
        return self.names[name]

    def row(self, terms: dict[int, float], least: float) -> None:
        """Add a row: the sum of ``terms`` is at least ``least``."""
        self.rows.append(terms)
        self.low.append(least)

    def back(self, v: int, when: Any, alone: Any) -> dict[int, float]:
        """Variables that put a value back on the board: its operator runs again, or it is fetched."""
        ways: dict[int, float] = {}
        o = self.points.leader(v)
        if self.nodes[o].recompute:
            ways[self.run(o, alone)] = 1.0
        return ways | self.fetched(v, when)

    def run(self, o: int, when: Any) -> int:
        """The variable for an operator running again in a stretch."""
        return self.var(("run", o, when), self.nodes[o].seconds / self.base)

    def fetched(self, v: int, when: Any) -> dict[int, float]:
        """The variable for fetching a value in a stretch, with a row that requires its offload; empty if it cannot move."""
        offload = self.points.graph.offload
        if offload is None or not self.nodes[v].move or not self.nodes[v].bytes:
            return {}
        size = 0.0 if offload.overlap else self.nodes[v].bytes / self.base
        fetch = self.var(("fetch", v, when), size / offload.read_bytes_per_second)
        self.row({self.var(("write", v), size / offload.write_bytes_per_second): 1.0, fetch: -1.0}, 0.0)
        return {fetch: 1.0}

    def read_later(self, v: int, after: set[int]) -> bool:
        """Whether a value is read after a program point."""
        return self.nodes[v].keep or bool(self.points.readers[v] & after)

    def all_instants(self) -> None:
        """Add one row per operator: the values absent at its first run make up for all bytes above the budget."""
        points = self.points
        for op in points.ops:
            before, after = points.around(op)
            fixed = points.must_be_resident(op, before, after)
            wanted = points.wanted(op, before, after)
            need = points.least(op, wanted | fixed) - self.budget
            if need <= 0:
                continue
            terms = {}
            for v in wanted - fixed:
                earlier = sum(1 for u in points.readers[v] if points.place[u] < points.place[op])
                stretch = earlier if points.fixed else 0
                gone = self.var(("gone", v, stretch))
                single = len(points.made[points.leader(v)]) == 1
                self.row(self.back(v, stretch, stretch if single else 0) | {gone: -1.0}, 0.0)
                terms[gone] = self.nodes[v].bytes / need
            self.row(terms, 1.0)

    def several(self, at: list[int], *, channels: bool = True) -> None:
        """Add the rows for what must be on the board at several instants, and in the stretches between them."""
        points, nodes = self.points, self.nodes
        sides = [points.around(op) for op in at]
        made = [{v for v, n in enumerate(nodes) if not n.resident and points.leader(v) in before} for before, _ in sides]
        for t, op in enumerate(at):
            before, after = sides[t]
            here = made[t] - points.overwritten(op)
            room = (points.least(op, set()) - self.budget) / self.budget
            self.row({self.var(("on", t, v)): -nodes[v].bytes / self.budget for v in here}, room)
            fixed = points.must_be_resident(op, before, after)
            for v in here:
                terms = {self.var(("on", t, v)): 1.0}
                if v not in fixed and self.read_later(v, after):
                    for q in range(t + 1, len(at) + 1):
                        terms |= self.back(v, q, q)
                if v in fixed or self.read_later(v, after):
                    self.row(terms, 1.0)
        for t in range(1, len(at) + 1):
            self.between(t, at, sides, made[t - 1])
        if channels and points.graph.offload is not None and points.graph.offload.overlap:
            for t in range(len(at)):
                self.channels(t, at[t], *sides[t], len(at))

    def channels(self, t: int, op: int, before: set[int], after: set[int], count: int) -> None:
        """Add the rows for writes before an instant and reads after it: each channel moves one value at a time.

        ``("idle", s)`` is time in stretch ``s`` during which no operator runs that the program accounts for.
        """
        offload, nodes = self.points.graph.offload, self.nodes
        assert offload is not None
        moved = sorted({name[1] for name in self.names if name[0] == "fetch"})
        early: dict[int, float] = {}
        late: dict[int, float] = {}
        for s in range(count + 1):
            side = late if s > t else early
            side[self.var(("idle", s), _WAITED, whole=False)] = _WAITED
            side |= {j: self.cost[j] for name, j in self.names.items() if name[0] == "run" and name[2] == s}
        write_terms, read_terms = dict(early), dict(late)
        for v in moved:
            share = nodes[v].bytes / self.base
            later = [j for s in range(t + 1, count + 1) if (j := self.names.get(("fetch", v, s))) is not None]
            for j in later:
                read_terms[j] = -share / offload.read_bytes_per_second
            here = self.names.get(("on", t, v))
            if here is None or not later:
                continue
            copied = self.var(("copied", t, v), whole=False)
            write_terms[copied] = -share / offload.write_bytes_per_second
            anew = [self.names.get(("run", self.points.leader(v), s)) for s in range(t + 1, count + 1)]
            for j in later:
                self.row({copied: 1.0, j: -1.0, here: 1.0} | {k: 1.0 for k in anew if k is not None}, 0.0)
        rest = self.base - nodes[op].seconds
        self.row(write_terms, (math.fsum(nodes[o].seconds for o in after) - rest) / self.base)
        self.row(read_terms, (math.fsum(nodes[o].seconds for o in before) - rest) / self.base)

    def least_bytes(self, op: int, *, any_order: bool) -> float:
        """Fewest bytes on the board when an operator first runs, as a share of the budget; infinite if above all of it."""
        if any_order:
            self.any_order(op)
        else:
            self.several([op], channels=False)
        self.cost = [0.0] * len(self.cost)
        self.rows[0] |= {self.var("peak", 1.0): 1.0}
        self.low[0] = self.points.least(op, set()) / self.budget
        return self._solved(whole=False)

    def any_order(self, op: int) -> None:
        """Add the rows of one instant over all sets of operators that may have run by then.

        ``("ran", o)``: operator ``o`` has run before the instant. Operators that follow it in every schedule have no variable.
        """
        points, nodes = self.points, self.nodes
        before, after = points.around(op)
        later = after | {op}

        def ran(o: int, factor: float) -> dict[int, float]:
            return {} if o in later else {self.var(("ran", o)): factor}

        here = [v for v, n in enumerate(nodes) if not n.resident and points.leader(v) not in later]
        room = (points.least(op, set()) - self.budget) / self.budget
        taken_over = points.overwritten(op)
        self.row({self.var(("on", 0, v)): -nodes[v].bytes / self.budget for v in here if v not in taken_over}, room)
        for o in before:
            self.row(ran(o, 1.0), 1.0)
        for o in points.ops:
            if o in later:
                continue
            for p in points.needed[o]:
                if not nodes[p].resident:
                    self.row(ran(points.leader(p), 1.0) | ran(o, -1.0), 0.0)
            if nodes[o].recompute:
                self.row(ran(o, 1.0) | {self.run(o, "later"): -1.0}, 0.0)
        for v in here:
            there = {self.var(("on", 0, v)): 1.0}
            if v in points.needed[op] and v not in taken_over:
                self.row(dict(there), 1.0)
            there |= self.back(v, "later", "later") | ran(points.leader(v), -1.0)
            until = nodes[v].held_until
            if nodes[v].keep:
                self.row(dict(there), 0.0)
            if until is not None:
                self.row(there | ran(points.leader(until), 1.0), 0.0)
            for o in points.readers[v]:
                again = {self.run(o, "later"): -1.0} if o not in later and nodes[o].recompute else {}
                self.row(there | ran(o, 1.0) | again, 0.0)

    def between(self, t: int, at: list[int], sides: list[tuple[set[int], set[int]]], made: set[int]) -> None:
        """Add the rows of stretch ``t``: a value on the board at its end, or read in it, was there before or came back in it.

        ``made`` are the values computed before the stretch.
        """
        points, nodes = self.points, self.nodes
        before, after = sides[t - 1]
        final = t == len(at)

        def there(v: int) -> dict[int, float]:
            return {self.var(("on", t - 1, v)): 1.0} | self.back(v, t, t)

        overwritten = set() if final else points.overwritten(at[t])
        for v in made - overwritten if not final else ():
            self.row(there(v) | {self.var(("on", t, v)): -1.0}, 0.0)
        for o in before:
            if nodes[o].recompute:
                again = self.run(o, t)
                for p in points.needed[o]:
                    if not nodes[p].resident:
                        self.row(there(p) | {again: -1.0}, 0.0)
        for o in after if final else after & (sides[t][0] | {at[t]}):
            for p in points.needed[o] & made:
                self.row(there(p), 1.0)

    def windows(self, at: list[int], told: Sequence[tuple[int, int, int]]) -> None:
        """Add the rows of windows: a value on the board at an instant was there at an earlier one or came back in between.

        So did the values that it was recomputed from.

        Args:
            at: the instants.
            told: per row, the window's first and last instant (by index; their count for the end), and the value.
        """
        points = self.points
        sides = [points.around(op) for op in at]
        for start, end, v in told:
            here, later = self.names.get(("on", start, v)), self.names.get(("on", end, v))
            if here is None or not 0 <= start < end <= len(at):
                continue
            if end < len(at) and later is not None:
                self.row({here: 1.0} | self.between_far(start, end, v) | {later: -1.0}, 0.0)
            elif end == len(at) and points.leader(v) in sides[start][0] and self.read_later(v, sides[start][1]):
                self.row({here: 1.0} | self.between_far(start, end, v), 1.0)

    def between_far(self, start: int, end: int, v: int) -> dict[int, float]:
        """Variables that bring a value back within a window, with rows for everything that it is recomputed from."""
        stretches = range(start + 1, end + 1)
        asked = [v]
        while asked:
            o = self.points.leader(asked.pop())
            if not self.nodes[o].recompute or (o, start, end) in self.tied:
                continue
            self.tied.add((o, start, end))
            again = self.var(("again", o, start, end), whole=False)
            self.row({self.run(o, t): 1.0 for t in stretches} | {again: -1.0}, 0.0)
            for p in self.points.needed[o]:
                there = self.names.get(("on", start, p))
                if there is not None:
                    asked.append(p)
                    self.row({there: 1.0} | self.ways_far(start, end, p) | {again: -1.0}, 0.0)
        return self.ways_far(start, end, v)

    def ways_far(self, start: int, end: int, v: int) -> dict[int, float]:
        """Variables that bring a value back within a window; one variable stands for all runs of its operator in it."""
        o = self.points.leader(v)
        ways = {self.var(("again", o, start, end), whole=False): 1.0} if self.nodes[o].recompute else {}
        for t in range(start + 1, end + 1):
            ways |= self.fetched(v, t)
        return ways

    def solve(self, enough: float) -> float:
        """The program's lower bound: relaxed if that proves ``enough``, otherwise with whole variables."""
        if not self.rows or not self.cost:
            return 0.0
        relaxed = self._solved(whole=False)
        return relaxed if relaxed * (1 + TOLERANCE) >= enough else max(relaxed, self._solved(whole=True))

    def _solved(self, *, whole: bool) -> float:
        result = milp(
            _SCALE * np.asarray(self.cost),
            constraints=LinearConstraint(_matrix(self.rows, len(self.cost)), self.low, np.inf),
            bounds=Bounds(0, 1),
            integrality=np.asarray(self.whole) & whole,
            options={"time_limit": _LIMIT, "mip_rel_gap": 0.0},
        )
        if result.status == _IMPOSSIBLE:  # where waiting is limited, perhaps only because of that
            return 0.0 if any(name[0] == "idle" for name in self.names) else math.inf
        proven = getattr(result, "mip_dual_bound", None) if whole else result.fun if result.status == 0 else None
        return float(proven or 0.0) / _SCALE


def closed(points: Points, op: int, *, any_order: bool = False) -> int:
    """Fewest bytes on the board when an operator first runs, given what absent values need in order to come back.

    Args:
        points: the graph's program points.
        op: the operator.
        any_order: whether to look at all sets of operators that may have run by then, not only at those that must have.
    """
    before, after = points.around(op)
    most = max(1, points.least(op, points.wanted(op, before, after) | points.must_be_resident(op, before, after)))
    if any_order:
        most = max(1, sum(n.bytes for n in points.graph.nodes) + points.graph.nodes[op].workspace_bytes)
    base = math.fsum(n.seconds for n in points.graph.nodes if not n.resident) or 1.0
    return math.floor(min(1.0, Program(points, most, base).least_bytes(op, any_order=any_order)) * most)


def cut(points: Points, node: Any) -> int:
    """Fewest bytes on the board when a node first runs, over all sets of operators that may have run by then.

    For operators that run once each. None stands for the end.
    """
    if node is None:
        return points.floor(node)
    op, nodes = points.index[node], points.graph.nodes
    before, after = points.around(op)
    values = [v for v, n in enumerate(nodes) if not n.resident and points.leader(v) != op]
    ran = {o: i for i, o in enumerate(points.ops)}
    there = {v: len(ran) + i for i, v in enumerate(values)}
    rows = [{ran[o]: 1.0, ran[points.leader(p)]: -1.0} for o in points.ops for p in points.needed[o] if not nodes[p].resident]
    for v in values:
        until = nodes[v].held_until
        ends = points.readers[v] | (set() if until is None else {points.leader(until)})
        rows += [{ran[points.leader(v)]: 1.0, ran[r]: -1.0, there[v]: -1.0} for r in ends - {points.leader(v)}]
        rows += [{ran[points.leader(v)]: 1.0, there[v]: -1.0}] if nodes[v].keep else []
    cost = np.asarray([0.0] * len(ran) + [float(nodes[v].bytes) for v in values])
    limits = [(float(o in before), float(o not in after and o != op)) for o in points.ops] + [(0.0, 1.0)] * len(values)
    found = linprog(cost, A_ub=_matrix(rows, len(cost)), b_ub=np.zeros(max(1, len(rows))), bounds=limits)
    taken_over = sum(nodes[old].bytes for old in points.overwritten(op))
    return round(found.fun) + points.least(op, set()) - taken_over if found.status == 0 else 0
