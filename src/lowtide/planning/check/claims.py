"""Verifies a solution's claims against the graph: figures, schedule and bounds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

from lowtide.planning.check.caching_allocator import Device
from lowtide.planning.check.exhaustive import Search
from lowtide.planning.check.points import Points
from lowtide.planning.check.program import TOLERANCE, Program, closed, cut
from lowtide.planning.check.replay import RUNS, Board
from lowtide.planning.graph import Graph
from lowtide.planning.status import Status

SECONDS = 1e-9
"""Relative tolerance for sums of seconds."""
_NONE_WITHOUT_A_PLAN = ("peak_bytes", "host_peak_bytes", "moved_bytes", "seconds", "wait_seconds", "extra_fraction")
_OPTIMAL = 1.1e-9
"""Share of the graph's seconds by which an optimal plan may exceed its bound: a billionth, plus the error of sums."""
_MOST_SEARCHED = 10
"""Largest number of nodes for which a claimed exhaustive search is verified by repeating it."""


class Claims:
    """Checks what a solution claims about a graph, claim by claim."""

    def __init__(self, graph: Graph, solution: Mapping[str, Any]) -> None:
        """Prepare the check; no claim is checked yet.

        Args:
            graph: the graph that was solved.
            solution: the file's content; ``check.check`` has verified the kinds of its fields.
        """
        unit = int(solution["rounding_bytes"])
        self.points = Points(graph.rounded(unit) if unit > 1 else graph, fixed=solution["order"] == "fixed")
        self.solution = solution
        self.wrong: list[str] = []

    def claim(self, holds: bool, text: str) -> None:
        """Record ``text`` as an error unless the claim holds."""
        if not holds:
            self.wrong.append(text)

    def run(self) -> list[str]:
        """Check all claims and return the errors."""
        s = self.solution
        status, budget = s["status"], s.get("budget_bytes")
        base = math.fsum(n.seconds for n in self.points.graph.nodes if not n.resident)
        self.claim(
            math.isclose(s["base_seconds"], base, rel_tol=SECONDS),
            f"base_seconds is {s['base_seconds']}, but running every node once takes {base}",
        )
        self.claim(
            s["given_peak_bytes"] == (given := self.points.given_peak()),
            f"given_peak_bytes is {s['given_peak_bytes']}, but the given order reaches {given}",
        )
        self.peak_bound(s["bound"]["node"], s["bound"]["method"], s["bound"]["peak_bytes"])
        if status in (Status.INFEASIBLE, Status.UNKNOWN):
            told = [key for key in _NONE_WITHOUT_A_PLAN if s.get(key) is not None]
            self.claim(not told and s["schedule"] == [], f"{status} is claimed, but it has {', '.join(told) or 'a schedule'}")
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
        """Check the claim that no schedule fits the budget."""
        bound = self.solution["bound"]
        if bound["extra_method"] != "search":
            self.claim(bound["peak_bytes"] > budget, "infeasible is claimed, but the bound on the peak does not prove it")
            return
        found = self.searched(budget)
        self.claim(found is None, f"infeasible is claimed, but a schedule of {found} s fits the budget")

    def once_each(self) -> None:
        """Check a plan without a budget: the order of the lowest peak, with every operator run once and nothing moved."""
        s = self.solution
        acts = [act for act, _ in s["schedule"]]
        self.claim(not s["bound"]["extra_seconds"], "a bound on extra seconds is claimed, but there is no budget")
        if s["strategy"] != "search":
            self.claim(s["status"] != Status.OPTIMAL, "optimal is claimed, but the plan was not searched for")
            return
        runs = sum(act in RUNS for act in acts)
        self.claim(runs == len(self.points.ops), "an operator runs again, but there is no budget")
        self.claim("offload" not in acts, "a value is offloaded, but there is no budget")
        if s["status"] == Status.OPTIMAL:
            proved = self.points.given_peak() if self.points.fixed else s["bound"]["peak_bytes"]
            self.claim(s["peak_bytes"] <= proved, f"optimal is claimed at {s['peak_bytes']} bytes, but the bound is {proved}")

    def searched(self, budget: int) -> float | None:
        """Seconds of the cheapest schedule within a budget, by exhaustive search; None if there is none."""
        if sum(1 for n in self.points.graph.nodes if not n.resident) > _MOST_SEARCHED:
            self.claim(False, "an exhaustive search is claimed, but the graph is too large for it")
            return None
        return Search(self.points, budget).seconds()

    def peak_bound(self, node: Any, method: str, claimed: int) -> None:
        """Check the bound on the peak of all schedules; without a budget, of all that run every operator once."""
        if method == "stuck":
            proved = self.points.floor(node)
        elif method in ("instant", "order"):
            self.claim(node is not None, f"bound.method is {method}, but bound.node names none")
            proved = 0 if node is None else closed(self.points, self.points.index[node], any_order=method == "order")
        else:
            single = self.solution["budget_bytes"] is None
            self.claim(single, f"bound.method is {method}, which holds for running every operator once, but there is a budget")
            proved = cut(self.points, node)
        self.claim(claimed <= proved, f"bound.peak_bytes is {claimed}, but its node proves {proved}")

    def segments(self, budget: int | None) -> None:
        """Play the schedule under torch's caching allocator, on a device that has ``budget`` bytes (None: unlimited)."""
        device = Device(budget)
        denied = self.denied(device)
        if denied is not None:
            self.claim(False, f"the segments of the {self.solution['allocator']} allocator exceed the budget at move {denied}")
            return
        told = self.solution.get("reserved_bytes")
        self.claim(told == device.peak, f"reserved_bytes is {told}, but the schedule reserves {device.peak}")

    def denied(self, device: Device) -> int | None:
        """Index of the first move at which the device runs out of memory (0 if resident values do not fit); None if none."""
        nodes = self.points.graph.nodes
        pieces: dict[int, Any] = {v: device.allocate(n.bytes) for v, n in enumerate(nodes) if n.resident and n.bytes}
        if None in pieces.values():
            return 0
        for t, (act, name) in enumerate(self.solution["schedule"]):
            v = self.points.index[name]
            if act == "free" and v in pieces:
                device.release(pieces.pop(v))
            if act not in (*RUNS, "fetch"):
                continue
            over = {u for u in (self.points.overwritten(v) if act == "update" else ()) if u in pieces}
            for u in self.points.made[v] if act in RUNS else [v]:
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
            if act in RUNS and nodes[v].workspace_bytes:
                room = device.allocate(nodes[v].workspace_bytes)
                if room is None:
                    return t
                device.release(room)
        return None

    def replay(self, base: float) -> None:
        """Play the schedule and compare its figures with the claimed ones."""
        s = self.solution
        moves = [(act, self.points.index[name]) for act, name in s["schedule"]]
        board = Board(self.points, moves, self.claim)
        for t, (act, v) in enumerate(moves):
            board.move(t, act, v)
        board.end()
        firsts = list(dict.fromkeys(v for act, v in moves if act in RUNS))
        self.claim(not self.points.fixed or firsts == self.points.ops, "first runs do not keep the given order")
        self.claim(board.peak == s["peak_bytes"], f"peak_bytes is {s['peak_bytes']}, but the schedule reaches {board.peak}")
        close = math.isclose(board.clock, s["seconds"], rel_tol=SECONDS, abs_tol=1e-12)
        self.claim(close, f"seconds is {s['seconds']}, but the schedule takes {board.clock}")
        extra = max(0.0, board.clock / base - 1) if base else 0.0
        waits = board.clock - math.fsum(self.points.graph.nodes[v].seconds * n for v, n in board.runs.items())
        least = SECONDS * (base or 1.0)
        figures = (
            ("extra_fraction", extra, SECONDS),
            ("wait_seconds", waits, least),
            ("extra_seconds", max(0.0, board.clock - base), least),
        )
        for key, found, tolerated in figures:
            close = key not in s or math.isclose(found, s[key], rel_tol=TOLERANCE, abs_tol=tolerated)
            self.claim(close, f"{key} is {s.get(key)}, but the schedule's is {found}")
        written = sum(self.points.graph.nodes[v].bytes for act, v in moves if act == "offload")
        for key, bytes_ in (
            ("lowest_peak_bytes", board.peak), ("host_peak_bytes", board.host_peak), ("moved_bytes", written)
        ):
            self.claim(s[key] == bytes_, f"{key} is {s[key]}, but the schedule's is {bytes_}")
        if "decides" in s:
            self.decides(board, s["decides"])
        if "modules" in s:
            self.modules(board, {v for act, v in moves if act == "fetch"})

    def decides(self, board: Board, told: Mapping[str, Any]) -> None:
        """Check ``decides``: a node at which the peak is reached, and the operators that run again."""
        tight = self.points.index[told["tight_node"]]
        self.claim(tight in board.highest, f"{told['tight_node']!r} is claimed to run at the peak, but the peak is elsewhere")
        for row in told["dear"]:
            v = self.points.index[row["node"]]
            again = self.points.graph.nodes[v].seconds * (board.runs[v] - 1)
            self.claim(board.runs[v] > 1, f"{row['node']!r} is claimed to run again, but does not")
            self.claim(math.isclose(row["seconds"], again, rel_tol=SECONDS), f"rerunning {row['node']!r} takes {again} s")
            made = sum(self.points.graph.nodes[u].bytes for u in self.points.made[v])
            self.claim(row["bytes"] == made, f"{row['node']!r} makes {made} bytes, not {row['bytes']}")

    def modules(self, board: Board, fetched: set[int]) -> None:
        """Check ``modules``: per module the bytes that are kept, recomputed and moved, and the seconds of recomputation."""
        sums: dict[str, dict[str, float]] = {}
        for v, node in enumerate(self.points.graph.nodes):
            if node.resident:
                continue
            leader = self.points.leader(v)
            module = node.module or self.points.graph.nodes[leader].module
            row = sums.setdefault(module, {"kept_bytes": 0, "recomputed_bytes": 0, "moved_bytes": 0, "seconds": 0.0})
            again = board.runs[leader] > 1
            row["moved_bytes" if v in fetched else "recomputed_bytes" if again else "kept_bytes"] += node.bytes
            row["seconds"] += node.seconds * max(0, board.runs[v] - 1)
        told = {row["module"]: row for row in self.solution["modules"]}
        self.claim(told.keys() == sums.keys(), "its modules are not the modules of the graph")
        for module in told.keys() & sums.keys():
            for key, value in sums[module].items():
                close = math.isclose(told[module][key], value, rel_tol=SECONDS, abs_tol=1e-12)
                self.claim(close, f"{key} of module {module!r} is {told[module][key]}, but the schedule's is {value}")

    def extra_bound(self, budget: int, base: float) -> None:
        """Check the bound on extra seconds."""
        bound = self.solution["bound"]
        claimed, method = bound["extra_seconds"], bound["extra_method"]
        if claimed <= 0:
            return
        if method == "search" and self.points.graph.offload is not None and self.points.graph.offload.overlap:
            self.claim(False, "an exhaustive search is claimed, but there is none for transfers that overlap")
            return
        if method == "search":
            found = self.searched(budget)
            proved = math.inf if found is None else max(0.0, found - base)
        elif method == "none":
            proved = 0.0
        else:
            proved = self.program(budget, base or 1.0, claimed)
        self.claim(
            claimed <= proved * (1 + TOLERANCE) + 1e-9 * base, f"bound.extra_seconds is {claimed}, {method} proves {proved}"
        )

    def extra_time(self, budget: int, base: float) -> None:
        """Check the bound on extra seconds against the plan and the status."""
        s, claimed = self.solution, self.solution["bound"]["extra_seconds"]
        extra = max(0.0, s["seconds"] - base)
        self.claim(
            claimed <= extra * (1 + TOLERANCE) + SECONDS * max(1.0, base),
            f"the bound {claimed} s is above the plan's own {extra} s",
        )
        if s["status"] == "optimal":
            self.claim(
                math.isclose(claimed, extra, rel_tol=SECONDS, abs_tol=_OPTIMAL * base),
                f"optimal is claimed, but the bound is {claimed} s and the plan adds {extra} s",
            )
        self.extra_bound(budget, base)

    def program(self, budget: int, base: float, claimed: float) -> float:
        """Set up and solve a bound's program again, only relaxed if that proves the claimed seconds; returns seconds."""
        found, told = Program(self.points, budget, base), self.solution["bound"]
        if told["extra_method"] == "instants":
            found.all_instants()
        else:
            at = [self.points.index[x] for x in told["instants"]]
            follow = all(v in self.points.place for v in at)
            follow = follow and all(a in self.points.around(b)[0] for a, b in itertools.pairwise(at))
            self.claim(follow, "the bound's instants are not operators that first run one after the other in every schedule")
            if not follow:
                return 0.0
            if told["extra_method"] == "order":
                self.claim(len(at) == 1, "the bound over all orders must have one instant")
                found.any_order(at[0])
                return found.solve(claimed / base) * base
            found.several(at)
            found.windows(at, [(start, end, self.points.index[x]) for start, end, x in told.get("windows", ())])
        return found.solve(claimed / base) * base
