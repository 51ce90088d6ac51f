"""Verifies a solution again, by a second account of the rules and of the bounds; only the graph is shared with the first.

Written for reading, not for speed: the board is a set, its bytes are summed anew at every move.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import csr_array

from lowtide.planning.check.caching_allocator import Device
from lowtide.planning.graph import Graph
from lowtide.planning.status import Status

_SECONDS = 1e-9
"""Relative difference in seconds that sums may show."""
_PROGRAM = 1e-6
"""Relative difference in a bound that two runs of the program's solver may show."""
_LIMIT = 120.0
"""Seconds for solving the bound's program again."""
_IMPOSSIBLE = 2
"""What the solver says of a program without an answer."""
_RUNS = ("compute", "update")
_WAITED = 1000.0
"""So many times the graph's seconds a bound may be made of waiting, at most."""
_PEAK_METHODS = ("stuck", "instant", "forced", "cut")
_TIME_METHODS = ("none", "search", "instant", "instants", "chain")
_OF_THE_PLAN = ("curve", "decides", "modules", "levers")
"""What a solution says besides, which its curve's points do not."""
_OF_A_POINT = frozenset((
    "status", "budget_bytes", "peak_bytes", "host_peak_bytes", "moved_bytes", "seconds", "wait_seconds", "extra_fraction",
    "extra_seconds", "bound", "lowest_peak_bytes", "schedule",
))
"""What such a point says itself; all else holds for the whole file."""
_NONE_WITHOUT_A_PLAN = ("peak_bytes", "host_peak_bytes", "moved_bytes", "seconds", "wait_seconds", "extra_fraction")
_OPTIMAL = 1.1e-9
"""Share of the graph's seconds by which an optimal plan's bound may lie below it: a billionth, and what sums differ by."""
_SCALE = 1e4
"""Costs of a program are made so many times larger: what its solver tolerates is nothing beside them then."""
_MOST_SEARCHED = 10
"""Nodes up to which a claim that all schedules were looked at is verified by looking at them."""


def check(graph: Graph, solution: object, *, progress: Callable[[int, int], object] | None = None) -> list[str]:
    """What is wrong with a solution file's content; empty where it holds.

    The points of a curve are solutions too; ``saves_seconds`` of ``decides`` is an estimate, and is not looked at.

    Args:
        graph: what was solved.
        solution: the file's content.
        progress: called with how many solutions were looked at, and how many there are.
    """
    if not is_solution(solution):
        return ["it is no solution written by `lowtide plan --json`"]
    assert isinstance(solution, Mapping)
    curve = solution.get("curve", [])
    if not isinstance(curve, list) or not all(is_solution(p) and type(p.get("budget_bytes")) is int for p in curve):
        return ["its curve is no list of solutions for budgets"]
    wrong = _wrong(graph, solution)
    for done, point in enumerate(curve, 1):
        if progress is not None:
            progress(done, len(curve) + 1)
        whole = {k: v for k, v in solution.items() if k not in _OF_THE_PLAN} | {"strategy": "search"} | point
        foreign = sorted(set(point) - _OF_A_POINT)
        texts = [f"it says {', '.join(foreign)} of its own"] if foreign else _wrong(graph, whole)
        wrong += [f"curve at {point.get('budget_bytes')}: {text}" for text in texts]
    return wrong or _rises(curve)


def is_solution(found: object) -> bool:
    """Whether a file's content is what ``lowtide plan --json`` writes, true or not."""
    return isinstance(found, Mapping) and "status" in found and isinstance(found.get("bound"), Mapping)


def _rises(curve: Sequence[Mapping[str, Any]]) -> list[str]:
    """More memory never costs more time: not by the plans, and not by the bounds."""
    by_budget = sorted(curve, key=lambda point: -point["budget_bytes"])
    wrong = []
    for name, values in (
        ("seconds", [p["seconds"] for p in by_budget if p.get("seconds") is not None]),
        ("bound.extra_seconds", [p["bound"]["extra_seconds"] for p in by_budget]),
    ):
        if any(b < a * (1 - _SECONDS) for a, b in itertools.pairwise(values)):
            wrong.append(f"the curve's {name} fall with the budget")
    return wrong


