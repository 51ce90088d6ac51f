"""Lower bounds on the peak, with recomputation and without, each with the program point that proves it.

The proofs stand in ``docs/planner.md``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_flow

from lowtide.planning.bounds.bound_program import EXACT
from lowtide.planning.bounds.precedence import Instant, Precedence, certain_in_order
from lowtide.planning.bounds.program_points import stages
from lowtide.planning.graph_arrays import Game, profile

_EVERY = 1500
"""Operators up to which every one is an instant that is looked at; beyond, two of each stretch are."""
_LOOKED_AT = 96
"""Stretches into which a larger graph is cut."""
_FLOW_SCALE = 1 << 30
"""Capacities of scipy's maximum flow are 32-bit integers: bytes are rounded down to shares of all bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakBound:
    """A peak that no schedule goes below.

    Attributes:
        bytes: the bound.
        node: whose first run proves it; -1 where resident values alone do.
        method: ``stuck`` (values without a way back), ``instant`` (with what the others need to come back), ``forced`` (values
            made before and read after), ``cut`` (minimum cut).
    """

    bytes: int
    node: int
    method: str


def looked_at(game: Game, precedence: Precedence) -> list[Instant]:
    """The instants that bounds look at: all of a small graph, two of each stretch of a large one.

    The two are the highest without a plan, and the one with the most bytes that are there whatever the plan: in fixed order
    the floor is therefore the same as if every instant had been looked at.
    """
    ops = list(range(game.plain))
    if game.plain > _EVERY:
        width = max(1, game.plain // _LOOKED_AT)
        ops = sorted({
            start + int(np.argmax(high[start : start + width]))
            for high in (profile(game, game.given), certain_in_order(game))
            for start in range(0, game.plain, width)
        })
    return [precedence.instant(o) for o in ops]


def floor(game: Game, precedence: Precedence, instants: Sequence[Instant]) -> PeakBound:
    """The peak that no recomputing and moving goes below."""
    best = PeakBound(bytes=game.graph.resident_bytes, node=-1, method="stuck")
    for at in instants:
        size = precedence.bytes_with(at, precedence.stuck(at))
        if size > best.bytes:
            best = PeakBound(bytes=size, node=game.nodes[at.op], method="stuck")
    return best


def closed_floor(game: Game, precedence: Precedence, at: Instant, *, seconds: float) -> PeakBound:
    """The peak that one instant proves when what is absent must come back from what is there: its program, for least bytes.

    Returns:
        0 bytes where the program was not solved in time.
    """
    most = max(1, precedence.bytes_once(at))
    program = stages(game, precedence, [at], most, channels=False)  # what is waited for does not matter here
    program.cost = [0.0] * len(program.cost)
    peak = program.variable("peak", 1.0)
    own = precedence.bytes_with(at, np.zeros(len(game.value_nodes), dtype=bool))
    program.rows[0] |= {peak: 1.0}  # instead of the budget, of which it is the first row
    program.low[0] = own / most
    found = program.solve(seconds, whole=False)
    return PeakBound(bytes=int(found.value * most * (1 - EXACT)), node=game.nodes[at.op], method="instant")


def once(game: Game, precedence: Precedence, instants: Sequence[Instant], *, seconds: float = np.inf) -> PeakBound:
    """The peak that no order goes below when every operator runs once and nothing is moved.

    What is forced on the board, and while there is time a minimum cut of each instant, those with most on it first.
    """
    deadline = time.monotonic() + seconds
    best = PeakBound(bytes=game.graph.resident_bytes, node=-1, method="forced")
    forced = [precedence.bytes_once(at) for at in instants]
    for at, size in zip(instants, forced, strict=True):
        if size > best.bytes:
            best = PeakBound(bytes=size, node=game.nodes[at.op], method="forced")
    if time.monotonic() < deadline:
        network = _Network(game)
        for i in sorted(range(len(instants)), key=lambda i: -forced[i]):
            if time.monotonic() >= deadline:
                break
            at = instants[i]
            size = network.least(at)
            if size > best.bytes:
                best = PeakBound(bytes=size, node=game.nodes[at.op], method="cut")
    return best


class _Network:
    """Least bytes on the board at an instant, over all sets of operators that may have run by then.

    Such a set holds what the instant's operator needs, none of what needs it, and with an operator all that it needs; a value
    counts where its maker is in the set and a reader is not. The cheapest is a minimum cut.
    """

    def __init__(self, game: Game) -> None:
        self.game = game
        n, values = game.plain, len(game.value_nodes)
        self.source, self.sink = n + values, n + values + 1
        self.scale = min(1.0, _FLOW_SCALE / max(1, int(game.bytes.sum())))
        self.infinite = (1 << 31) - 1
        self.rows: list[int] = []
        self.cols: list[int] = []
        self.capacity: list[int] = []
        for o, parents in enumerate(game.parents):
            for p in parents:
                self._edge(o, p, self.infinite)
        for v, readers in enumerate(game.readers):
            if readers:
                self._edge(int(game.producer[v]), n + v, int(int(game.bytes[v]) * self.scale))
                for r in readers:
                    self._edge(n + v, r, self.infinite)

    def _edge(self, a: int, b: int, capacity: int) -> None:
        self.rows.append(a)
        self.cols.append(b)
        self.capacity.append(capacity)

    def least(self, at: Instant) -> int:
        game = self.game
        before, after = np.nonzero(at.done)[0].tolist(), [*np.nonzero(at.ahead)[0].tolist(), at.op]
        rows = np.asarray([*self.rows, *([self.source] * len(before)), *after])
        cols = np.asarray([*self.cols, *before, *([self.sink] * len(after))])
        capacity = np.asarray([*self.capacity, *([self.infinite] * (len(before) + len(after)))], dtype=np.int32)
        matrix = csr_matrix((capacity, (rows, cols)), shape=(self.sink + 1, self.sink + 1))
        flow = int(maximum_flow(matrix, self.source, self.sink).flow_value / self.scale)
        own = sum(int(game.bytes[v]) for v in game.outputs[at.op]) + int(game.workspace[at.op])
        taken_over = sum(int(game.bytes[v]) for v in game.olds(at.op))
        return flow + own - taken_over + game.graph.resident_bytes
