"""What holds in every schedule when an operator first runs, derived from the graph alone.

A *program point* is the moment at which an operator runs for the first time.
"""

from __future__ import annotations

import math
from typing import Any

from lowtide.planning.graph import Graph


class UnknownNode(Exception):
    """A solution names a node that the graph does not have."""


class Index(dict[Any, int]):
    """Indices of nodes by name."""

    def __missing__(self, name: Any) -> int:
        """Raise for an unknown name.

        Raises:
            UnknownNode: with the name as its argument.
        """
        raise UnknownNode(name)


class Points:
    """A graph's operators in order, with the nodes that each of them reads, computes and overwrites.

    Attributes:
        ops: operators in the given order.
        place: per operator, its index in that order.
        needed: per node, the nodes that it reads.
        readers: per node, the operators that read it.
        made: per operator, the nodes that one run of it computes.
    """

    def __init__(self, graph: Graph, *, fixed: bool) -> None:
        """Index a graph.

        Args:
            graph: operators and values.
            fixed: whether first runs keep the given order; otherwise any order is allowed.
        """
        self.graph = graph
        self.fixed = fixed
        self.index = Index((n.id, v) for v, n in enumerate(graph.nodes))
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

    def _needed(self, v: int) -> set[int]:
        """The nodes that a node reads: its parents, and the storages of those that are views."""
        found = set(self.graph.nodes[v].parents)
        for p in self.graph.nodes[v].parents:
            bottom = p
            while (below := self.graph.nodes[bottom].view_of) is not None:
                bottom = below
            found.add(bottom)
        return found

    def leader(self, v: int) -> int:
        """The operator that computes a node."""
        above = self.graph.nodes[v].made_with
        return v if above is None else above

    def around(self, op: int) -> tuple[set[int], set[int]]:
        """Operators that run before ``op``'s first run in every schedule, and those that first run after it in every one."""
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

    def must_be_resident(self, op: int, before: set[int], after: set[int]) -> set[int]:
        """Values that are on the board at a program point in every schedule."""
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

    def overwritten(self, op: int) -> set[int]:
        """Values that an operator overwrites."""
        return {old for u in self.made[op] if (old := self.graph.nodes[u].overwrites) is not None}

    def least(self, op: int, present: set[int]) -> int:
        """Bytes while an operator runs, in place if it can, with ``present`` on the board besides what it computes."""
        nodes = self.graph.nodes
        made = set(self.made[op])
        there = (present - self.overwritten(op)) | made | {v for v, n in enumerate(nodes) if n.resident}
        return sum(nodes[u].bytes for u in there) + nodes[op].workspace_bytes

    def floor(self, node: Any) -> int:
        """Bytes on the board in every schedule when a node first runs; for None, at the end."""
        resident = sum(n.bytes for n in self.graph.nodes if n.resident)
        if node is None:  # the end
            return resident + sum(n.bytes for n in self.graph.nodes if n.keep and not n.resident)
        op = self.index[node]
        return max(resident, self.least(op, self.must_be_resident(op, *self.around(op))))

    def wanted(self, op: int, before: set[int], after: set[int]) -> set[int]:
        """Values that are computed before an operator first runs and are read by it or later."""
        later = {v for v, n in enumerate(self.graph.nodes) if n.keep or self.readers[v] & after}
        made = {v for v, n in enumerate(self.graph.nodes) if not n.resident and self.leader(v) in before}
        return made & (later | self.needed[op])

    def given_peak(self) -> int:
        """Peak bytes of the given order if every value is freed after its last use."""
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
            olds = self.overwritten(op)
            if all(last[old] <= at for old in olds):
                there -= olds
            there.update(self.made[op])
            highest = max(highest, resident + sum(nodes[v].bytes for v in there) + nodes[op].workspace_bytes)
        return highest
