"""Plays a schedule move by move: the checker's own implementation of the game's rules.

The board is a set, and its bytes are summed again at every move: the code favors clarity over speed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from lowtide.planning.check.points import Points

RUNS: Final = ("compute", "update")
"""Acts that run an operator."""


class Board:
    """The state of both boards while a schedule is played; sums are recomputed at every move."""

    def __init__(self, points: Points, moves: list[tuple[str, int]], claim: Callable[[bool, str], None]) -> None:
        """Set up a board that holds only the resident values.

        Args:
            points: the graph's program points.
            moves: the schedule, as pairs of an act and a node.
            claim: called for each rule with whether it holds, and the error if it does not.
        """
        self.points = points
        self.nodes = points.graph.nodes
        self._claim = claim
        self.resident = {v for v, n in enumerate(self.nodes) if n.resident}
        self.board: set[int] = set()
        self.host: set[int] = set()
        self.runs = dict.fromkeys(range(len(self.nodes)), 0)
        self.last = {v: t for t, (act, v) in enumerate(moves) if act in RUNS}
        self.last_fetch = {v: t for t, (act, v) in enumerate(moves) if act == "fetch"}
        self.clock = self.out_free = self.in_free = 0.0
        self.written: dict[int, float] = {}
        self.ready: dict[int, float] = {}
        self.peak, self.host_peak = sum(self.nodes[v].bytes for v in self.resident), 0
        self.highest: set[int] = set()

    def claim(self, holds: bool, t: int, text: str) -> None:
        """Claim that a rule holds at move ``t``; ``text`` is the error if it does not."""
        self._claim(holds, f"move {t}: {text}")

    def move(self, t: int, act: str, v: int) -> None:
        """Play one move."""
        node = self.nodes[v]
        before = self.bytes_now(t, v, act)
        inside = 0
        if act in RUNS:
            self.compute(t, act, v)
            inside = node.workspace_bytes
        elif act == "free":
            self.free(t, v)
        elif act in ("offload", "fetch"):
            self.transfer(t, act, v)
        else:
            self.claim(False, t, f"{act!r} is not an action")
        during = before if act == "free" else self.bytes_now(t, v, act) + inside
        if during > self.peak:
            self.peak, self.highest = during, set()
        if during == self.peak:
            self.highest.add(v)
        if act == "fetch" and self.last_fetch[v] == t:
            self.host.discard(v)
            self.written.pop(v, None)

    def bytes_now(self, t: int, v: int, act: str) -> int:
        """Bytes on the board now, before or after move ``t``, resident values and held states included."""
        states = sum(n.state_bytes for u, n in enumerate(self.nodes) if n.state_bytes and self.runs[u] and self.last[u] > t)
        if act in RUNS and self.runs[v] > 1 and self.last[v] == t:
            states += self.nodes[v].state_bytes
        return sum(self.nodes[u].bytes for u in self.board | self.resident) + states

    def compute(self, t: int, act: str, v: int) -> None:
        """Run an operator."""
        node, made = self.nodes[v], self.points.made[v]
        self.claim(not node.resident and node.made_with is None, t, f"{node.id!r} is not an operator")
        self.claim(node.recompute or not self.runs[v], t, f"{node.id!r} may not run again")
        for p in self.points.needed[v]:
            self.claim(p in self.board or p in self.resident, t, f"{self.nodes[p].id!r} is not in memory for {node.id!r}")
            self.clock = max(self.clock, self.ready.get(p, 0.0))
        self.claim(not self.board.intersection(made), t, f"{node.id!r} is already in memory")
        if act == "update":
            olds = self.points.overwritten(v)
            self.claim(bool(olds), t, f"{node.id!r} overwrites nothing")
            for old in olds:
                self.claim(old in self.board, t, f"the value that {node.id!r} overwrites is not in memory")
                self.let_go(t, old, by=v)
        self.board.update(made)
        self.runs[v] += 1
        self.clock += node.seconds

    def let_go(self, t: int, v: int, *, by: int = -1) -> None:
        """Take a value off the board; a held one only after its ``held_until`` has run, or if that (``by``) overwrites it."""
        until = self.nodes[v].held_until
        if until is not None and self.points.leader(until) != by:
            ran = self.runs[self.points.leader(until)] > 0
            self.claim(ran, t, f"{self.nodes[v].id!r} is held until {self.nodes[until].id!r} has run")
        self.clock = max(self.clock, self.written.get(v, 0.0), self.ready.pop(v, 0.0))
        self.board.discard(v)

    def free(self, t: int, v: int) -> None:
        """Free a value."""
        node = self.nodes[v]
        self.claim(v in self.board, t, f"{node.id!r} is not in memory")
        self.let_go(t, v)

    def transfer(self, t: int, act: str, v: int) -> None:
        """Offload or fetch a value."""
        node, offload = self.nodes[v], self.points.graph.offload
        self.claim(offload is not None and node.move and not node.resident, t, f"{node.id!r} may not be offloaded")
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
        self.claim(offload.host_bytes is None or held <= offload.host_bytes, t, f"{held} offloaded bytes exceed the limit")

    def end(self) -> None:
        """Check what must hold after the last move."""
        self.clock = max([self.clock, *(self.ready.get(v, 0.0) for v in self.board)])
        for v, n in enumerate(self.nodes):
            self._claim(n.resident or n.made_with is not None or self.runs[v] > 0, f"{n.id!r} is never computed")
            self._claim(not n.keep or n.resident or v in self.board, f"{n.id!r} is not in memory at the end")
