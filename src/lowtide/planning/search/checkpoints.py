"""Checkpoints before an instant: values that stay on the board there, so that what comes back is no long chain.

The program of one instant pays for every run once, however long the chain of operators is that brings a value back. Of a
network of equal blocks it keeps little but what is dear to compute, and the first value that comes back takes half of the
network with it. A checkpoint is all that crosses a place in the order: made before it, and read between it and the instant.
The nearer the instant, the closer they stand, because what is read next comes back while the board is full, and what is read
last when most of it is free.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lowtide.planning.graph_arrays import Game

_REACH = 0.5
"""Around where the next one would stand, so much of the distance to it is looked over for where least crosses."""


@dataclass(frozen=True, slots=True)
class Spacing:
    """Distances between checkpoints.

    Attributes:
        share: of the first to the instant, as a share of all operators before that.
        growth: of each other one to the next, as a share of its distance to the instant, if that is more.
    """

    share: float
    growth: float


SPACINGS = (
    Spacing(1 / 200, 1.0), Spacing(1 / 100, 1.0), Spacing(1 / 50, 1.0), Spacing(1 / 25, 1.0), Spacing(1 / 100, 0.5),
    Spacing(1 / 50, 0.25),
)
"""Those that are tried: which is best depends on how much of a block must be on the board to bring one of its values back."""


class Crossings:
    """What crosses each place in the given order before an instant."""

    def __init__(self, game: Game, op: int) -> None:
        """Gather it.

        Args:
            game: what is played.
            op: whose first run is the instant.
        """
        self._op = op
        read = [max((r for r in readers if r <= op), default=-1) for readers in game.readers]
        made = game.producer
        self._values = [v for v, last in enumerate(read) if made[v] < last]
        self._from = np.asarray([made[v] + 1 for v in self._values], dtype=np.int64)
        self._to = np.asarray([read[v] for v in self._values], dtype=np.int64)
        sizes = np.asarray([game.bytes[v] for v in self._values], dtype=np.int64)
        change = np.zeros(op + 2, dtype=np.int64)
        np.add.at(change, self._from, sizes)
        np.add.at(change, self._to + 1, -sizes)
        self._bytes = np.cumsum(change)

    def places(self, spacing: Spacing) -> list[int]:
        """Where checkpoints stand, the nearest to the instant first: each where least crosses, of the places around."""
        found: list[int] = []
        at = self._op
        while True:
            gap = max(1.0, spacing.share * self._op, spacing.growth * (self._op - at))
            low, high = max(1, int(at - (1 + _REACH) * gap)), min(at - 1, int(at - (1 - _REACH) * gap))
            if high < low:
                return found
            nearby = self._bytes[low : high + 1][::-1]
            at = high - int(np.argmin(nearby))
            found.append(at)

    def values(self, spacing: Spacing) -> frozenset[int]:
        """What crosses these places."""
        places = np.sort(np.asarray(self.places(spacing), dtype=np.int64))
        crossed = np.searchsorted(places, self._to, side="right") > np.searchsorted(places, self._from, side="left")
        return frozenset(v for v, yes in zip(self._values, crossed.tolist(), strict=True) if yes)
