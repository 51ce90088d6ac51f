"""Exhaustive search of small graphs: the cheapest schedule within a budget, orders of extreme peak."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Iterable
from itertools import count
from typing import NamedTuple

from lowtide.base.errors import GraphError
from lowtide.planning.graph import Graph
from lowtide.planning.schedule import Act, Move, Row

MOST_NODES = 10
"""Largest number of nodes for which all schedules are searched."""


def small(graph: Graph) -> bool:
    """Whether :func:`search` applies: few nodes, and no bytes or seconds that depend on later moves."""
    if all(n.resident for n in graph.nodes):
        return True
    plain = all(not n.state_bytes for n in graph.nodes)
    serial = graph.offload is None or (not graph.offload.overlap and graph.offload.host_bytes is None)
    return plain and serial and sum(1 for n in graph.nodes if not n.resident) <= MOST_NODES


MOST_FOR_ORDERS = 16
"""Largest number of operators for which all orders are searched."""


def extreme_order(graph: Graph, *, worst: bool = False) -> tuple[int, ...]:
    """The order of the lowest peak (or the highest, if every value is freed after its last use), every operator once.

    Visits all sets of operators that can have run, so the graph must be small.

    Raises:
        GraphError: if the graph has more than ``MOST_FOR_ORDERS`` operators.
    """
    ops = [v for v in graph.order if graph.nodes[v].made_with is None and not graph.nodes[v].resident]
    if len(ops) > MOST_FOR_ORDERS:
        raise GraphError(f"all orders are tried up to {MOST_FOR_ORDERS} operators, but this graph has {len(ops)}")
    leader = {u: v for v in ops for u in (v, *graph.members[v])}
    needs = {v: {leader[p] for p in graph.reads[v] if not graph.nodes[p].resident} for v in ops}
    best: dict[frozenset[int], tuple[int, tuple[int, ...]]] = {frozenset(): (0, ())}
    pick = max if worst else min
    for _ in ops:
        after: dict[frozenset[int], tuple[int, tuple[int, ...]]] = {}
        for done, (high, order) in best.items():
            for v in ops:
                if v in done or not needs[v] <= done:
                    continue
                now = (*order, v)
                timeline = _bytes_of_last(graph, now)
                key = done | {v}
                step = (max(high, timeline), now)
                after[key] = pick(after[key], step) if key in after else step
        best = after
    return best[frozenset(ops)][1]


def _bytes_of_last(graph: Graph, order: tuple[int, ...]) -> int:
    """Bytes while the last operator of a partial order runs, with every value freed that no later operator reads."""
    done = set(order)
    v = order[-1]
    live = {v, *graph.members[v]}
    for o in order[:-1]:
        for u in (o, *graph.members[o]):
            ahead = any(c not in done or c == v for c in _readers(graph, u))
            if ahead or graph.nodes[u].keep:
                live.add(u)
    olds = graph.olds[v]
    if not any(graph.nodes[u].keep or any(c not in done for c in _readers(graph, u)) for u in olds):  # else it is not in place
        live -= set(olds)
    return graph.resident_bytes + sum(graph.nodes[u].bytes for u in live) + graph.nodes[v].workspace_bytes


def _readers(graph: Graph, u: int) -> list[int]:
    return [c for c, reads in enumerate(graph.reads) if u in reads]


class _State(NamedTuple):
    """Sets of nodes, as bits: those on the board, those whose operators have run, those on the second board."""

    board: int
    done: int
    written: int


def search(graph: Graph, budget_bytes: int, *, fixed: bool, deadline: float = math.inf) -> Row | None:
    """The row of fewest seconds within the budget, by Dijkstra over all states of the boards; None if no schedule fits.

    Raises:
        TimeoutError: at the deadline (of :func:`time.monotonic`).
    """
    rules = _Rules(graph, budget_bytes, fixed)
    start = _State(0, 0, 0)
    best: dict[_State, float] = {start: 0.0}
    came: dict[_State, tuple[_State, Move | None]] = {}
    tie = count()
    queue = [(0.0, next(tie), start)]
    while queue:
        seconds, _, state = heapq.heappop(queue)
        if seconds > best[state]:
            continue
        if time.monotonic() > deadline:
            raise TimeoutError("the time limit was reached before all schedules were tried")
        if rules.finished(state):
            return _walk_back(came, state)
        for move, after, cost in rules.moves(state):
            total = seconds + cost
            if total < best.get(after, float("inf")):
                best[after] = total
                came[after] = (state, move)
                heapq.heappush(queue, (total, next(tie), after))
    return None


def _walk_back(came: dict[_State, tuple[_State, Move | None]], state: _State) -> Row:
    moves: list[Move] = []
    while state in came:
        state, move = came[state]
        if move is not None and move.act in (Act.COMPUTE, Act.FETCH):
            moves.append(move)
    return tuple(reversed(moves))


class _Rules:
    def __init__(self, graph: Graph, budget: int, fixed: bool) -> None:
        self.graph = graph
        self.budget = budget
        nodes = graph.nodes
        self.ops = [v for v in graph.order if nodes[v].made_with is None and not nodes[v].resident]
        self.made = {v: self._mask((v, *graph.members[v])) for v in self.ops}
        self.reads = {v: self._mask(p for p in graph.reads[v] if not nodes[p].resident) for v in self.ops}
        self.before = {v: (1 << self.ops[i - 1] if fixed and i else 0) for i, v in enumerate(self.ops)}
        self.all = self._mask(self.ops)
        self.keep = self._mask(v for v, n in enumerate(nodes) if n.keep and not n.resident)

    @staticmethod
    def _mask(nodes: Iterable[int]) -> int:
        found = 0
        for v in nodes:
            found |= 1 << v
        return found

    def bytes(self, board: int) -> int:
        return self.graph.resident_bytes + sum(n.bytes for v, n in enumerate(self.graph.nodes) if board >> v & 1)

    def finished(self, state: _State) -> bool:
        return state.done & self.all == self.all and state.board & self.keep == self.keep

    def held(self, v: int, state: _State, *, at: int = -1) -> bool:
        """Whether the script still holds a value; running its ``held_until`` node (``at``) releases it."""
        until = self.graph.nodes[v].held_until
        if until is None or self.graph.leader(until) == at:
            return False
        return not state.done >> self.graph.leader(until) & 1

    def moves(self, state: _State) -> list[tuple[Move | None, _State, float]]:
        found: list[tuple[Move | None, _State, float]] = []
        board2 = self.graph.offload
        for v, node in enumerate(self.graph.nodes):
            bit = 1 << v
            if state.board & bit:
                if not self.held(v, state):
                    found.append((None, state._replace(board=state.board & ~bit), 0.0))
                if board2 is not None and node.move and node.bytes and not state.written & bit:
                    cost = node.bytes / board2.write_bytes_per_second
                    found.append((None, state._replace(written=state.written | bit), cost))
            elif board2 is not None and state.written & bit:
                after = state._replace(board=state.board | bit)
                if self.bytes(after.board) <= self.budget:
                    found.append((Move(Act.FETCH, v), after, node.bytes / board2.read_bytes_per_second))
        for v in self.ops:
            found += self._compute(v, state)
        return found

    def _compute(self, v: int, state: _State) -> list[tuple[Move | None, _State, float]]:
        node = self.graph.nodes[v]
        again = bool(state.done >> v & 1)
        if (again and not node.recompute) or state.board & self.made[v] or state.board & self.reads[v] != self.reads[v]:
            return []
        if not again and self.before[v] and not state.done & self.before[v]:
            return []
        found: list[tuple[Move | None, _State, float]] = []
        places = [state.board]
        if self.graph.olds[v] and not any(self.held(old, state, at=v) for old in self.graph.olds[v]):
            places.append(state.board & ~self._mask(self.graph.olds[v]))
        for left in places:
            board = left | self.made[v]
            if self.bytes(board) + node.workspace_bytes <= self.budget:
                after = state._replace(board=board, done=state.done | 1 << v)
                found.append((Move(Act.COMPUTE, v), after, node.seconds))
        return found