def _wrong(graph: Graph, solution: Mapping[str, Any]) -> list[str]:
    try:
        strange = _strange(solution)
        return strange or _Checker(graph, solution).run()
    except _UnknownNode as unknown:
        return [f"it names a node that the graph does not have: {unknown.args[0]!r}"]
    except (KeyError, TypeError, ValueError, IndexError, ArithmeticError) as error:
        return [f"it is damaged: {type(error).__name__}: {error}"]


class _UnknownNode(Exception):
    """A name that the graph does not have."""


class _Index(dict[Any, int]):
    def __missing__(self, name: Any) -> int:
        raise _UnknownNode(name)


def _strange(solution: Mapping[str, Any]) -> list[str]:
    """Fields that say nothing that could be verified."""
    bound = solution["bound"]
    words = (
        ("status", solution["status"], [s.value for s in Status]), ("order", solution.get("order"), ["fixed", "free"]),
        ("bound.method", bound.get("method"), _PEAK_METHODS), ("bound.extra_method", bound.get("extra_method"), _TIME_METHODS),
    )
    wrong = [f"{name} is {found!r}: it is one of {', '.join(known)}" for name, found, known in words if found not in known]
    unit, budget = solution.get("rounding_bytes"), solution.get("budget_bytes")
    if type(unit) is not int or unit < 1:
        wrong.append(f"rounding_bytes is {unit!r}: it is a number of bytes, 1 or more")
    if budget is not None and (type(budget) is not int or budget < 0):
        wrong.append(f"budget_bytes is {budget!r}: it is a number of bytes, or null")
    if budget is None and solution["status"] in (Status.INFEASIBLE, Status.UNKNOWN):
        wrong.append(f"{solution['status']} is claimed, but for no budget")
    if type(bound.get("extra_seconds")) not in (int, float) or bound["extra_seconds"] < 0:
        wrong.append(f"bound.extra_seconds is {bound.get('extra_seconds')!r}: it is a number of seconds, 0 or more")
    return wrong


