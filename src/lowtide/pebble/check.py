"""Verifies a solution again, by a second account of the rules and of the bounds; only the graph is shared with the first.

Written for reading, not for speed: the board is a set, its bytes are summed anew at every move.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import dok_array

from lowtide.pebble.graph import Graph

_SECONDS = 1e-9
"""Relative difference in seconds that sums may show."""
_PROGRAM = 1e-6
"""Relative difference in a bound that two runs of the program's solver may show."""
_LIMIT = 120.0
"""Seconds for solving the bound's program again."""
_RUNS = ("compute", "update")


def check(graph: Graph, solution: object) -> list[str]:
    """What is wrong with a solution file's content; empty where it holds."""
    if not isinstance(solution, Mapping) or "status" not in solution or "bound" not in solution:
        return ["it is no solution written by `lowtide plan --json`"]
    try:
        return _Checker(graph, solution).run()
    except (KeyError, TypeError, ValueError, IndexError) as error:
        return [f"it is damaged: {type(error).__name__}: {error}"]


class _Checker:
    def __init__(self, graph: Graph, solution: Mapping[str, Any]) -> None:
        unit = int(solution.get("rounding_bytes", 1))
        self.graph = graph.rounded(unit) if unit > 1 else graph
        self.solution = solution
        self.index = {n.id: v for v, n in enumerate(self.graph.nodes)}
        self.fixed = solution.get("order", "fixed") == "fixed"
        self.wrong: list[str] = []
        nodes = self.graph.nodes
        self.ops = [v for v in self.graph.order if nodes[v].made_with is None and not nodes[v].resident]
        self.place = {v: t for t, v in enumerate(self.ops)}
        self.needed = [self._needed(v) for v in range(len(nodes))]
        self.readers: list[set[int]] = [set() for _ in nodes]
        for v in self.ops:
            for p in self.needed[v]:
                self.readers[p].add(v)
        self.made = [
            [v, *(u for u, n in enumerate(nodes) if n.made_with == v)] if v in self.place else [] for v in range(len(nodes))
        ]

    def claim(self, holds: bool, text: str) -> None:
        if not holds:
            self.wrong.append(text)

    def run(self) -> list[str]:
        s = self.solution
        status, budget = s["status"], s.get("budget_bytes")
        base = math.fsum(n.seconds for n in self.graph.nodes if not n.resident)
        self.claim(
            math.isclose(s["base_seconds"], base, rel_tol=_SECONDS),
            f"base_seconds is {s['base_seconds']}, every node once takes {base}",
        )
        floor = self.floor(s["bound"].get("node"))
        if s["bound"]["method"] == "stuck":
            self.claim(
                s["bound"]["peak_bytes"] <= floor, f"bound.peak_bytes is {s['bound']['peak_bytes']}, its node proves {floor}"
            )
        if status == "infeasible":
            searched = s["bound"].get("extra_method") == "search"
            self.claim(
                searched or s["bound"]["peak_bytes"] > budget,
                "infeasible is claimed, but the bound on the peak does not prove it",
            )
            return self.wrong
        if status == "unknown":
            return self.wrong
        self.replay(base)
        if budget is not None:
            self.claim(s["peak_bytes"] <= budget, f"the peak {s['peak_bytes']} is above the budget {budget}")
            self.extra_time(budget, base)
        return self.wrong

    def replay(self, base: float) -> None:
        """Play the schedule, and hold its figures against those that are claimed."""
        s = self.solution
        moves = [(act, self.index[name]) for act, name in s["schedule"]]
        board = _Board(self, moves)
        for t, (act, v) in enumerate(moves):
            board.move(t, act, v)
        board.end()
        firsts = list(dict.fromkeys(v for act, v in moves if act in _RUNS))
        self.claim(not self.fixed or firsts == self.ops, "first runs do not keep the given order")
        self.claim(board.peak == s["peak_bytes"], f"peak_bytes is {s['peak_bytes']}, the schedule reaches {board.peak}")
        close = math.isclose(board.clock, s["seconds"], rel_tol=_SECONDS, abs_tol=1e-12)
        self.claim(close, f"seconds is {s['seconds']}, the schedule takes {board.clock}")
        extra = max(0.0, board.clock / base - 1) if base else 0.0
        close = math.isclose(extra, s["extra_fraction"], rel_tol=1e-6, abs_tol=1e-9)
        self.claim(close, f"extra_fraction is {s['extra_fraction']}, the schedule's is {extra}")

    def _needed(self, v: int) -> set[int]:
        """What a node reads: its parents, and of views the storage at the bottom."""
        found = set(self.graph.nodes[v].parents)
        for p in self.graph.nodes[v].parents:
            bottom = p
            while (below := self.graph.nodes[bottom].view_of) is not None:
                bottom = below
            found.add(bottom)
        return found

    # --- the bounds --------------------------------------------------------------------------------------------------

    def leader(self, v: int) -> int:
        above = self.graph.nodes[v].made_with
        return v if above is None else above

    def around(self, op: int) -> tuple[set[int], set[int]]:
        """Operators that certainly ran before the first run of one, and those that certainly run after it."""
        nodes = self.graph.nodes
        if self.fixed:
            at = self.place[op]
            return set(self.ops[:at]), set(self.ops[at + 1 :])
        below: dict[int, set[int]] = {v: set() for v in self.ops}
        above: dict[int, set[int]] = {v: {self.leader(p) for p in self.needed[v] if not nodes[p].resident} for v in self.ops}
        for v, ps in above.items():
            for p in ps:
                below[p].add(v)

        def reach(links: dict[int, set[int]]) -> set[int]:
            seen: set[int] = set()
            stack = [op]
            while stack:
                for q in links[stack.pop()] - seen:
                    seen.add(q)
                    stack.append(q)
            return seen

        return reach(above), reach(below)

    def stuck(self, op: int, before: set[int], after: set[int]) -> set[int]:
        nodes, needed = self.graph.nodes, self.needed[op]
        found = set()
        for v, n in enumerate(nodes):
            if n.resident or self.leader(v) not in before:
                continue
            later = n.keep or bool(self.readers[v] & after)
            movable = self.graph.offload is not None and n.move and n.bytes > 0
            lost = not nodes[self.leader(v)].recompute and not movable
            held = n.held_until is not None and (self.leader(n.held_until) in after or self.leader(n.held_until) == op)
            if v in needed or held or (later and lost):
                found.add(v)
        return found

    def least(self, op: int, present: set[int]) -> int:
        nodes = self.graph.nodes
        made = set(self.made[op])
        olds = {nodes[u].overwrites for u in made}
        there = (present - olds) | made | {v for v, n in enumerate(nodes) if n.resident}
        return sum(nodes[u].bytes for u in there) + nodes[op].workspace_bytes

    def floor(self, node: Any) -> int:
        resident = sum(n.bytes for n in self.graph.nodes if n.resident)
        if node is None:  # the end
            return resident + sum(n.bytes for n in self.graph.nodes if n.keep and not n.resident)
        op = self.index[node]
        return max(resident, self.least(op, self.stuck(op, *self.around(op))))

    def extra_time(self, budget: int, base: float) -> None:
        """The bound on extra seconds, and what the status says about it."""
        s, bound = self.solution, self.solution["bound"]
        claimed, method = bound["extra_seconds"], bound["extra_method"]
        extra = max(0.0, s["seconds"] - base)
        self.claim(
            claimed <= extra * (1 + _PROGRAM) + _SECONDS * max(1.0, base),
            f"the bound {claimed} s is above the plan's own {extra} s",
        )
        if s["status"] == "optimal":
            self.claim(
                math.isclose(claimed, extra, rel_tol=_PROGRAM, abs_tol=1e-8 * base),
                f"optimal is claimed, but the bound is {claimed} s and the plan adds {extra} s",
            )
        if claimed <= 0 or method in ("none", "search"):
            return
        proved = self.program(budget, base, [self.index[x] for x in bound.get("instants", [])], method)
        self.claim(
            claimed <= proved * (1 + _PROGRAM) + 1e-9 * base, f"bound.extra_seconds is {claimed}, its program proves {proved}"
        )

    def program(self, budget: int, base: float, at: list[int], method: str) -> float:
        """Solve a bound's program anew."""
        found = _Program(self, budget, base)
        if method == "instants":
            found.all_instants()
        else:
            found.several(at)
        return found.solve() * base


