"""One instant in free order, over all sets of operators that may have run by then, as minimum cuts.

The program of one instant (``instant_cut``) knows only what runs before it in every order, and after it in every order. Here
the set of operators that have run is a part of the question. Per operator there are two variables, "has run", and "has run and
does not run again"; per value one, "is not needed any more", which implies that all its readers have run and that none of them
runs again. An operator that runs again costs its seconds; a value that is needed and whose operator does not run again costs
its bytes at a price, or its transfers. All conditions compare two variables, so the cheapest choice is a minimum cut, and for
every price per byte

    seconds of the cheapest cut at that price - price * (bytes that the budget leaves for these values)

bounds the extra seconds of every schedule in every order. ``docs/planner.md`` has the proof.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lowtide.planning.bounds.flow import minimum_cut
from lowtide.planning.bounds.instant_cut import CutAnswer
from lowtide.planning.bounds.precedence import Flags, Instant, Precedence
from lowtide.planning.bounds.program_points import again_for
from lowtide.planning.graph_arrays import Game

_PRICES = 12
"""Largest number of prices that are tried."""
_SAME = 1e-9
"""Two prices within this share of each other are the same."""


@dataclass(frozen=True, slots=True)
class _Line:
    """A choice, as a line over the price: its seconds (a share of the graph's), and the bytes that it has on the board."""

    seconds: float
    bytes: float


class OrderCut:
    """One instant of a game in free order, for any budget."""

    def __init__(self, game: Game, precedence: Precedence, at: Instant) -> None:
        """Lay out the network.

        Args:
            game: the game; transfers must not overlap with computing.
            precedence: of the game, in free order.
            at: the instant.
        """
        ops, values = game.plain, len(game.value_nodes)
        reader, read = game.reads
        self._producer = producer = game.producer.astype(np.int64)
        self._own = precedence.bytes_with(at, np.zeros(values, dtype=bool))
        olds = game.olds(at.op)
        self._there = np.zeros(values, dtype=bool)
        self._there[list(game.inputs[at.op])] = True
        counts = self._there.copy()
        counts[olds] = False
        self._own += int(game.bytes[counts].sum())
        self._again: Flags = again_for(game, frozenset())
        self._price = np.asarray(game.lists.price[:ops])
        self._size = game.bytes.astype(np.float64)
        self._moving = game.moving_price
        ran, stays, done = np.arange(ops), ops + np.arange(ops), 2 * ops + np.arange(values)
        self._source, self._sink = 2 * ops + values, 2 * ops + values + 1
        pinned = np.nonzero(game.pin >= 0)[0]
        first = np.nonzero(at.done[:ops])[0]
        last = np.append(np.nonzero(at.ahead[:ops])[0], at.op)
        links = np.unique(np.stack([ran[reader], ran[producer[read]]]), axis=1)
        certain = [
            (stays, ran),
            (links[0], links[1]),
            (done[read], stays[reader]),
            (done[pinned], ran[game.pin[pinned]]),
            (np.full(len(first), self._source), ran[first]),
            (ran[last], np.full(len(last), self._sink)),
        ]
        self._tails = np.concatenate([ran, stays[producer], *(a for a, _ in certain)])
        self._heads = np.concatenate([stays, done, *(b for _, b in certain)])
        self._certain = sum(len(a) for a, _ in certain)

    @property
    def least_bytes(self) -> int:
        """A lower bound on the peak in every order: the fewest bytes at the instant from which everything can come back."""
        return self._own + math.floor(self._lightest()[1])

    def at(self, budget_bytes: int, *, deadline: float = math.inf) -> CutAnswer:
        """The bound for a budget; the answer says nothing of values.

        Args:
            budget_bytes: the peak that no schedule may exceed.
            deadline: time of :func:`time.monotonic` after which no further price is tried: what the prices so far prove holds.
        """
        room = budget_bytes - self._own
        above, _ = self._cut(self._size, np.full(len(self._price), np.inf), moved=np.zeros_like(self._there))
        if above.bytes <= room:
            return CutAnswer(0.0)
        within, least = self._lightest()
        if math.floor(least) > room:
            return CutAnswer(math.inf)
        best, price = 0.0, 0.0
        for _ in range(_PRICES):
            if within.bytes > room:  # bytes are counted in 32 bits: nearly no room
                break
            before, price = price, (within.seconds - above.seconds) / (above.bytes - within.bytes)
            if abs(price - before) <= _SAME * price or time.monotonic() >= deadline:
                break
            holding = np.minimum(price * self._size, self._moving)
            running = np.where(self._again, self._price, np.inf)
            line, value = self._cut(holding, running, moved=self._moving < price * self._size)
            best = max(best, value - price * room)
            if line.bytes <= room:
                within = line
            else:
                above = line
        return CutAnswer(float(best))

    def _lightest(self) -> tuple[_Line, float]:
        """The choice with the fewest bytes on the board, and a bound on those bytes."""
        moves = np.isfinite(self._moving)
        free = np.where(self._again, 0.0, np.inf)
        return self._cut(np.where(moves, 0.0, self._size), free, moved=moves)

    def _cut(
        self, holding: NDArray[np.float64], running: NDArray[np.float64], *, moved: Flags
    ) -> tuple[_Line, float]:
        """The cheapest choice, and a lower bound on the cost of every choice.

        Args:
            holding: per value, the cost of having it without running its operator again.
            running: per plain operator, the cost of running it again.
            moved: per value, whether what is had without running its operator is fetched.
        """
        holding = np.where(self._there, 0.0, holding)
        capacity = np.concatenate([running, holding, np.full(self._certain, np.inf)])
        total = float(running[np.isfinite(running)].sum() + holding.sum())
        chosen, value = minimum_cut(
            self._tails, self._heads, capacity, source=self._source, sink=self._sink, total=total
        )
        ops = len(self._price)
        ran, stays, done = chosen[:ops], chosen[ops : 2 * ops], chosen[2 * ops : self._source]
        had = stays[self._producer] & ~done & ~self._there
        seconds = self._price[ran & ~stays].sum() + self._moving[had & moved].sum()
        return _Line(float(seconds), float(self._size[had & ~moved].sum())), value