class _Checker:
    def __init__(self, graph: Graph, solution: Mapping[str, Any]) -> None:
        unit = int(solution["rounding_bytes"])
        self.graph = graph.rounded(unit) if unit > 1 else graph
        self.solution = solution
        self.index = _Index((n.id, v) for v, n in enumerate(self.graph.nodes))
        self.fixed = solution["order"] == "fixed"
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
        self.claim(
            s["given_peak_bytes"] == (given := self.given_peak()),
            f"given_peak_bytes is {s['given_peak_bytes']}, the given order reaches {given}",
        )
        self.peak_bound(s["bound"]["node"], s["bound"]["method"], s["bound"]["peak_bytes"])
        if status in (Status.INFEASIBLE, Status.UNKNOWN):
            told = [key for key in _NONE_WITHOUT_A_PLAN if s.get(key) is not None]
            self.claim(not told and s["schedule"] == [], f"{status} is claimed, but it says {', '.join(told) or 'a schedule'}")
        if budget is None:
            self.replay(base)
            if s.get("allocator") is not None:
                self.segments(None)
            self.once_each()
        elif status == Status.INFEASIBLE:
            self.infeasible(budget)
        elif status == Status.UNKNOWN:
            self.extra_bound(budget, base)
        else:
            self.replay(base)
            self.claim(s["peak_bytes"] <= budget, f"the peak {s['peak_bytes']} is above the budget {budget}")
            if s.get("allocator") is not None:
                self.segments(budget)
            self.extra_time(budget, base)
        return self.wrong

    def infeasible(self, budget: int) -> None:
        """Nothing fits the budget."""
        bound = self.solution["bound"]
        if bound["extra_method"] != "search":
            self.claim(bound["peak_bytes"] > budget, "infeasible is claimed, but the bound on the peak does not prove it")
            return
        found = self.searched(budget)
        self.claim(found is None, f"infeasible is claimed, but a schedule of {found} s fits the budget")

    def once_each(self) -> None:
        """Without a budget a plan is an order of the lowest peak, with every operator run once and nothing moved."""
        s = self.solution
        acts = [act for act, _ in s["schedule"]]
        self.claim(not s["bound"]["extra_seconds"], "a bound on extra seconds is claimed, but for no budget")
        if s["strategy"] != "search":
            self.claim(s["status"] != Status.OPTIMAL, "optimal is claimed for a plan that was not searched for")
            return
        self.claim(sum(act in _RUNS for act in acts) == len(self.ops), "an operator runs again, but no budget asks for it")
        self.claim("offload" not in acts, "a value is moved, but no budget asks for it")
        if s["status"] == Status.OPTIMAL:
            proved = self.given_peak() if self.fixed else s["bound"]["peak_bytes"]
            self.claim(s["peak_bytes"] <= proved, f"optimal is claimed at {s['peak_bytes']} bytes, but the bound is {proved}")

    def searched(self, budget: int) -> float | None:
        """Seconds of the cheapest schedule within a budget, by looking at all of them; None where there is none."""
        if sum(1 for n in self.graph.nodes if not n.resident) > _MOST_SEARCHED:
            self.claim(False, "all schedules are said to have been looked at, but the graph is too large for that")
            return None
        return _Search(self, budget).seconds()

    def peak_bound(self, node: Any, method: str, claimed: int) -> None:
        """The bound on the peak: of all schedules, or where there is no budget of those that run every operator once."""
        if method == "stuck":
            proved = self.floor(node)
        elif method == "instant":
            self.claim(node is not None, "bound.method is instant, but bound.node names none")
            proved = 0 if node is None else self.closed(self.index[node])
        else:
            single = self.solution["budget_bytes"] is None
            self.claim(single, f"bound.method is {method}: that is about running every operator once, but there is a budget")
            proved = self.cut(node)
        self.claim(claimed <= proved, f"bound.peak_bytes is {claimed}, its node proves {proved}")

    def given_peak(self) -> int:
        """What the given order reaches when every value goes after its last use."""
        nodes, place = self.graph.nodes, self.place
        last: list[float] = []
        for v, n in enumerate(nodes):
            held = () if n.held_until is None else (self.leader(n.held_until),)
            last.append(math.inf if n.keep else max((place[o] for o in (*self.readers[v], *held)), default=-1))
        resident = sum(n.bytes for n in nodes if n.resident)
        there: set[int] = set()
        highest = self.floor(None)
        for at, op in enumerate(self.ops):
            there = {v for v in there if last[v] >= at}
            olds = self.olds(op)
            if all(last[old] <= at for old in olds):
                there -= olds
            there.update(self.made[op])
            highest = max(highest, resident + sum(nodes[v].bytes for v in there) + nodes[op].workspace_bytes)
        return highest

    def segments(self, budget: int | None) -> None:
        """Play the schedule on a device that has the budget (None: without end), under torch's caching allocator."""
        device = Device(budget)
        denied = self.denied(device)
        if denied is not None:
            self.claim(False, f"the segments of the {self.solution['allocator']} allocator exceed the budget at move {denied}")
            return
        told = self.solution.get("reserved_bytes")
        self.claim(told == device.peak, f"reserved_bytes is {told}, the schedule reserves {device.peak}")

    def denied(self, device: Device) -> int | None:
        """The first move at which a device has too few bytes; None if it has enough for all."""
        nodes = self.graph.nodes
        pieces: dict[int, Any] = {v: device.allocate(n.bytes) for v, n in enumerate(nodes) if n.resident and n.bytes}
        if None in pieces.values():
            return 0
        for t, (act, name) in enumerate(self.solution["schedule"]):
            v = self.index[name]
            if act == "free" and v in pieces:
                device.release(pieces.pop(v))
            if act not in (*_RUNS, "fetch"):
                continue
            over = {u for u in (self.olds(v) if act == "update" else ()) if u in pieces}
            for u in self.made[v] if act in _RUNS else [v]:
                old = nodes[u].overwrites
                if old in over and nodes[old].bytes == nodes[u].bytes:
                    over.remove(old)
                    pieces[u] = pieces.pop(old)
                elif nodes[u].bytes and (piece := device.allocate(nodes[u].bytes)) is not None:
                    pieces[u] = piece
                elif nodes[u].bytes:
                    return t
            for o in over:
                device.release(pieces.pop(o))
            if act in _RUNS and nodes[v].workspace_bytes:
                room = device.allocate(nodes[v].workspace_bytes)
                if room is None:
                    return t
                device.release(room)
        return None

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
        waits = board.clock - math.fsum(self.graph.nodes[v].seconds * n for v, n in board.runs.items())
        least = _SECONDS * (base or 1.0)
        figures = (
            ("extra_fraction", extra, _SECONDS),
            ("wait_seconds", waits, least),
            ("extra_seconds", max(0.0, board.clock - base), least),
        )
        for key, found, tolerated in figures:
            close = key not in s or math.isclose(found, s[key], rel_tol=_PROGRAM, abs_tol=tolerated)
            self.claim(close, f"{key} is {s.get(key)}, the schedule's is {found}")
        written = sum(self.graph.nodes[v].bytes for act, v in moves if act == "offload")
        for key, bytes_ in (
            ("lowest_peak_bytes", board.peak), ("host_peak_bytes", board.host_peak), ("moved_bytes", written)
        ):
            self.claim(s[key] == bytes_, f"{key} is {s[key]}, the schedule's is {bytes_}")
        if "decides" in s:
            self.decides(board, s["decides"])
        if "modules" in s:
            self.modules(board, {v for act, v in moves if act == "fetch"})

    def decides(self, board: _Board, told: Mapping[str, Any]) -> None:
        """What is said to decide: a node at which the peak is reached, and what runs again."""
        tight = self.index[told["tight_node"]]
        self.claim(tight in board.highest, f"{told['tight_node']!r} is said to run at the peak, which is not reached there")
        for row in told["dear"]:
            v = self.index[row["node"]]
            again = self.graph.nodes[v].seconds * (board.runs[v] - 1)
            self.claim(board.runs[v] > 1, f"{row['node']!r} is said to run again, and does not")
            self.claim(math.isclose(row["seconds"], again, rel_tol=_SECONDS), f"running {row['node']!r} again takes {again} s")
            made = sum(self.graph.nodes[u].bytes for u in self.made[v])
            self.claim(row["bytes"] == made, f"{row['node']!r} makes {made} bytes, not {row['bytes']}")

    def modules(self, board: _Board, fetched: set[int]) -> None:
        """Bytes of each module's values by what becomes of them, and seconds of what runs again."""
        sums: dict[str, dict[str, float]] = {}
        for v, node in enumerate(self.graph.nodes):
            if node.resident:
                continue
            leader = self.leader(v)
            module = node.module or self.graph.nodes[leader].module
            row = sums.setdefault(module, {"kept_bytes": 0, "recomputed_bytes": 0, "moved_bytes": 0, "seconds": 0.0})
            again = board.runs[leader] > 1
            row["moved_bytes" if v in fetched else "recomputed_bytes" if again else "kept_bytes"] += node.bytes
            row["seconds"] += node.seconds * max(0, board.runs[v] - 1)
        told = {row["module"]: row for row in self.solution["modules"]}
        self.claim(told.keys() == sums.keys(), "its modules are not those of the graph")
        for module in told.keys() & sums.keys():
            for key, value in sums[module].items():
                close = math.isclose(told[module][key], value, rel_tol=_SECONDS, abs_tol=1e-12)
                self.claim(close, f"{key} of module {module!r} is {told[module][key]}, the schedule's is {value}")

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

    def olds(self, op: int) -> set[int]:
        """Values that an operator overwrites."""
        return {old for u in self.made[op] if (old := self.graph.nodes[u].overwrites) is not None}

    def least(self, op: int, present: set[int]) -> int:
        nodes = self.graph.nodes
        made = set(self.made[op])
        there = (present - self.olds(op)) | made | {v for v, n in enumerate(nodes) if n.resident}
        return sum(nodes[u].bytes for u in there) + nodes[op].workspace_bytes

    def floor(self, node: Any) -> int:
        resident = sum(n.bytes for n in self.graph.nodes if n.resident)
        if node is None:  # the end
            return resident + sum(n.bytes for n in self.graph.nodes if n.keep and not n.resident)
        op = self.index[node]
        return max(resident, self.least(op, self.stuck(op, *self.around(op))))

    def wanted(self, op: int, before: set[int], after: set[int]) -> set[int]:
        """Values that were made before an operator first runs and are read by it or later."""
        later = {v for v, n in enumerate(self.graph.nodes) if n.keep or self.readers[v] & after}
        made = {v for v, n in enumerate(self.graph.nodes) if not n.resident and self.leader(v) in before}
        return made & (later | self.needed[op])

    def closed(self, op: int) -> int:
        """The least that is on the board when an operator first runs, with what all that is absent needs to come back."""
        before, after = self.around(op)
        most = max(1, self.least(op, self.wanted(op, before, after) | self.stuck(op, before, after)))
        base = math.fsum(n.seconds for n in self.graph.nodes if not n.resident) or 1.0
        return math.floor(min(1.0, _Program(self, most, base).least_bytes(op)) * most)

    def cut(self, node: Any) -> int:
        """The least that is on the board when an operator first runs, over all sets of operators that may have run by then."""
        if node is None:
            return self.floor(node)
        op, nodes = self.index[node], self.graph.nodes
        before, after = self.around(op)
        values = [v for v, n in enumerate(nodes) if not n.resident and self.leader(v) != op]
        ran = {o: i for i, o in enumerate(self.ops)}
        there = {v: len(ran) + i for i, v in enumerate(values)}
        rows = [{ran[o]: 1.0, ran[self.leader(p)]: -1.0} for o in self.ops for p in self.needed[o] if not nodes[p].resident]
        for v in values:
            until = nodes[v].held_until
            ends = self.readers[v] | (set() if until is None else {self.leader(until)})
            rows += [{ran[self.leader(v)]: 1.0, ran[r]: -1.0, there[v]: -1.0} for r in ends - {self.leader(v)}]
            rows += [{ran[self.leader(v)]: 1.0, there[v]: -1.0}] if nodes[v].keep else []
        cost = np.asarray([0.0] * len(ran) + [float(nodes[v].bytes) for v in values])
        limits = [(float(o in before), float(o not in after and o != op)) for o in self.ops] + [(0.0, 1.0)] * len(values)
        found = linprog(cost, A_ub=_matrix(rows, len(cost)), b_ub=np.zeros(max(1, len(rows))), bounds=limits)
        taken_over = sum(nodes[old].bytes for old in self.olds(op))
        return round(found.fun) + self.least(op, set()) - taken_over if found.status == 0 else 0

    def extra_bound(self, budget: int, base: float) -> None:
        """The bound on extra seconds."""
        bound = self.solution["bound"]
        claimed, method = bound["extra_seconds"], bound["extra_method"]
        if claimed <= 0:
            return
        if method == "search" and self.graph.offload is not None and self.graph.offload.overlap:
            self.claim(False, "all schedules are said to have been looked at, which nobody does where transfers overlap")
            return
        if method == "search":
            found = self.searched(budget)
            proved = math.inf if found is None else max(0.0, found - base)
        elif method == "none":
            proved = 0.0
        else:
            proved = self.program(budget, base or 1.0, claimed)
        self.claim(
            claimed <= proved * (1 + _PROGRAM) + 1e-9 * base, f"bound.extra_seconds is {claimed}, by {method} it is {proved}"
        )

    def extra_time(self, budget: int, base: float) -> None:
        """The bound on extra seconds, and what the status says about it."""
        s, claimed = self.solution, self.solution["bound"]["extra_seconds"]
        extra = max(0.0, s["seconds"] - base)
        self.claim(
            claimed <= extra * (1 + _PROGRAM) + _SECONDS * max(1.0, base),
            f"the bound {claimed} s is above the plan's own {extra} s",
        )
        if s["status"] == "optimal":
            self.claim(
                math.isclose(claimed, extra, rel_tol=_SECONDS, abs_tol=_OPTIMAL * base),
                f"optimal is claimed, but the bound is {claimed} s and the plan adds {extra} s",
            )
        self.extra_bound(budget, base)

    def program(self, budget: int, base: float, claimed: float) -> float:
        """Solve a bound's program anew: relaxed, if that is enough for what is claimed."""
        found, told = _Program(self, budget, base), self.solution["bound"]
        if told["extra_method"] == "instants":
            found.all_instants()
        else:
            at = [self.index[x] for x in told["instants"]]
            follow = all(v in self.place for v in at) and all(a in self.around(b)[0] for a, b in itertools.pairwise(at))
            self.claim(follow, "the bound's instants are no operators that first run one after the other in every schedule")
            if not follow:
                return 0.0
            found.several(at)
            found.windows(at, [(start, end, self.index[x]) for start, end, x in told.get("windows", ())])
        return found.solve(claimed / base) * base


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
        self.peak, self.host_peak = sum(self.nodes[v].bytes for v in self.resident), 0
        self.highest: set[int] = set()

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
        if during > self.peak:
            self.peak, self.highest = during, set()
        if during == self.peak:
            self.highest.add(v)
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
            olds = self.checker.olds(v)
            self.claim(bool(olds), t, f"{node.id!r} overwrites nothing")
            for old in olds:
                self.claim(old in self.board, t, f"what {node.id!r} overwrites is not there")
                self.let_go(t, old, by=v)
        self.board.update(made)
        self.runs[v] += 1
        self.clock += node.seconds

    def let_go(self, t: int, v: int, *, by: int = -1) -> None:
        """A value leaves, if no script holds it any more, or what it is held for is what takes it over."""
        until = self.nodes[v].held_until
        if until is not None and self.checker.leader(until) != by:
            ran = self.runs[self.checker.leader(until)] > 0
            self.claim(ran, t, f"{self.nodes[v].id!r} is held until {self.nodes[until].id!r} has run")
        self.clock = max(self.clock, self.written.get(v, 0.0), self.ready.pop(v, 0.0))
        self.board.discard(v)

    def free(self, t: int, v: int) -> None:
        node = self.nodes[v]
        self.claim(v in self.board, t, f"{node.id!r} is not on the board")
        self.let_go(t, v)

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
        self.host_peak = max(self.host_peak, held)
        self.claim(offload.host_bytes is None or held <= offload.host_bytes, t, f"the second board holds {held} bytes")

    def end(self) -> None:
        self.clock = max([self.clock, *(self.ready.get(v, 0.0) for v in self.board)])
        for v, n in enumerate(self.nodes):
            self.checker.claim(n.resident or n.made_with is not None or self.runs[v] > 0, f"{n.id!r} is never computed")
            self.checker.claim(not n.keep or n.resident or v in self.board, f"{n.id!r} is not there at the end")


