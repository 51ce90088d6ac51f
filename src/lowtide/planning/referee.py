"""Plays a schedule under the rules of the game; the planner's only judge of schedules.

The rules:

* ``compute`` needs every value that the node reads on the board (reading a view also needs the storage that it views), and
  waits until fetched ones have arrived. While it runs, everything on the board counts, including its own values and workspace.
* ``update`` is ``compute`` in the storages of the nodes that it overwrites: the old values leave the board, and their bytes
  are not counted twice.
* ``free`` takes a value off the board. A value that the script holds (``held_until``) may neither be freed nor be overwritten
  before that node has run; that node itself may overwrite it. A value marked ``keep`` must be on the board at the end.
* ``offload`` copies a value to the second board, ``fetch`` copies it back; each has a channel of its own. If transfers overlap
  with computation, freeing a value waits until its copy is complete, and a fetched value's bytes count from the request on.
* A node that may not be recomputed runs at most once; every node runs at least once. A node with ``state_bytes`` that runs
  more than once holds them from its first run to its last.
* A copy on the second board occupies it from the offload to the last fetch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lowtide.base.errors import StructureError
from lowtide.planning.graph import Graph, Offload
from lowtide.planning.schedule import Act, Move, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The outcome of playing a schedule.

    Attributes:
        bytes_at: per move, the most bytes on the board during it.
        host_bytes_at: per move, bytes on the second board.
        seconds: from the first move to the end of the last.
        wait_seconds: seconds that no operator ran because of transfers; part of ``seconds``.
        runs: per node, how often it was computed.
        moved_bytes: bytes written to the second board.
        resident_bytes: bytes that are always on the board.
    """

    bytes_at: NDArray[np.int64]
    host_bytes_at: NDArray[np.int64]
    seconds: float
    wait_seconds: float
    runs: tuple[int, ...]
    moved_bytes: int
    resident_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Peak bytes on the board."""
        return int(self.bytes_at.max(initial=self.resident_bytes))

    @property
    def host_peak_bytes(self) -> int:
        """Peak bytes on the second board."""
        return int(self.host_bytes_at.max(initial=0))

    @property
    def peak_move(self) -> int:
        """Index of the move at which the board peaks."""
        return int(self.bytes_at.argmax())


def play(graph: Graph, schedule: Schedule) -> Timeline:
    """Play a schedule.

    Raises:
        StructureError: names the first move that breaks a rule, or what is missing at the end.
    """
    game = _Game(graph, schedule)
    for t, move in enumerate(schedule):
        game.move(t, move)
    return game.finish()


class _Game:
    def __init__(self, graph: Graph, schedule: Schedule) -> None:
        self.graph = graph
        self.board: set[int] = set()
        self.live = graph.resident_bytes
        self.host_live = 0
        self.bytes_at = np.zeros(len(schedule), dtype=np.int64)
        self.host_at = np.zeros(len(schedule), dtype=np.int64)
        self.clock = self.computing = 0.0
        self.out_free = self.in_free = 0.0
        self.ready: dict[int, float] = {}
        self.written: dict[int, float] = {}
        self.runs = [0] * len(graph.nodes)
        self.moved = 0
        self.last_fetch: dict[int, int] = {}
        self.last_run: dict[int, int] = {}
        for t, (act, v) in enumerate(schedule):
            if act is Act.FETCH:
                self.last_fetch[v] = t
            elif act in (Act.COMPUTE, Act.UPDATE):
                self.last_run[v] = t

    def wrong(self, t: int, move: Move, why: str) -> StructureError:
        return StructureError(f"move {t}, {move.act} {self.graph.nodes[move.node].id!r}: {why}")

    def move(self, t: int, move: Move) -> None:
        match move.act:
            case Act.COMPUTE | Act.UPDATE:
                self.compute(t, move)
            case Act.FREE:
                self.free(t, move)
            case Act.OFFLOAD:
                self.offload(t, move)
            case Act.FETCH:
                self.fetch(t, move)
        self.host_at[t] = self.host_live
        if move.act is Act.FETCH and self.last_fetch[move.node] == t:
            self.host_live -= self.graph.nodes[move.node].bytes
            del self.written[move.node]

    def compute(self, t: int, move: Move) -> None:
        v = move.node
        node = self.graph.nodes[v]
        if node.resident or node.made_with is not None:
            raise self.wrong(t, move, "it is not an operator of its own")
        if self.runs[v] and not node.recompute:
            raise self.wrong(t, move, "it may not run again")
        for p in self.graph.reads[v]:
            if p not in self.board and not self.graph.nodes[p].resident:
                raise self.wrong(t, move, f"{self.graph.nodes[p].id!r} is not in memory")
            self.clock = max(self.clock, self.ready.get(p, 0.0))
        made = (v, *self.graph.members[v])
        if any(u in self.board for u in made):
            raise self.wrong(t, move, "its value is already in memory: free it first")
        if move.act is Act.UPDATE:
            if not self.graph.olds[v]:
                raise self.wrong(t, move, "it overwrites nothing")
            for old in self.graph.olds[v]:
                self.leave(t, move, old)
        if node.state_bytes and not self.runs[v] and self.last_run[v] != t:
            self.live += node.state_bytes
        self.live += sum(self.graph.nodes[u].bytes for u in made)
        self.board.update(made)
        self.bytes_at[t] = self.live + node.workspace_bytes
        if node.state_bytes and self.runs[v] and self.last_run[v] == t:
            self.live -= node.state_bytes
        self.runs[v] += 1
        self.clock += node.seconds
        self.computing += node.seconds

    def leave(self, t: int, move: Move, v: int) -> None:
        node = self.graph.nodes[v]
        if v not in self.board:
            raise self.wrong(t, move, f"{node.id!r} is not in memory")
        until = node.held_until
        if until is not None and not self.runs[self.graph.leader(until)] and self.graph.leader(until) != move.node:
            raise self.wrong(t, move, f"{node.id!r} is held until {self.graph.nodes[until].id!r} has run")
        self.clock = max(self.clock, self.written.get(v, 0.0), self.ready.get(v, 0.0))
        self.board.discard(v)
        self.ready.pop(v, None)
        self.live -= node.bytes

    def free(self, t: int, move: Move) -> None:
        self.bytes_at[t] = self.live
        self.leave(t, move, move.node)

    def board2(self, t: int, move: Move) -> Offload:
        if self.graph.offload is None or not self.graph.nodes[move.node].move or self.graph.nodes[move.node].resident:
            raise self.wrong(t, move, "it may not be offloaded")
        return self.graph.offload

    def offload(self, t: int, move: Move) -> None:
        board2, v = self.board2(t, move), move.node
        if v not in self.board:
            raise self.wrong(t, move, "it is not in memory")
        if v in self.written:
            raise self.wrong(t, move, "it is already offloaded")
        size = self.graph.nodes[v].bytes
        start = max(self.clock, self.out_free, self.ready.get(v, 0.0))
        self.written[v] = self.out_free = start + size / board2.write_bytes_per_second
        if not board2.overlap:
            self.clock = self.out_free
        self.moved += size
        self.host_live += size
        if board2.host_bytes is not None and self.host_live > board2.host_bytes:
            raise self.wrong(t, move, f"{self.host_live} bytes would be offloaded, above the limit of {board2.host_bytes}")
        self.bytes_at[t] = self.live

    def fetch(self, t: int, move: Move) -> None:
        board2, v = self.board2(t, move), move.node
        if v not in self.written:
            raise self.wrong(t, move, "it is not offloaded")
        if v in self.board:
            raise self.wrong(t, move, "it is already in memory")
        size = self.graph.nodes[v].bytes
        start = max(self.clock, self.in_free, self.written[v])
        self.ready[v] = self.in_free = start + size / board2.read_bytes_per_second
        if not board2.overlap:
            self.clock = self.in_free
        self.live += size
        self.board.add(v)
        self.bytes_at[t] = self.live

    def finish(self) -> Timeline:
        for v, node in enumerate(self.graph.nodes):
            if not node.resident and node.made_with is None and not self.runs[v]:
                raise StructureError(f"{node.id!r} is never computed")
            if node.keep and not node.resident and v not in self.board:
                raise StructureError(f"{node.id!r} must be in memory at the end")
        self.clock = max(self.clock, *(self.ready.get(v, 0.0) for v in self.board), 0.0)
        return Timeline(
            bytes_at=self.bytes_at,
            host_bytes_at=self.host_at,
            seconds=self.clock,
            wait_seconds=self.clock - self.computing,
            runs=tuple(self.runs),
            moved_bytes=self.moved,
            resident_bytes=self.graph.resident_bytes,
        )
