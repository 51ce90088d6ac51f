"""The graph that the pebble game is played on: operators with bytes and seconds, from networkx node-link JSON.

A node is an operator and the value that it computes. Everything beyond a plain graph is an optional attribute. Its name in the
file is the name of the field of :class:`Node` (``parents`` are the file's links).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

Id = int | str
LARGEST_BYTES = 1 << 52
"""Below this, sums of bytes are exact in double precision; no machine has this much memory."""
TOLD_BITS = 128
"""Integers of this many bits or more are not printed in error messages."""
MOST_SECONDS = 1e15
"""Upper limit for an operator's seconds: thirty million years. Sums of such seconds stay finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One operator and the value that it computes.

    Attributes:
        id: name in the file.
        bytes: size of the value.
        seconds: time of one run.
        parents: indices of the nodes whose values the operator reads.
        workspace_bytes: bytes that the operator allocates while it runs, in addition to its value.
        state_bytes: bytes held from the first run to the last if the operator runs more than once (the state of a random
            generator).
        made_with: index of the node whose operator also computes this value (an operator with several outputs). Such a node
            has 0 seconds and no parents of its own.
        view_of: index of the node whose storage this value is a view of. A view has no bytes of its own, and reading it
            requires that storage on the board.
        overwrites: index of the node whose storage this value takes over when its operator runs in place (``update``).
        resident: always on the board; never computed, never freed.
        recompute: whether the operator may run more than once.
        move: whether the value may be offloaded to the second board.
        keep: whether the value must be on the board at the end.
        held_until: index of the node that must have run once before the value may be freed (the script holds the value).
        module: the module in which the operator runs, for reports.
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
    """The second board, to which values are offloaded.

    Attributes:
        write_bytes_per_second, read_bytes_per_second: speeds of its two channels.
        host_bytes: its capacity; None for no limit.
        overlap: whether transfers run concurrently with computation (CUDA streams) or block it (a CPU that copies to a file).
    """

    write_bytes_per_second: float
    read_bytes_per_second: float
    host_bytes: int | None = None
    overlap: bool = False


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Nodes and an order in which parents precede children.

    Attributes:
        nodes: in the file's order.
        order: indices of the nodes in the given order; a node that is made with another comes right after it.
        name: the graph's name in the file.
        offload: the second board; None if nothing may be moved.
    """

    nodes: tuple[Node, ...]
    order: tuple[int, ...]
    name: str = ""
    offload: Offload | None = None

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Per node, the nodes that read its value."""
        found: list[list[int]] = [[] for _ in self.nodes]
        for v, node in enumerate(self.nodes):
            for p in node.parents:
                found[p].append(v)
        return tuple(tuple(c) for c in found)

    @cached_property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """Per node, the nodes that its operator also computes (``made_with``)."""
        found: list[list[int]] = [[] for _ in self.nodes]
        for v, node in enumerate(self.nodes):
            if node.made_with is not None:
                found[node.made_with].append(v)
        return tuple(tuple(m) for m in found)

    @cached_property
    def olds(self) -> tuple[tuple[int, ...], ...]:
        """Per node, the nodes whose storages its operator takes over when it runs in place."""
        return tuple(
            tuple(o for u in (v, *self.members[v]) if (o := self.nodes[u].overwrites) is not None)
            if node.made_with is None
            else ()
            for v, node in enumerate(self.nodes)
        )

    def leader(self, v: int) -> int:
        """The node whose operator computes ``v``'s value."""
        above = self.nodes[v].made_with
        return v if above is None else above

    def storage(self, v: int) -> int:
        """The node that owns the storage of ``v``'s value."""
        above = self.nodes[v].view_of
        while above is not None:
            v, above = above, self.nodes[above].view_of
        return v

    @cached_property
    def reads(self) -> tuple[tuple[int, ...], ...]:
        """Per node, all values that must be on the board to compute it: its parents, and the storages that parents view."""
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
        """Seconds to run every operator once."""
        return math.fsum(n.seconds for n in self.nodes if not n.resident)

    def rounded(self, unit: int) -> Graph:
        """The same graph with all sizes rounded up to multiples of ``unit``, the allocator's block size in bytes."""

        def up(size: int) -> int:
            return -(-size // unit) * unit

        nodes = tuple(
            replace(n, bytes=up(n.bytes), workspace_bytes=up(n.workspace_bytes), state_bytes=up(n.state_bytes))
            for n in self.nodes
        )
        return replace(self, nodes=nodes)