class _Search:
    """All schedules of a small graph within a budget: what is on the board, on the second board, and has run, as bits."""

    def __init__(self, checker: _Checker, budget: int) -> None:
        self.checker = checker
        self.nodes = checker.graph.nodes
        self.offload = checker.graph.offload
        self.budget = budget - sum(n.bytes for n in self.nodes if n.resident)
        self.loose = [v for v, n in enumerate(self.nodes) if not n.resident]

    def seconds(self) -> float | None:
        start = (0, 0, 0)
        best, queue = {start: 0.0}, [(0.0, start)]
        while queue:
            seconds, state = heapq.heappop(queue)
            if seconds > best[state]:
                continue
            if self._ends(state):
                return seconds
            for after, cost in self._next(state):
                if seconds + cost < best.get(after, math.inf):
                    best[after] = seconds + cost
                    heapq.heappush(queue, (seconds + cost, after))
        return None

    def _ends(self, state: tuple[int, int, int]) -> bool:
        board, _, ran = state
        kept = all(board >> v & 1 for v in self.loose if self.nodes[v].keep)
        return kept and all(ran >> op & 1 for op in self.checker.ops)

    def _bytes(self, board: int) -> int:
        return sum(self.nodes[v].bytes for v in self.loose if board >> v & 1)

    def _next(self, state: tuple[int, int, int]) -> Iterator[tuple[tuple[int, int, int], float]]:
        board, host, ran = state
        nodes, offload = self.nodes, self.offload
        for v in self.loose:
            bit, until = 1 << v, nodes[v].held_until
            if board & bit:
                if until is None or ran >> self.checker.leader(until) & 1:
                    yield (board & ~bit, host, ran), 0.0
                if offload is not None and nodes[v].move and not host & bit:
                    yield (board, host | bit, ran), nodes[v].bytes / offload.write_bytes_per_second
            elif offload is not None and host & bit and self._bytes(board | bit) <= self.budget:
                yield (board | bit, host, ran), nodes[v].bytes / offload.read_bytes_per_second
        for op in self.checker.ops:
            yield from self._runs(op, state)

    def _runs(self, op: int, state: tuple[int, int, int]) -> Iterator[tuple[tuple[int, int, int], float]]:
        board, host, ran = state
        nodes, checker = self.nodes, self.checker
        again = ran >> op & 1
        waits = checker.fixed and not again and any(not ran >> o & 1 for o in checker.ops[: checker.place[op]])
        reads = all(nodes[p].resident or board >> p & 1 for p in checker.needed[op])
        if waits or not reads or (again and not nodes[op].recompute) or any(board >> u & 1 for u in checker.made[op]):
            return
        olds = sum(1 << old for old in checker.olds(op))
        made = sum(1 << u for u in checker.made[op])
        free = {None, op} | {o for o in checker.ops if ran >> o & 1}
        held = any(u is not None and checker.leader(u) not in free for u in (nodes[v].held_until for v in checker.olds(op)))
        for left in {board, board & ~olds} if olds & board == olds and not held else {board}:
            if self._bytes(left | made) + nodes[op].workspace_bytes <= self.budget:
                yield (left | made, host, ran | 1 << op), nodes[op].seconds


