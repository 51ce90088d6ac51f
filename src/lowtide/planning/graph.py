"""A graph to be pebbled: operators with bytes and seconds, read from networkx node-link JSON.

A node is an operator and the value that it makes. What a plain graph does not have is an attribute that may be left out:
see :class:`Node` for their names in the file, which are the fields' names (``parents`` are the file's links).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

Id = int | str
LARGEST_BYTES = 1 << 52
"""Sums of bytes stay exact in double precision below this; no machine has as much."""
TOLD_BITS = 128
"""Numbers that take more are not printed."""
MOST_SECONDS = 1e15
"""No operator runs for thirty million years; sums of such seconds stay finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One operator and the value that it makes.

    Attributes:
        id: its name in the file.
        bytes: size of its value.
        seconds: to run it once.
        parents: indices of the nodes whose values it reads.
        workspace_bytes: taken inside the operator, on top of its value.
        state_bytes: held from its first run to its last where it runs more than once (a random generator's state).
        made_with: index of the node whose operator makes this value too (an operator of several outputs); its own
            seconds are 0 and it has no parents of its own.
        view_of: index of the node whose storage it looks into; it has no bytes of its own, and reading it needs that storage.
        overwrites: index of the node whose storage it takes over when it (its operator) is computed in place (``update``).
        resident: always on the board; never computed, never freed.
        recompute: whether it may run more than once.
        move: whether its value may go to the second board.
        keep: whether its value must be on the board at the end.
        held_until: index of the node after whose first run the value may be freed at the earliest (a script holds it).
        module: where in the model it runs, for reports.
    """

    id: Id
    bytes: int
    seconds: float
    parents: tuple[int, ...] = ()
    workspace_bytes: int = 0
    state_bytes: int = 0
    made_with: int | None = None
    view_of: int | None = None
    overwrites: int | None = None
    resident: bool = False
    recompute: bool = True
    move: bool = True
    keep: bool = False
    held_until: int | None = None
    module: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """The second board.

    Attributes:
        write_bytes_per_second, read_bytes_per_second: of its two channels.
        host_bytes: how much it holds; None for no limit.
        overlap: whether transfers run beside computing (CUDA streams) or in its place (a file's copy on the CPU).
    """

    write_bytes_per_second: float
    read_bytes_per_second: float
    host_bytes: int | None = None
    overlap: bool = False


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Nodes, parents before children in ``order``.

    Attributes:
        nodes: in the file's order.
        order: indices of the nodes in the given order; a node made with another comes right after it.
        name: what the file calls it.
        offload: the second board; None where nothing may be moved.
    """

    nodes: tuple[Node, ...]
    order: tuple[int, ...]
    name: str = ""
    offload: Offload | None = None

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Per node, who reads its value."""
        found: list[list[int]] = [[] for _ in self.nodes]
        for v, node in enumerate(self.nodes):
            for p in node.parents:
                found[p].append(v)
        return tuple(tuple(c) for c in found)

    @cached_property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """Per node, the nodes that are made with it."""
        found: list[list[int]] = [[] for _ in self.nodes]
        for v, node in enumerate(self.nodes):
            if node.made_with is not None:
                found[node.made_with].append(v)
        return tuple(tuple(m) for m in found)

    @cached_property
    def olds(self) -> tuple[tuple[int, ...], ...]:
        """Per node, the nodes whose storages its operator takes over in place."""
        return tuple(
            tuple(o for u in (v, *self.members[v]) if (o := self.nodes[u].overwrites) is not None)
            if node.made_with is None
            else ()
            for v, node in enumerate(self.nodes)
        )

    def leader(self, v: int) -> int:
        """The node whose operator makes a node's value."""
        above = self.nodes[v].made_with
        return v if above is None else above

    def storage(self, v: int) -> int:
        """The node whose storage a node's value lies in."""
        above = self.nodes[v].view_of
        while above is not None:
            v, above = above, self.nodes[above].view_of
        return v

    @cached_property
    def reads(self) -> tuple[tuple[int, ...], ...]:
        """Per node, all values that must be on the board to compute it: parents, and the storages that views look into."""
        return tuple(tuple(dict.fromkeys(q for p in node.parents for q in self._with_storage(p))) for node in self.nodes)

    def _with_storage(self, p: int) -> tuple[int, ...]:
        root = self.storage(p)
        return (p,) if root == p else (p, root)

    @cached_property
    def resident_bytes(self) -> int:
        """Bytes that are on the board from beginning to end."""
        return sum(n.bytes for n in self.nodes if n.resident)

    @cached_property
    def base_seconds(self) -> float:
        """Every operator once."""
        return math.fsum(n.seconds for n in self.nodes if not n.resident)

    def rounded(self, unit: int) -> Graph:
        """The same graph for an allocator that hands out blocks of ``unit`` bytes."""

        def up(size: int) -> int:
            return -(-size // unit) * unit

        nodes = tuple(
            replace(n, bytes=up(n.bytes), workspace_bytes=up(n.workspace_bytes), state_bytes=up(n.state_bytes))
            for n in self.nodes
        )
        return replace(self, nodes=nodes)
