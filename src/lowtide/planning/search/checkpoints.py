"""Checkpoints before an instant: values kept on the board so that none needs a long chain to come back.

The program of one instant pays for every run once, however long the chain of operators is that brings a value back. In a
network of equal blocks it therefore keeps little except values that are expensive to compute, and the first value to come back
recomputes half of the network. A checkpoint is the set of values that cross a place in the order: computed before it, and read
between it and the instant. Checkpoints are closer together near the instant, because the values read next come back while the
board is full, and those read last when most of it is free.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lowtide.planning.graph_arrays import Game

_REACH = 0.5
"""A checkpoint stands where the fewest bytes cross, within this share of its distance on either side of its nominal place."""


@dataclass(frozen=True, slots=True)
class Spacing:
    """Distances between checkpoints.

    Attributes:
        share: smallest distance, and that of the first checkpoint to the instant, as a share of all operators before it.
        growth: distance from one checkpoint to the next as a share of the former's distance to the instant; used if larger.
    """

    share: float
    growth: float


SPACINGS = (
    Spacing(1 / 200, 1.0), Spacing(1 / 100, 1.0), Spacing(1 / 50, 1.0), Spacing(1 / 25, 1.0), Spacing(1 / 100, 0.5),
    Spacing(1 / 50, 0.25),
)
"""The spacings to try: which is best depends on how much of a block must be on the board to bring back one of its values."""


class Crossings:
    """The values and bytes that cross each place in the given order before an instant."""

    def __init__(self, game: Game, op: int) -> None:
        """Find the values that are read after their computation and no later than the instant.

        Args:
            game: the game.
            op: the operator whose first run is the instant.
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
        """The places of the checkpoints, nearest to the instant first; each is where the fewest bytes cross nearby."""
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
        """The values that cross these places."""
        places = np.sort(np.asarray(self.places(spacing), dtype=np.int64))
        crossed = np.searchsorted(places, self._to, side="right") > np.searchsorted(places, self._from, side="left")
        return frozenset(v for v, yes in zip(self._values, crossed.tolist(), strict=True) if yes)