def _matrix(rows: list[dict[int, float]], width: int) -> Any:
    """Rows of a program as a matrix of so many columns; at least one row, which solvers ask for."""
    entries = [(i, j, a) for i, terms in enumerate(rows) for j, a in terms.items()]
    at, of, data = zip(*entries, strict=True) if entries else ((), (), ())
    return csr_array((data, (at, of)), shape=(max(1, len(rows)), width))


class _Program:
    """A bound's program, set up from the graph alone: names, costs, rows ``sum >= least``."""

    def __init__(self, checker: _Checker, budget: int, base: float) -> None:
        self.checker = checker
        self.nodes = checker.graph.nodes
        self.budget = budget
        self.base = base
        self.names: dict[Any, int] = {}
        self.cost: list[float] = []
        self.whole: list[bool] = []
        self.rows: list[dict[int, float]] = []
        self.low: list[float] = []
        self.tied: set[tuple[int, int, int]] = set()

    def var(self, name: Any, price: float = 0.0, *, whole: bool = True) -> int:
        if name not in self.names:
            self.names[name] = len(self.cost)
            self.cost.append(price)
            self.whole.append(whole)
        return self.names[name]

    def row(self, terms: dict[int, float], least: float) -> None:
        self.rows.append(terms)
        self.low.append(least)

    def back(self, v: int, when: Any, alone: Any) -> dict[int, float]:
        """Ways for a value to be there again."""
        ways: dict[int, float] = {}
        o = self.checker.leader(v)
        if self.nodes[o].recompute:
            ways[self.run(o, alone)] = 1.0
        return ways | self.fetched(v, when)

    def run(self, o: int, when: Any) -> int:
        """An operator runs again."""
        return self.var(("run", o, when), self.nodes[o].seconds / self.base)

    def fetched(self, v: int, when: Any) -> dict[int, float]:
        """A value is fetched, if it can be, and was moved before."""
        offload = self.checker.graph.offload
        if offload is None or not self.nodes[v].move or not self.nodes[v].bytes:
            return {}
        size = 0.0 if offload.overlap else self.nodes[v].bytes / self.base
        fetch = self.var(("fetch", v, when), size / offload.read_bytes_per_second)
        self.row({self.var(("write", v), size / offload.write_bytes_per_second): 1.0, fetch: -1.0}, 0.0)
        return {fetch: 1.0}

    def read_later(self, v: int, after: set[int]) -> bool:
        return self.nodes[v].keep or bool(self.checker.readers[v] & after)

    def all_instants(self) -> None:
        """One row per operator: what is absent when it first runs makes up for all above the budget."""
        checker = self.checker
        for op in checker.ops:
            before, after = checker.around(op)
            fixed = checker.stuck(op, before, after)
            wanted = checker.wanted(op, before, after)
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

    def several(self, at: list[int], *, channels: bool = True) -> None:
        """What must be on the board from one instant to the next."""
        checker, nodes = self.checker, self.nodes
        sides = [checker.around(op) for op in at]
        made = [{v for v, n in enumerate(nodes) if not n.resident and checker.leader(v) in before} for before, _ in sides]
        for t, op in enumerate(at):
            before, after = sides[t]
            here = made[t] - checker.olds(op)
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
        if channels and checker.graph.offload is not None and checker.graph.offload.overlap:
            for t in range(len(at)):
                self.channels(t, at[t], *sides[t], len(at))

    def channels(self, t: int, op: int, before: set[int], after: set[int], count: int) -> None:
        """Each channel of the second board moves one value at a time: of what is written before an instant, and read after it.

        ``("idle", s)`` is time in the stretch ``s`` in which nothing runs that the program knows of.
        """
        offload, nodes = self.checker.graph.offload, self.nodes
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
            anew = [self.names.get(("run", self.checker.leader(v), s)) for s in range(t + 1, count + 1)]
            for j in later:
                self.row({copied: 1.0, j: -1.0, here: 1.0} | {k: 1.0 for k in anew if k is not None}, 0.0)
        rest = self.base - nodes[op].seconds
        self.row(write_terms, (math.fsum(nodes[o].seconds for o in after) - rest) / self.base)
        self.row(read_terms, (math.fsum(nodes[o].seconds for o in before) - rest) / self.base)

    def least_bytes(self, op: int) -> float:
        """What is on the board at least when an operator first runs, as a share of the budget; at most all of it."""
        self.several([op], channels=False)
        self.cost = [0.0] * len(self.cost)
        self.rows[0] |= {self.var("peak", 1.0): 1.0}
        self.low[0] = self.checker.least(op, set()) / self.budget
        return self._solved(whole=False)

    def between(self, t: int, at: list[int], sides: list[tuple[set[int], set[int]]], made: set[int]) -> None:
        """What is there at instant ``t`` or runs before it was there at ``t - 1`` or came back between them."""
        checker, nodes = self.checker, self.nodes
        before, after = sides[t - 1]
        final = t == len(at)

        def there(v: int) -> dict[int, float]:
            return {self.var(("on", t - 1, v)): 1.0} | self.back(v, t, t)

        overwritten = set() if final else checker.olds(at[t])
        for v in made - overwritten if not final else ():
            self.row(there(v) | {self.var(("on", t, v)): -1.0}, 0.0)
        for o in before:
            if nodes[o].recompute:
                again = self.run(o, t)
                for p in checker.needed[o]:
                    if not nodes[p].resident:
                        self.row(there(p) | {again: -1.0}, 0.0)
        for o in after if final else after & (sides[t][0] | {at[t]}):
            for p in checker.needed[o] & made:
                self.row(there(p), 1.0)

    def windows(self, at: list[int], told: Sequence[tuple[int, int, int]]) -> None:
        """What is there at an instant was there at an earlier one, or came back between; so did what it came back from.

        Args:
            at: the instants.
            told: of which two of them (their numbers; their count for the end), and of which values, rows are wanted.
        """
        checker = self.checker
        sides = [checker.around(op) for op in at]
        for start, end, v in told:
            here, later = self.names.get(("on", start, v)), self.names.get(("on", end, v))
            if here is None or not 0 <= start < end <= len(at):
                continue
            if end < len(at) and later is not None:
                self.row({here: 1.0} | self.between_far(start, end, v) | {later: -1.0}, 0.0)
            elif end == len(at) and checker.leader(v) in sides[start][0] and self.read_later(v, sides[start][1]):
                self.row({here: 1.0} | self.between_far(start, end, v), 1.0)

    def between_far(self, start: int, end: int, v: int) -> dict[int, float]:
        """Ways for a value to come back between two instants."""
        stretches = range(start + 1, end + 1)
        asked = [v]
        while asked:
            o = self.checker.leader(asked.pop())
            if not self.nodes[o].recompute or (o, start, end) in self.tied:
                continue
            self.tied.add((o, start, end))
            again = self.var(("again", o, start, end), whole=False)
            self.row({self.run(o, t): 1.0 for t in stretches} | {again: -1.0}, 0.0)
            for p in self.checker.needed[o]:
                there = self.names.get(("on", start, p))
                if there is not None:
                    asked.append(p)
                    self.row({there: 1.0} | self.ways_far(start, end, p) | {again: -1.0}, 0.0)
        return self.ways_far(start, end, v)

    def ways_far(self, start: int, end: int, v: int) -> dict[int, float]:
        o = self.checker.leader(v)
        ways = {self.var(("again", o, start, end), whole=False): 1.0} if self.nodes[o].recompute else {}
        for t in range(start + 1, end + 1):
            ways |= self.fetched(v, t)
        return ways

    def solve(self, enough: float) -> float:
        """What the program proves: with real variables, if that is enough, else with whole ones."""
        if not self.rows:
            return 0.0
        relaxed = self._solved(whole=False)
        return relaxed if relaxed * (1 + _PROGRAM) >= enough else max(relaxed, self._solved(whole=True))

    def _solved(self, *, whole: bool) -> float:
        result = milp(
            _SCALE * np.asarray(self.cost),
            constraints=LinearConstraint(_matrix(self.rows, len(self.cost)), self.low, np.inf),
            bounds=Bounds(0, 1),
            integrality=np.asarray(self.whole) & whole,
            options={"time_limit": _LIMIT, "mip_rel_gap": 0.0},
        )
        if result.status == _IMPOSSIBLE:
            return math.inf
        proven = getattr(result, "mip_dual_bound", None) if whole else result.fun if result.status == 0 else None
        return float(proven or 0.0) / _SCALE
