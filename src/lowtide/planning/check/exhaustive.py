"""Finds the cheapest schedule of a small graph within a budget: Dijkstra over all states of the game."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

from lowtide.planning.check.points import Points


class Search:
    """Searches all schedules of a small graph within a budget.

    A state is three bit sets: nodes on the board, nodes on the second board, and nodes whose operators have run.
    """

    def __init__(self, points: Points, budget: int) -> None:
        """Set up the search in the graph of ``points``, within a budget in bytes."""
        self.points = points
        self.nodes = points.graph.nodes
        self.offload = points.graph.offload
        self.budget = budget - sum(n.bytes for n in self.nodes if n.resident)
        self.loose = [v for v, n in enumerate(self.nodes) if not n.resident]

    def seconds(self) -> float | None:
        """Seconds of the cheapest schedule; None if none fits."""
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
        return kept and all(ran >> op & 1 for op in self.points.ops)

    def _bytes(self, board: int) -> int:
        return sum(self.nodes[v].bytes for v in self.loose if board >> v & 1)

    def _next(self, state: tuple[int, int, int]) -> Iterator[tuple[tuple[int, int, int], float]]:
        board, host, ran = state
        nodes, offload = self.nodes, self.offload
        for v in self.loose:
            bit, until = 1 << v, nodes[v].held_until
            if board & bit:
                if until is None or ran >> self.points.leader(until) & 1:
                    yield (board & ~bit, host, ran), 0.0
                if offload is not None and nodes[v].move and not host & bit:
                    yield (board, host | bit, ran), nodes[v].bytes / offload.write_bytes_per_second
            elif offload is not None and host & bit and self._bytes(board | bit) <= self.budget:
                yield (board | bit, host, ran), nodes[v].bytes / offload.read_bytes_per_second
        for op in self.points.ops:
            yield from self._runs(op, state)

    def _runs(self, op: int, state: tuple[int, int, int]) -> Iterator[tuple[tuple[int, int, int], float]]:
        board, host, ran = state
        nodes, points = self.nodes, self.points
        again = ran >> op & 1
        waits = points.fixed and not again and any(not ran >> o & 1 for o in points.ops[: points.place[op]])
        reads = all(nodes[p].resident or board >> p & 1 for p in points.needed[op])
        if waits or not reads or (again and not nodes[op].recompute) or any(board >> u & 1 for u in points.made[op]):
            return
        olds = sum(1 << old for old in points.overwritten(op))
        made = sum(1 << u for u in points.made[op])
        free = {None, op} | {o for o in points.ops if ran >> o & 1}
        until = [nodes[v].held_until for v in points.overwritten(op)]
        held = any(u is not None and points.leader(u) not in free for u in until)
        for left in {board, board & ~olds} if olds & board == olds and not held else {board}:
            if self._bytes(left | made) + nodes[op].workspace_bytes <= self.budget:
                yield (left | made, host, ran | 1 << op), nodes[op].seconds
