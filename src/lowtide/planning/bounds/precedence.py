"""Which operators run before another operator's first run in every schedule, and which only after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lowtide.planning.graph_arrays import Game

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Instant:
    """The first run of an operator.

    Attributes:
        op: the operator.
        done: per plain operator, whether it has run before the instant in every schedule.
        ahead: per plain operator, whether its first run comes after the instant in every schedule.
    """

    op: int
    done: Flags
    ahead: Flags


class Precedence:
    """What holds for the order of first runs in every schedule: in fixed order all of it, in free order what links imply."""

    def __init__(self, game: Game, *, fixed: bool) -> None:
        """Index the readers; ancestors and descendants are computed when first needed."""
        self.game = game
        self.fixed = fixed
        uses = [r for readers in game.readers for r in readers]
        self._use = np.asarray(uses, dtype=np.int64)
        self._use_at = np.cumsum([0, *(len(r) for r in game.readers)])
        self._has_readers = np.diff(self._use_at) > 0

    @cached_property
    def _reach(self) -> tuple[list[int], list[int]]:
        """Per operator, its ancestors and its descendants, as bit sets in integers."""
        above, below = [0] * self.game.plain, [0] * self.game.plain
        for o in range(self.game.plain):
            for p in self.game.parents[o]:
                above[o] |= above[p] | 1 << p
        end = self.game.last
        if end >= 0:  # the end follows all operators, even those that lead to no kept value
            above[end] = (1 << end) - 1
            below[:end] = [1 << end] * end
        for o in range(self.game.plain - 1, -1, -1):
            mine = below[o] | 1 << o
            for p in self.game.parents[o]:
                below[p] |= mine
        return above, below

    def instant(self, op: int) -> Instant:
        """The instant of an operator's first run."""
        plain = self.game.plain
        if self.fixed:
            places = np.arange(plain)
            return Instant(op, places < op, places > op)
        above, below = self._reach
        return Instant(op, _bits(above[op], plain), _bits(below[op], plain))

    def comparable(self, a: int, b: int) -> bool:
        """Whether ``a`` first runs before ``b`` in every schedule."""
        return a < b if self.fixed else bool(self._reach[0][b] >> a & 1)

    def read_in(self, ops: Flags) -> Flags:
        """Per value, whether one of the flagged operators reads it."""
        found = np.zeros(len(self.game.readers), dtype=bool)
        if len(self._use):
            starts = self._use_at[:-1][self._has_readers]
            found[self._has_readers] = np.logical_or.reduceat(ops[self._use], starts)
        return found

    def forced(self, at: Instant) -> Flags:
        """Values computed before an instant and read at or after it: each is on the board then or is placed again later."""
        made = at.done[self.game.producer]
        found: Flags = made & self.read_in(at.ahead)
        found[list(self.game.inputs[at.op])] = True
        return found

    def stuck(self, at: Instant) -> Flags:
        """Values that are on the board at an instant in every schedule: read there, held, or without a way back."""
        game = self.game
        found: Flags = self.forced(at) & ~game.returns
        found[list(game.inputs[at.op])] = True
        later = at.ahead.copy()
        later[at.op] = True
        found |= (game.pin >= 0) & later[game.pin] & at.done[game.producer]
        return found

    def bytes_once(self, at: Instant) -> int:
        """Bytes while an operator runs if every value that is computed before and read afterwards is on the board."""
        return self.bytes_with(at, self.forced(at) | self.stuck(at))

    def bytes_with(self, at: Instant, present: Flags) -> int:
        """Bytes while an operator runs with the ``present`` values and its own on the board; it runs in place if it can."""
        game = self.game
        present = present.copy()
        present[list(game.outputs[at.op])] = True
        present[game.olds(at.op)] = False
        return int(game.bytes[present].sum()) + int(game.workspace[at.op]) + game.graph.resident_bytes


def certain_in_order(game: Game) -> NDArray[np.int64]:
    """Bytes on the board when each plain operator first runs, in every schedule that keeps the given order.

    Per operator this is ``bytes_with(at, stuck(at))`` in fixed order, computed for all of them in one sweep: a value is on the
    board from its producer to the end of its pin (to its last reader if it has no way back), and at every reader after that.
    """
    change = np.zeros(game.plain + 2, dtype=np.int64)
    for v, readers in enumerate(game.readers):
        size, producer = int(game.bytes[v]), int(game.producer[v])
        end = max(producer, int(game.pin[v]), readers[-1] if readers and not game.returns[v] else -1)
        change[producer] += size
        change[end + 1] -= size
        for reader in readers:
            if reader > end:
                change[reader] += size
                change[reader + 1] -= size
        over = int(game.overwriter[v])
        if over >= 0 and over in readers:
            change[over] -= size
            change[over + 1] += size
    return np.cumsum(change)[: game.plain] + game.workspace[: game.plain] + game.graph.resident_bytes


def _bits(number: int, size: int) -> Flags:
    raw = np.frombuffer(number.to_bytes(-(-size // 8), "little"), dtype=np.uint8)
    return np.unpackbits(raw, bitorder="little")[:size].astype(bool)


def chain(ops: Sequence[int], weight: Sequence[float], precedence: Precedence) -> list[int]:
    """The heaviest subsequence of operators that first run in this order in every schedule."""
    best: list[float] = []
    back: list[int] = []
    for i, o in enumerate(ops):
        before = max((j for j in range(i) if precedence.comparable(ops[j], o)), key=lambda j: best[j], default=-1)
        best.append(weight[i] + (best[before] if before >= 0 else 0.0))
        back.append(before)
    at = max(range(len(ops)), key=lambda i: best[i], default=-1)
    found: list[int] = []
    while at >= 0:
        found.append(ops[at])
        at = back[at]
    return found[::-1]
