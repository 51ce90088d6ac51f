"""Greedy descent to a budget: repeatedly removes the cheapest bytes from the place where the row peaks.

Near the floor, annealing finds no row that fits: bringing one value back needs others that are absent as well, so these rows
are chains of chains. The descent builds its rows from sets of absent values with :func:`row_without`, so every row can run,
and each step lowers the highest place.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from types import MappingProxyType

from lowtide.planning.graph_arrays import Game, profile
from lowtide.planning.search.rows_from_bound import row_without

_STEP_SHARE = 0.01
"""Smallest reduction of the highest place by one step, if possible, as a share of the first row's peak above the floor."""
_IDLE = 60
"""The descent ends after this many steps without a new lowest peak."""


class Descent:
    """The descent from the given order, which is the same for every budget: a lower budget continues where it stopped.

    Attributes:
        rows: pairs (peak in bytes, row) of strictly falling peaks.
    """

    def __init__(
        self,
        game: Game,
        floor_bytes: int,
        *,
        absent: Mapping[int, AbstractSet[int]] = MappingProxyType({}),
        fetched: AbstractSet[int] = frozenset(),
    ) -> None:
        """Start at the given order, or at a row in which some values are absent.

        Args:
            game: the game.
            floor_bytes: lower bound on the peak of every plan.
            absent: per operator, values that are not on the board when it first runs.
            fetched: those of them that come back from the second board.
        """
        row = row_without(game, absent, fetched)
        self._high = profile(game, row)
        peak = int(self._high.max())
        self.rows = [(peak, row)]
        self._game = game
        self._step = max(1, int(_STEP_SHARE * (peak - floor_bytes)))
        self._absent = {o: set(values) for o, values in absent.items()}
        self._fetched = fetched
        self._row, self._idle = row, 0

    def below(self, budget: int, *, deadline: float) -> tuple[int, ...]:
        """The first row that fits a budget; the lowest one found if none does before ``deadline`` (:func:`time.monotonic`)."""
        while self.rows[-1][0] > budget and self._idle < _IDLE and time.monotonic() < deadline:
            place = int(self._high.argmax())
            if not _lower(self._game, self._row, place, self._absent, self._step):
                self._idle = _IDLE
                break
            self._row = row_without(self._game, self._absent, self._fetched)
            self._high = profile(self._game, self._row)
            peak = int(self._high.max())
            self._idle += 1
            if peak < self.rows[-1][0]:
                self.rows.append((peak, self._row))
                self._idle = 0
        return next((row for peak, row in self.rows if peak <= budget), self.rows[-1][1])


@dataclass(frozen=True, slots=True)
class _Life:
    """One stay of a value on the board, beginning at the place ``placed`` in the row."""

    value: int
    placed: int


def _lower(game: Game, row: tuple[int, ...], place: int, absent: dict[int, set[int]], step: int) -> bool:
    """Mark as absent the values at a place that cost least per byte to bring back, until ``step`` bytes are freed.

    Adds them to ``absent``; returns whether there were any.
    """
    lives = _alive(game, row, place)
    there = {life.value for life in lives}
    firsts = _first_runs(game, row)
    following = next(t for t in range(place, len(row)) if firsts[t])
    begins = next((t for t in range(following - 1, -1, -1) if firsts[t]), -1)  # runs in between bring values back
    o = row[following]
    busy = {*game.inputs[row[place]], *game.outputs[row[place]]}
    offers = []
    for life in lives:
        v = life.value
        if v in busy or not game.returns[v] or not game.bytes[v]:
            continue
        at = o if life.placed <= begins else _next_first(row, firsts, following)
        if at < 0 or (life.placed <= begins and v in game.inputs[o]) or v in absent.get(at, ()) or _is_held(game, v, at):
            continue
        offers.append((_seconds(game, v, there) / int(game.bytes[v]), v, at))
    freed = 0
    for _, v, at in sorted(offers):
        absent.setdefault(at, set()).add(v)
        freed += int(game.bytes[v])
        if freed >= step:
            break
    return freed > 0


def _is_held(game: Game, v: int, at: int) -> bool:
    """Whether a value, or one that its operator computes with it, may not leave before ``at`` runs."""
    return any(int(game.pin[u]) >= at for u in game.outputs[int(game.producer[v])])


def _first_runs(game: Game, row: tuple[int, ...]) -> list[bool]:
    seen: set[int] = set()
    found = []
    for o in row:
        found.append(o < game.plain and o not in seen)
        seen.add(o)
    return found


def _next_first(row: tuple[int, ...], firsts: list[bool], after: int) -> int:
    return next((row[t] for t in range(after + 1, len(row)) if firsts[t]), -1)


def _alive(game: Game, row: tuple[int, ...], place: int) -> list[_Life]:
    """Values that are on the board at a place and are used later."""
    placed: dict[int, int] = {}
    for t in range(place + 1):
        for v in game.outputs[row[t]]:
            placed[v] = t
    found: list[_Life] = []
    open_ = dict(placed)
    for t in range(place + 1, len(row)):
        for v in game.inputs[row[t]]:
            if v in open_:
                found.append(_Life(v, open_.pop(v)))
        for v in game.outputs[row[t]]:
            open_.pop(v, None)
    return found


def _seconds(game: Game, v: int, there: set[int]) -> float:
    """Seconds to bring a value back, given the values on the board (``there``)."""
    total, seen, stack = 0.0, {v}, [v]
    while stack:
        u = stack.pop()
        q = int(game.producer[u])
        if not game.again[q]:
            f = int(game.fetcher[u])
            total += float(game.seconds[f]) if f >= 0 else float("inf")
            continue
        total += float(game.seconds[q])
        for w in game.inputs[q]:
            if w not in seen and w not in there:
                seen.add(w)
                stack.append(w)
    return total
