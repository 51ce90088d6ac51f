"""The program of one instant as minimum cuts: for graphs in which a solver of linear programs takes too long.

At a price per byte on the board, each value that is read later is either on the board at the instant or comes back: it is
fetched, or its operator runs again, which in turn needs its inputs. With "available" per value and "runs again" per operator,
both 0 or 1, every condition says that one of them is at least another. Such a program is a minimum cut, and a price per byte
proves the bound

    seconds of the cheapest cut at that price - price * (bytes that the budget leaves for these values).

The best price gives the bound of the relaxed program (linear programming duality), and takes a few cuts. Between the two
cheapest cuts at the best price, one above the budget and one within it, what differs falls into parts that do not depend on
each other; in a network of equal blocks these are the blocks. As many parts as the budget needs are taken from the cut within
it, so the answer is whole, and costs at most one part more than the bound.

``docs/planner.md`` has the proof.
"""

from __future__ import annotations

import math
import time
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from lowtide.planning.bounds.flow import minimum_cut
from lowtide.planning.bounds.precedence import Flags, Instant, Precedence
from lowtide.planning.bounds.program_points import again_for
from lowtide.planning.graph_arrays import Game

LONG = 5000
"""Graphs of more operators than this are bounded by cuts first, and by the solver only if there is time left."""
_PRICES = 40
"""Largest number of prices that are tried; in practice it takes three to twelve."""
_SAME = 1e-9
"""Two prices within this share of each other are the same."""


@dataclass(frozen=True, slots=True)
class CutAnswer:
    """What the cuts of an instant prove and leave absent.

    Attributes:
        value: lower bound on the extra seconds, as a share of the graph's; infinite if no board fits.
        absent: the values that are not on the board at the instant.
        fetched: those of them that come back from the second board.
    """

    value: float
    absent: frozenset[int] = frozenset()
    fetched: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class _Cut:
    """A choice: the values on the board, the operators that run again, and the values that are fetched.

    ``seconds`` is what it costs, as a share of the graph's, and ``bytes`` what it has on the board.
    """

    on: Flags
    runs: Flags
    fetched: Flags
    seconds: float
    bytes: int


def applies(game: Game) -> bool:
    """Whether the program of one instant is a cut: transfers that overlap with computing have rows for channels, too."""
    return game.graph.offload is None or not game.graph.offload.overlap


