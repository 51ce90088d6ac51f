"""A graph as arrays: operators, the values that they compute and read, and fetches as additional operators.

Solvers and bounds work on this form. Operators are numbered in the given order. Those from index ``plain`` on are fetches, one
per value that may be moved. The last plain operator may be the end, which reads the values that must be kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from lowtide.planning.graph import Graph
from lowtide.planning.schedule import Act, Move, Row

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]

END = -1
"""Node of the end operator, which has no node in the graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lists:
    """Fields of :class:`Game` as lists, for code that reads single items often: indexing an array takes ten times as long.

    Attributes:
        producer, fetcher, bytes, overwriter, pin: per value, as in the game.
        workspace, state, again: per operator, as in the game.
        price: per operator, its seconds as a share of the graph's.
    """

    producer: list[int]
    fetcher: list[int]
    bytes: list[int]
    overwriter: list[int]
    pin: list[int]
    workspace: list[int]
    state: list[int]
    again: list[bool]
    price: list[float]


@dataclass(frozen=True, kw_only=True)
class Game:
    """The operators and values of a graph.

    Attributes:
        graph: the graph that the game was made from.
        nodes: per operator, its node (``END`` for the end; for a fetch, the node of the fetched value).
        value_nodes: per value, its node.
        plain: the number of operators that are not fetches.
        outputs, inputs: per operator, the values that it computes and reads.
        producer: per value, the operator that computes it.
        fetcher: per value, the operator that fetches it, or -1.
        bytes: per value, its size.
        seconds: per operator, seconds of each run; for a fetch, those of the transfer.
        once: per operator, additional seconds of the first run (a fetch pays for the offload this way).
        workspace, state: per operator, bytes.
        overwriter: per value, the operator that can take over its storage in place, or -1.
        again: per operator, whether it may run more than once.
        pin: per value, the operator that must have run once before the value may leave, or -1.
        last: the end operator, or -1.
    """

    graph: Graph
    nodes: tuple[int, ...]
    value_nodes: tuple[int, ...]
    plain: int
    outputs: tuple[tuple[int, ...], ...]
    inputs: tuple[tuple[int, ...], ...]
    producer: Ints
    fetcher: Ints
    bytes: NDArray[np.int64]
    seconds: Floats
    once: Floats
    workspace: NDArray[np.int64]
    state: NDArray[np.int64]
    overwriter: Ints
    again: NDArray[np.bool_]
    pin: Ints
    last: int

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """Per value, the plain operators that read it, in the given order."""
        found: list[list[int]] = [[] for _ in self.value_nodes]
        for o in range(self.plain):
            for v in self.inputs[o]:
                found[v].append(o)
        return tuple(tuple(r) for r in found)

    @cached_property
    def parents(self) -> tuple[tuple[int, ...], ...]:
        """Per plain operator, the operators whose values it reads."""
        return tuple(tuple(dict.fromkeys(int(self.producer[v]) for v in self.inputs[o])) for o in range(self.plain))

    @property
    def base_seconds(self) -> float:
        """Seconds to run every operator once."""
        return self.graph.base_seconds

    @cached_property
    def returns(self) -> NDArray[np.bool_]:
        """Per value, whether it can be placed again, by recomputing or fetching it."""
        found: NDArray[np.bool_] = self.again[self.producer] | (self.fetcher >= 0)
        return found

    @cached_property
    def reads(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Every read of a plain operator, as two arrays: the operator, and the value that it reads."""
        lengths = np.fromiter((len(i) for i in self.inputs[: self.plain]), dtype=np.int64, count=self.plain)
        read = np.fromiter(chain.from_iterable(self.inputs[: self.plain]), dtype=np.int64, count=int(lengths.sum()))
        return np.repeat(np.arange(self.plain), lengths), read

    @cached_property
    def moving_price(self) -> Floats:
        """Per value, what moving it costs, there and back, as a share of the graph's seconds; infinite if it cannot move."""
        found = np.full(len(self.value_nodes), np.inf)
        moves = self.fetcher >= 0
        fetch = self.fetcher[moves]
        found[moves] = (self.seconds[fetch] + self.once[fetch]) / (self.base_seconds or 1.0)
        return found

    @cached_property
    def lists(self) -> Lists:
        """Frequently indexed fields as lists."""
        return Lists(
            producer=self.producer.tolist(),
            fetcher=self.fetcher.tolist(),
            bytes=self.bytes.tolist(),
            overwriter=self.overwriter.tolist(),
            pin=self.pin.tolist(),
            workspace=self.workspace.tolist(),
            state=self.state.tolist(),
            again=self.again.tolist(),
            price=(self.seconds / (self.base_seconds or 1.0)).tolist(),
        )

    def row(self, ops: Iterable[int]) -> Row:
        """The graph's row for a sequence of operators; the end operator is left out."""
        return tuple(Move(Act.COMPUTE if o < self.plain else Act.FETCH, self.nodes[o]) for o in ops if self.nodes[o] != END)

    def ops(self, row: Row) -> tuple[int, ...]:
        """The operators of a row, with the end operator appended if there is one."""
        compute = {v: o for o, v in enumerate(self.nodes[: self.plain])}
        fetch = {v: o + self.plain for o, v in enumerate(self.nodes[self.plain :])}
        found = [fetch[m.node] if m.act is Act.FETCH else compute[m.node] for m in row]
        return tuple(found if self.last < 0 else [*found, self.last])

    def olds(self, o: int) -> list[int]:
        """Values whose storages an operator takes over when it runs in place."""
        return [v for v in self.inputs[o] if self.lists.overwriter[v] == o]

    @property
    def given(self) -> tuple[int, ...]:
        """The plain operators in the given order."""
        return tuple(range(self.plain))


def game_of(graph: Graph, *, transfer_share: float = 1.0) -> Game:
    """The arrays of a graph.

    Args:
        graph: the graph to play.
        transfer_share: share of a transfer's seconds to count (transfers that overlap with computation cost less).
    """
    own = [v for v in graph.order if graph.nodes[v].made_with is None and not graph.nodes[v].resident]
    values = [u for v in own for u in (v, *graph.members[v])]
    value_of = {node: i for i, node in enumerate(values)}
    op_of = {node: o for o, v in enumerate(own) for node in (v, *graph.members[v])}
    outputs: list[tuple[int, ...]] = [tuple(value_of[u] for u in (v, *graph.members[v])) for v in own]
    inputs: list[tuple[int, ...]] = [tuple(value_of[p] for p in graph.reads[v] if not graph.nodes[p].resident) for v in own]
    nodes = list(own)
    seconds = [graph.nodes[v].seconds for v in own]
    again = [graph.nodes[v].recompute for v in own]
    keeps = [value_of[u] for u in values if graph.nodes[u].keep]
    last = -1
    if keeps:
        last = len(nodes)
        nodes.append(END)
        outputs.append(())
        inputs.append(tuple(keeps))
        seconds.append(0.0)
        again.append(False)
    plain = len(nodes)
    once = [0.0] * plain
    fetcher = [-1] * len(values)
    board2 = graph.offload
    if board2 is not None:
        for i, u in enumerate(values):
            if graph.nodes[u].move and graph.nodes[u].bytes:
                fetcher[i] = len(nodes)
                nodes.append(u)
                outputs.append((i,))
                inputs.append(())
                seconds.append(transfer_share * graph.nodes[u].bytes / board2.read_bytes_per_second)
                once.append(transfer_share * graph.nodes[u].bytes / board2.write_bytes_per_second)
                again.append(True)

    def of_nodes(get: str) -> list[int]:
        return [getattr(graph.nodes[v], get) if v != END else 0 for v in nodes[:plain]] + [0] * (len(nodes) - plain)

    overwriter = [-1] * len(values)
    for o, v in enumerate(own):
        for old in graph.olds[v]:
            overwriter[value_of[old]] = o
    pin = [-1] * len(values)
    for i, u in enumerate(values):
        until = graph.nodes[u].held_until
        if until is not None and until in op_of:
            pin[i] = op_of[until]
    return Game(
        graph=graph,
        nodes=tuple(nodes),
        value_nodes=tuple(values),
        plain=plain,
        outputs=tuple(outputs),
        inputs=tuple(inputs),
        producer=np.asarray([op_of[u] for u in values], dtype=np.int32),
        fetcher=np.asarray(fetcher, dtype=np.int32),
        bytes=np.asarray([graph.nodes[u].bytes for u in values], dtype=np.int64),
        seconds=np.asarray(seconds, dtype=np.float64),
        once=np.asarray(once, dtype=np.float64),
        workspace=np.asarray(of_nodes("workspace_bytes"), dtype=np.int64),
        state=np.asarray(of_nodes("state_bytes"), dtype=np.int64),
        overwriter=np.asarray(overwriter, dtype=np.int32),
        again=np.asarray(again, dtype=np.bool_),
        pin=np.asarray(pin, dtype=np.int32),
        last=last,
    )


def profile(game: Game, ops: Sequence[int]) -> NDArray[np.int64]:
    """Bytes on the board at every place of a row of operators, resident ones included (a fast count; the referee decides)."""
    length, lists = len(ops), game.lists
    delta = [0] * (length + 1)
    placed: dict[int, int] = {}
    used: dict[int, int] = {}
    held: dict[int, int] = {}
    size, pin, workspace, state, overwriter = lists.bytes, lists.pin, lists.workspace, lists.state, lists.overwriter
    at = [0] * length
    first: dict[int, int] = {}
    for t, o in enumerate(ops):
        first.setdefault(o, t)
    state_last = {o: t for t, o in enumerate(ops) if state[o]}

    def close(v: int) -> None:
        end = used[v]
        if v in held:
            end = max(end, held.pop(v))
        if end > placed[v] and overwriter[v] == ops[end]:
            end -= 1
        delta[placed[v]] += size[v]
        delta[end + 1] -= size[v]

    for t, o in enumerate(ops):
        for v in game.inputs[o]:
            used[v] = t
        for v in game.outputs[o]:
            if v in placed:
                close(v)
            elif pin[v] >= 0:
                held[v] = first[pin[v]]
            placed[v] = used[v] = t
        at[t] = workspace[o]
        if state[o] and state_last[o] != first[o] == t:
            delta[t] += state[o]
            delta[state_last[o] + 1] -= state[o]
    for v in placed:
        close(v)
    return np.cumsum(np.asarray(delta[:length], dtype=np.int64)) + np.asarray(at, dtype=np.int64) + game.graph.resident_bytes