class _Board:
    """What is where while a schedule is played; sums are made anew at every move."""

    def __init__(self, checker: _Checker, moves: list[tuple[str, int]]) -> None:
        self.checker = checker
        self.nodes = checker.graph.nodes
        self.resident = {v for v, n in enumerate(self.nodes) if n.resident}
        self.board: set[int] = set()
        self.host: set[int] = set()
        self.runs = dict.fromkeys(range(len(self.nodes)), 0)
        self.last = {v: t for t, (act, v) in enumerate(moves) if act in _RUNS}
        self.last_fetch = {v: t for t, (act, v) in enumerate(moves) if act == "fetch"}
        self.clock = self.out_free = self.in_free = 0.0
        self.written: dict[int, float] = {}
        self.ready: dict[int, float] = {}
        self.peak = 0

    def claim(self, holds: bool, t: int, text: str) -> None:
        self.checker.claim(holds, f"move {t}: {text}")

    def move(self, t: int, act: str, v: int) -> None:
        node = self.nodes[v]
        before = self.bytes_now(t, v, act)
        inside = 0
        if act in _RUNS:
            self.compute(t, act, v)
            inside = node.workspace_bytes
        elif act == "free":
            self.free(t, v)
        elif act in ("offload", "fetch"):
            self.transfer(t, act, v)
        else:
            self.claim(False, t, f"{act!r} is no action")
        during = before if act == "free" else self.bytes_now(t, v, act) + inside
        self.peak = max(self.peak, during)
        if act == "fetch" and self.last_fetch[v] == t:
            self.host.discard(v)
            self.written.pop(v, None)

    def bytes_now(self, t: int, v: int, act: str) -> int:
        states = sum(n.state_bytes for u, n in enumerate(self.nodes) if n.state_bytes and self.runs[u] and self.last[u] > t)
        if act in _RUNS and self.runs[v] > 1 and self.last[v] == t:
            states += self.nodes[v].state_bytes
        return sum(self.nodes[u].bytes for u in self.board | self.resident) + states

    def compute(self, t: int, act: str, v: int) -> None:
        node, made = self.nodes[v], self.checker.made[v]
        self.claim(not node.resident and node.made_with is None, t, f"{node.id!r} is no operator")
        self.claim(node.recompute or not self.runs[v], t, f"{node.id!r} may not run again")
        for p in self.checker.needed[v]:
            self.claim(p in self.board or p in self.resident, t, f"{self.nodes[p].id!r} is not there for {node.id!r}")
            self.clock = max(self.clock, self.ready.get(p, 0.0))
        self.claim(not self.board.intersection(made), t, f"{node.id!r} is on the board already")
        if act == "update":
            olds = {old for u in made if (old := self.nodes[u].overwrites) is not None}
            self.claim(bool(olds), t, f"{node.id!r} overwrites nothing")
            for old in olds:
                self.claim(old in self.board, t, f"what {node.id!r} overwrites is not there")
                self.leave(old)
        self.board.update(made)
        self.runs[v] += 1
        self.clock += node.seconds

    def leave(self, v: int) -> None:
        self.clock = max(self.clock, self.written.get(v, 0.0), self.ready.pop(v, 0.0))
        self.board.discard(v)

    def free(self, t: int, v: int) -> None:
        node = self.nodes[v]
        self.claim(v in self.board, t, f"{node.id!r} is not on the board")
        until = node.held_until
        if until is not None:
            ran = self.runs[self.checker.leader(until)] > 0
            self.claim(ran, t, f"{node.id!r} is held until {self.nodes[until].id!r} has run")
        self.leave(v)

    def transfer(self, t: int, act: str, v: int) -> None:
        node, offload = self.nodes[v], self.checker.graph.offload
        self.claim(offload is not None and node.move and not node.resident, t, f"{node.id!r} may not be moved")
        if offload is None:
            return
        if act == "offload":
            self.claim(v in self.board and v not in self.host, t, f"{node.id!r} cannot be offloaded")
            start = max(self.clock, self.out_free, self.ready.get(v, 0.0))
            self.written[v] = self.out_free = end = start + node.bytes / offload.write_bytes_per_second
            self.host.add(v)
        else:
            self.claim(v in self.host and v not in self.board, t, f"{node.id!r} cannot be fetched")
            start = max(self.clock, self.in_free, self.written.get(v, 0.0))
            self.ready[v] = self.in_free = end = start + node.bytes / offload.read_bytes_per_second
            self.board.add(v)
        self.clock = self.clock if offload.overlap else end
        held = sum(self.nodes[u].bytes for u in self.host)
        self.claim(offload.host_bytes is None or held <= offload.host_bytes, t, f"the second board holds {held} bytes")

    def end(self) -> None:
        self.clock = max([self.clock, *(self.ready.get(v, 0.0) for v in self.board)])
        for v, n in enumerate(self.nodes):
            self.checker.claim(n.resident or n.made_with is not None or self.runs[v] > 0, f"{n.id!r} is never computed")
            self.checker.claim(not n.keep or n.resident or v in self.board, f"{n.id!r} is not there at the end")