class InstantCut:
    """One instant of a game, for any budget."""

    def __init__(self, game: Game, precedence: Precedence, at: Instant) -> None:
        """Collect what can be absent at the instant, and what must come back.

        Args:
            game: the game, for which :func:`applies` holds.
            precedence: of the game.
            at: the instant.
        """
        self._game = game
        made = at.done[game.producer]
        self._own = precedence.bytes_with(at, np.zeros(len(game.value_nodes), dtype=bool))
        here = made.copy()
        here[game.olds(at.op)] = False
        self._stuck: Flags = here & precedence.stuck(at)
        self._free: Flags = here & ~self._stuck
        self._reader, self._read = game.reads
        needed = precedence.forced(at)
        later = at.ahead[self._reader] & made[self._read]
        needed[self._read[later]] = True
        self._needed: Flags = needed & self._free
        self._may: Flags = at.done[: game.plain] & again_for(game, frozenset())
        self._price = np.asarray(game.lists.price[: game.plain])

    @property
    def least_bytes(self) -> int:
        """A lower bound on the peak: the fewest bytes at the instant from which everything can come back."""
        return self._own + int(self._game.bytes[self._stuck].sum()) + math.floor(self._lightest(self._free)[1])

    def at(
        self, budget_bytes: int, *, kept: AbstractSet[int] = frozenset(), deadline: float = math.inf
    ) -> CutAnswer:
        """The bound for a budget, and an answer close to it.

        Args:
            budget_bytes: the peak that no schedule may exceed.
            kept: values that must be on the board; what is proven then holds only for schedules that keep them.
            deadline: time of :func:`time.monotonic` after which no further price is tried: what the prices so far prove holds.
        """
        stays = self._stuck.copy()
        stays[[v for v in kept if self._free[v]]] = True
        free = self._free & ~stays
        room = budget_bytes - self._own - int(self._game.bytes[stays].sum())
        over = int(self._game.bytes[self._needed & free].sum()) - room
        if over <= 0:
            return CutAnswer(0.0)
        within, least = self._lightest(free)
        if math.floor(least) > room:
            return CutAnswer(math.inf)
        if within.bytes > room:  # bytes are counted in 32 bits: nearly no room, and no answer to show
            return CutAnswer(0.0)
        above = _Cut(self._needed & free, np.zeros_like(self._may), np.zeros_like(free), 0.0, over + room)
        best, price = 0.0, 0.0
        for _ in range(_PRICES):
            before, price = price, (within.seconds - above.seconds) / (above.bytes - within.bytes)
            if abs(price - before) <= _SAME * price or time.monotonic() >= deadline:
                break
            cut, value = self._cheapest(free, price)
            best = max(best, value - price * room)
            if cut.bytes <= room:
                within = cut
            else:
                above = cut
        found = self._between(above, within, room)
        absent, fetched = (frozenset(np.nonzero(flags)[0].tolist()) for flags in (free & ~found.on, found.fetched))
        return CutAnswer(float(best), absent, fetched)

    def _cheapest(self, free: Flags, price: float) -> tuple[_Cut, float]:
        """The choice that costs the fewest seconds if each byte on the board costs ``price``, and a bound on that cost."""
        holding = np.minimum(price * self._game.bytes, self._game.moving_price)
        return self._cut(free, holding, self._price, moved=self._game.moving_price < price * self._game.bytes)

    def _lightest(self, free: Flags) -> tuple[_Cut, float]:
        """The choice with the fewest bytes on the board, and a bound on those bytes."""
        moves = self._game.fetcher >= 0
        holding = np.where(moves, 0.0, self._game.bytes.astype(np.float64))
        return self._cut(free, holding, np.zeros_like(self._price), moved=moves)

    def _cut(
        self, free: Flags, holding: NDArray[np.float64], running: NDArray[np.float64], *, moved: Flags
    ) -> tuple[_Cut, float]:
        """The minimum cut for a cost of each value that does not come from running its operator, and of each operator.

        Args:
            free: the values that may be absent.
            holding: per value, the cost of having it (on the board or fetched).
            running: per plain operator, the cost of running it again.
            moved: per value, whether what is had without running its operator is fetched.

        Returns:
            The cut, and a lower bound on the cost of every cut: the value of a flow whose capacities are rounded down.
        """
        game, values, ops = self._game, len(self._game.value_nodes), self._game.plain
        source, sink = values + ops, values + ops + 1
        v, o, needed = np.nonzero(free)[0], np.nonzero(self._may)[0], np.nonzero(self._needed & free)[0]
        producer = game.producer[v]
        returns = self._may[producer]
        reads = self._may[self._reader] & free[self._read]
        tails = np.concatenate([v, values + self._reader[reads], values + o, np.full(len(needed), source)])
        heads = np.concatenate([np.where(returns, values + producer, sink), self._read[reads], np.full(len(o), sink), needed])
        capacity = np.concatenate([
            holding[v], np.full(int(reads.sum()), np.inf), running[o], np.full(len(needed), np.inf)
        ])  # fmt: skip
        total = float(running[o].sum() + holding[v[~returns]].sum())
        chosen, value = minimum_cut(tails, heads, capacity, source=source, sink=sink, total=total)
        runs = chosen[values:source] & self._may
        had = chosen[:values] & free & ~runs[game.producer]
        return self._of(had & ~moved, runs, had & moved), value

    def _of(self, on: Flags, runs: Flags, fetched: Flags) -> _Cut:
        seconds = float(self._price[runs].sum() + self._game.moving_price[fetched].sum())
        return _Cut(on, runs, fetched, seconds, int(self._game.bytes[on].sum()))

    def _between(self, above: _Cut, within: _Cut, room: int) -> _Cut:
        """The choice of ``above``, with that of ``within`` in as many independent parts as the room demands.

        Where both differ, an operator belongs to a part with the values that it reads and computes, unless both have the value
        in the same way without running its operator. Any mix of whole parts keeps the conditions of both. Parts that begin
        earliest in the order change first: backward reads their values last, when most of the board is free.
        """
        game, values, ops = self._game, len(self._game.value_nodes), self._game.plain
        op_differs = above.runs != within.runs
        same = (above.on & within.on) | (above.fetched & within.fetched)
        value_differs = (above.on != within.on) | (above.fetched != within.fetched) | (op_differs[game.producer] & ~same)
        reads = op_differs[self._reader] & value_differs[self._read]
        makes = value_differs & op_differs[game.producer]
        tails = np.concatenate([self._reader[reads], game.producer[makes]])
        heads = ops + np.concatenate([self._read[reads], np.nonzero(makes)[0]])
        links = coo_array((np.ones(len(tails), dtype=np.int8), (tails, heads)), shape=(ops + values,) * 2)
        count, part = connected_components(links, directed=False)
        gained = (above.on.astype(np.int64) - within.on) * game.bytes
        gains = np.bincount(part[ops:], weights=np.where(value_differs, gained, 0), minlength=count)
        first = np.full(count, ops)
        np.minimum.at(first, part[:ops][op_differs], np.nonzero(op_differs)[0])
        np.minimum.at(first, part[ops:][value_differs], game.producer[value_differs])
        order = np.argsort(first, kind="stable")
        order = order[(gains[order] > 0)]
        enough = int(np.searchsorted(np.cumsum(gains[order]), above.bytes - room)) + 1
        changes = np.zeros(count, dtype=bool)
        changes[order[:enough]] = True
        for_values, for_ops = changes[part[ops:]], changes[part[:ops]]
        found = self._of(
            np.where(for_values, within.on, above.on), np.where(for_ops, within.runs, above.runs),
            np.where(for_values, within.fetched, above.fetched),
        )  # fmt: skip
        return found if found.bytes <= room else within
