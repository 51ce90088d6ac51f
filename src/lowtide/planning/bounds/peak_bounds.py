"""Lower bounds on the peak, with and without recomputation, each with the program point that proves it.

See ``docs/planner.md`` for the proofs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_flow

from lowtide.planning.bounds.bound_program import EXACT
from lowtide.planning.bounds.instant_cut import LONG, InstantCut
from lowtide.planning.bounds.order_cut import OrderCut
from lowtide.planning.bounds.precedence import Instant, Precedence, certain_in_order
from lowtide.planning.bounds.program_points import stages
from lowtide.planning.graph_arrays import Game, profile

_EVERY = 1500
"""Up to this number of operators, every first run is examined as an instant; in larger graphs, two per stretch are."""
_LOOKED_AT = 96
"""Approximate number of stretches into which a larger graph is cut."""
_FLOW_SCALE = 1 << 30
"""scipy's maximum flow takes 32-bit capacities: bytes are scaled to at most this total and rounded down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakBound:
    """A lower bound on the peak of every schedule.

    Attributes:
        bytes: the bound.
        node: the node whose first run proves it; -1 if resident values alone do.
        method: ``stuck`` (values without a way back), ``instant`` (additionally what the others need to come back), ``order``
            (the same over all orders), ``forced`` (values computed before and read after), ``cut`` (minimum cut).
    """

    bytes: int
    node: int
    method: str


def looked_at(game: Game, precedence: Precedence) -> list[Instant]:
    """The instants that bounds examine: all of a small graph, two per stretch of a large one.

    The two are the instant with the highest bytes without a plan, and the one with the most bytes that are on the board under
    every plan. In fixed order the floor is therefore the same as if every instant were examined.
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
    """A lower bound on the peak of every schedule, with recomputation and offloading."""
    best = PeakBound(bytes=game.graph.resident_bytes, node=-1, method="stuck")
    for at in instants:
        size = precedence.bytes_with(at, precedence.stuck(at))
        if size > best.bytes:
            best = PeakBound(bytes=size, node=game.nodes[at.op], method="stuck")
    return best


def closed_floor(game: Game, precedence: Precedence, at: Instant, *, seconds: float) -> PeakBound:
    """The lower bound on the peak from one instant's closed program: absent values must come back from what is on the board.

    The relaxed program is solved for the fewest bytes instead of the fewest seconds.

    In long graphs the bound is a minimum cut, which is the relaxed program's optimum and needs no time limit.

    Returns:
        The bound; 0 bytes if the program was not solved in time.
    """
    if game.plain > LONG:
        least = int(InstantCut(game, precedence, at).least_bytes * (1 - EXACT))  # what a solver's program proves, too
        return PeakBound(bytes=least, node=game.nodes[at.op], method="instant")
    most = max(1, precedence.bytes_once(at))
    program = stages(game, precedence, [at], most, channels=False)  # waiting does not change the peak
    program.cost = [0.0] * len(program.cost)
    peak = program.variable("peak", 1.0)
    own = precedence.bytes_with(at, np.zeros(len(game.value_nodes), dtype=bool))
    program.rows[0] |= {peak: 1.0}  # row 0 is the budget's: the peak takes the budget's place
    program.low[0] = own / most
    found = program.solve(seconds, whole=False)
    return PeakBound(bytes=int(found.value * most * (1 - EXACT)), node=game.nodes[at.op], method="instant")


def any_order(game: Game, precedence: Precedence, instants: Sequence[Instant], *, deadline: float) -> PeakBound:
    """The lower bound on the peak from single instants in free order, over all sets of operators that may have run by then.

    Args:
        game: the game.
        precedence: of the game, in free order.
        instants: the instants, in the order in which they are looked at.
        deadline: time of :func:`time.monotonic` after which no further instant is looked at.

    Returns:
        The bound of the best instant; 0 bytes if there was none.
    """
    best = PeakBound(bytes=0, node=-1, method="order")
    for at in instants:
        if time.monotonic() >= deadline:
            break
        size = int(OrderCut(game, precedence, at).least_bytes * (1 - EXACT))
        if size > best.bytes and at.op != game.last:
            best = PeakBound(bytes=size, node=game.nodes[at.op], method="order")
    return best


def once(game: Game, precedence: Precedence, instants: Sequence[Instant], *, seconds: float = np.inf) -> PeakBound:
    """A lower bound on the peak of every order in which each operator runs once and nothing is moved.

    The largest sum of forced values and, as long as time is left, the minimum cut of each instant, those with the largest
    forced sums first.
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
    """The flow network for the fewest bytes on the board at an instant, over all sets of operators that may have run by then.

    Such a set contains the ancestors of the instant's operator, none of its descendants, and for each of its operators all
    that this one needs. A value counts if its producer is in the set and a reader is not. The cheapest set is a minimum cut.
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