class _Program:
    """A bound's program, set up from the graph alone: names, costs, rows ``sum >= least``."""

    def __init__(self, checker: _Checker, budget: int, base: float) -> None:
        self.checker = checker
        self.nodes = checker.graph.nodes
        self.budget = budget
        self.base = base
        self.names: dict[Any, int] = {}
        self.cost: list[float] = []
        self.rows: list[dict[int, float]] = []
        self.low: list[float] = []

    def var(self, name: Any, price: float = 0.0) -> int:
        if name not in self.names:
            self.names[name] = len(self.cost)
            self.cost.append(price)
        return self.names[name]

    def row(self, terms: dict[int, float], least: float) -> None:
        self.rows.append(terms)
        self.low.append(least)

    def back(self, v: int, when: Any, alone: Any) -> dict[int, float]:
        """Ways for a value to be there again."""
        ways: dict[int, float] = {}
        o, offload = self.checker.leader(v), self.checker.graph.offload
        if self.nodes[o].recompute:
            ways[self.var(("run", o, alone), self.nodes[o].seconds / self.base)] = 1.0
        if offload is not None and self.nodes[v].move and self.nodes[v].bytes:
            size = 0.0 if offload.overlap else self.nodes[v].bytes / self.base
            fetch = self.var(("fetch", v, when), size / offload.read_bytes_per_second)
            ways[fetch] = 1.0
            self.row({self.var(("write", v), size / offload.write_bytes_per_second): 1.0, fetch: -1.0}, 0.0)
        return ways

    def read_later(self, v: int, after: set[int]) -> bool:
        return self.nodes[v].keep or bool(self.checker.readers[v] & after)

    def all_instants(self) -> None:
        """One row per operator: what is absent when it first runs makes up for all above the budget."""
        checker = self.checker
        for op in checker.ops:
            before, after = checker.around(op)
            fixed = checker.stuck(op, before, after)
            wanted = {
                v
                for v, n in enumerate(self.nodes)
                if not n.resident and checker.leader(v) in before and (self.read_later(v, after) or v in checker.needed[op])
            }
            need = checker.least(op, wanted | fixed) - self.budget
            if need <= 0:
                continue
            terms = {}
            for v in wanted - fixed:
                earlier = sum(1 for u in checker.readers[v] if checker.place[u] < checker.place[op])
                stretch = earlier if checker.fixed else 0
                gone = self.var(("gone", v, stretch))
                single = len(checker.made[checker.leader(v)]) == 1
                self.row(self.back(v, stretch, stretch if single else 0) | {gone: -1.0}, 0.0)
                terms[gone] = self.nodes[v].bytes / need
            self.row(terms, 1.0)

    def several(self, at: list[int]) -> None:
        """What must be on the board from one instant to the next."""
        checker, nodes = self.checker, self.nodes
        sides = [checker.around(op) for op in at]
        made = [{v for v, n in enumerate(nodes) if not n.resident and checker.leader(v) in before} for before, _ in sides]
        for t, op in enumerate(at):
            before, after = sides[t]
            here = made[t] - {nodes[u].overwrites for u in checker.made[op]}
            room = (checker.least(op, set()) - self.budget) / self.budget
            self.row({self.var(("on", t, v)): -nodes[v].bytes / self.budget for v in here}, room)
            fixed = checker.stuck(op, before, after)
            for v in here:
                terms = {self.var(("on", t, v)): 1.0}
                if v not in fixed and self.read_later(v, after):
                    for q in range(t + 1, len(at) + 1):
                        terms |= self.back(v, q, q)
                if v in fixed or self.read_later(v, after):
                    self.row(terms, 1.0)
        for t in range(1, len(at) + 1):
            self.between(t, at, sides, made[t - 1])

    def between(self, t: int, at: list[int], sides: list[tuple[set[int], set[int]]], made: set[int]) -> None:
        """What is there at instant ``t`` or runs before it was there at ``t - 1`` or came back between them."""
        checker, nodes = self.checker, self.nodes
        before, after = sides[t - 1]
        final = t == len(at)

        def there(v: int) -> dict[int, float]:
            return {self.var(("on", t - 1, v)): 1.0} | self.back(v, t, t)

        overwritten = set() if final else {nodes[u].overwrites for u in checker.made[at[t]]}
        for v in made - overwritten if not final else ():
            self.row(there(v) | {self.var(("on", t, v)): -1.0}, 0.0)
        for o in before:
            if nodes[o].recompute:
                again = self.var(("run", o, t), nodes[o].seconds / self.base)
                for p in checker.needed[o]:
                    if not nodes[p].resident:
                        self.row(there(p) | {again: -1.0}, 0.0)
        for o in after if final else after & (sides[t][0] | {at[t]}):
            for p in checker.needed[o] & made:
                self.row(there(p), 1.0)

    def solve(self) -> float:
        if not self.rows:
            return 0.0
        matrix = dok_array((len(self.rows), len(self.cost)))
        for i, terms in enumerate(self.rows):
            for j, a in terms.items():
                matrix[i, j] = a
        result = milp(
            np.asarray(self.cost),
            constraints=LinearConstraint(matrix.tocsr(), self.low, np.inf),
            bounds=Bounds(0, 1),
            integrality=np.ones(len(self.cost)),
            options={"time_limit": _LIMIT},
        )
        dual = getattr(result, "mip_dual_bound", None)
        return float(result.fun) if result.status == 0 else float(dual or 0.0)
