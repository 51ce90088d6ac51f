"""Rounds of annealing over rows, on two cores, until the time is over or nothing better is left to find.

What round ``k`` of a worker does depends on the graph, the budget, its starts and ``k`` alone, never on the time limit:
more time runs the same rounds and then more of them. The first worker begins from the given order, the second waits for
rows that are offered, and mends the last of these in turn with the best that it has. When programs offer rows, or ask the
first worker for its core, depends on the clock, and so does what comes of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lowtide.planning.graph_arrays import Game
from lowtide.planning.search.annealing import AnnealedRow, Annealer, end

_WORKERS = 2
_HEATS = (1e-2, 3e-3, 3e-2, 1e-3)
"""Temperatures at which rounds begin, as shares of the graph's seconds, in turn."""
_COOLED = 1e-3
"""A round ends at this share of the temperature at which it began."""
_ORDER_HEAT = (0.3, 1e-3)
"""Temperatures of rounds that change the order alone, where energy is bytes above the budget as shares of the budget."""
_FIRST_MOVES = (4000, 60)
"""Moves of the first round: so many, and so many per operator."""
_LONGEST = 8000
"""Moves per operator of the longest round; before it each is twice as long as the one before."""
_MENDING_HEATS = (3e-5, 1e-4, 3e-4)
"""Temperatures at which rounds begin that mend a good row."""
_FIRM, _FIRMER = 0.3, 10.0
"""Weight of the bytes above the budget at first in such rounds, and how much more it is after one in vain."""
_MENDING = 50
"""Moves per operator of the shortest of them: what comes of one row differs by more than longer ones gain."""
_FEW = 1000
"""Operators up to which rounds mend warmer, longer, and from all rows in turn: there these find what the others miss."""
_SEEDED, _MENDING_FEW = 0.03, 200
"""Share of the temperature at which these begin, and moves per operator of the shortest."""
_SAME_LENGTH = 8
"""So many of them are as long as each other before they double."""
_IDLE = (40, 12)
"""Rounds without a better row after which a worker ends (what is left of the time is the bound's)."""
_ORDER_SHARE = 10
"""Rounds that change the order alone try so many times the moves of the first round."""


@dataclass(slots=True)
class Hunt:
    """What is looked for, shared by the workers.

    Attributes:
        annealer: the game and its budget.
        starts: rows to begin from, each one that can run.
        fixed: whether first runs keep their order.
        target_seconds: a row that fits in so few ends the hunt; a bound proven meanwhile may raise it.
        deadline: of :func:`time.monotonic`.
        progress: told of every better row.
    """

    annealer: Annealer
    starts: Sequence[Sequence[int]]
    fixed: bool
    target_seconds: float
    deadline: float
    progress: Callable[[AnnealedRow], None] | None = None
    best: AnnealedRow | None = None
    rounds: int = 0
    _offered: list[Sequence[int]] = field(default_factory=list)
    _asked: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _threads: list[threading.Thread] = field(default_factory=list)
    _running: list[list[Any]] = field(default_factory=lambda: [[] for _ in range(_WORKERS)])
    _resting: bool = False

    def start(self) -> None:
        """Set the workers to work."""
        for worker in range(_WORKERS):
            thread = threading.Thread(target=self._work, args=(worker,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def offer(self, rows: Sequence[Sequence[int]]) -> None:
        """Rows for the second worker, which waits for the first of them, and leaves what it does for the others."""
        with self._lock:
            self._offered += rows
        self._asked.set()
        if rows:
            end(self._running[1])

    def suggest(self, rows: Sequence[Sequence[int]]) -> None:
        """Rows that may be the answer as they are."""
        self._counted(rows)

    def demand(self, seconds: float) -> None:
        """A bound was proven: who looks for rows of fewer seconds has done with one of so many."""
        self.target_seconds = max(self.target_seconds, seconds)
        if self.over:
            self._end_rounds()

    def rest(self) -> None:
        """Leave the core of the first worker, which has begun from the given order, to others."""
        self._resting = True
        end(self._running[0])

    def wait(self) -> AnnealedRow:
        """The best row, when all workers have ended."""
        for thread in self._threads:
            thread.join()
        self._taken()  # what came too late to be mended may be the best as it is
        assert self.best is not None
        return self.best

    def stop(self) -> None:
        """Let the workers end, whatever is left of the time."""
        self.deadline = 0.0
        self._asked.set()
        self._end_rounds()
        for thread in self._threads:
            thread.join()

    @property
    def fits(self) -> bool:
        """Whether a row that fits was found."""
        return self.best is not None and not self.best.over_bytes

    @property
    def over(self) -> bool:
        """Whether the target is met or the time is over."""
        found = self.best
        met = found is not None and not found.over_bytes and found.seconds <= self.target_seconds
        return met or time.monotonic() >= self.deadline

    def within(self, extra_seconds: float) -> bool:
        """Whether a row that fits adds no more than so much."""
        found = self.best
        return found is not None and not found.over_bytes and found.seconds <= self.annealer.game.base_seconds + extra_seconds

    def _tell(self, found: AnnealedRow) -> None:
        with self._lock:
            self.rounds += 1
            if self.best is None or found.rank < self.best.rank:
                self.best = found
                if self.progress is not None:
                    self.progress(found)
        if self.over:
            self._end_rounds()

    def _end_rounds(self) -> None:
        for rounds in self._running:
            end(rounds)

    def _counted(self, rows: Sequence[Sequence[int]]) -> list[AnnealedRow]:
        found = [self.annealer.count(row) for row in rows]
        for one in found:
            self._tell(one)
        return found

    def _taken(self) -> list[AnnealedRow]:
        """What was offered and not yet taken."""
        with self._lock:
            rows, self._offered = list(dict.fromkeys(map(tuple, self._offered))), []
        return self._counted(rows)

    def _work(self, worker: int) -> None:
        plain = self.annealer.game.plain
        first = _FIRST_MOVES[0] + _FIRST_MOVES[1] * plain
        if worker:
            self._asked.wait(max(0.0, self.deadline - time.monotonic()))
        starts = self._counted(self.starts)
        near = self._taken() if worker else []
        own = min(starts + near, key=lambda f: f.rank)
        few = plain <= _FEW
        starts += near if few else []
        if not self.fixed and not self.over:
            ordered = self._round(own.ops, _ORDER_SHARE * first, _ORDER_HEAT, copies=False, seed=worker, worker=worker)
            starts.append(ordered)
            own = min(own, ordered, key=lambda f: f.rank)
        k = mends = idle = 0
        while not self.over and (worker or not self._resting):
            new = self._taken() if worker else []
            if new:
                near, mends = new, 0
                own = own if few else min(own, *new, key=lambda f: f.rank)
                starts += new if few else []
            heat, weight = _HEATS[(k + worker) % len(_HEATS)], None
            moves = first << min(k, 40)
            start = own if k % 2 else starts[-1 - k // 2 % len(starts)]
            if near and few:
                start = new[-1] if new else start
                heat, weight, moves = heat * _SEEDED, _FIRM, _MENDING_FEW * plain << k // _SAME_LENGTH
            elif near:
                start = own if mends % 2 else near[mends // 2 % len(near)]
                heat = _MENDING_HEATS[mends // 2 % len(_MENDING_HEATS)]
                weight = _FIRM * (_FIRMER ** min(idle, 3) if start.over_bytes and mends % 2 else 1)
                moves = _MENDING * plain << mends // _SAME_LENGTH
                mends += 1
            moves = min(moves, _LONGEST * plain)
            found = self._round(
                start.ops,
                moves,
                (heat, heat * _COOLED),
                copies=True,
                seed=worker + _WORKERS * (k + 1),
                worker=worker,
                weight=weight,
            )
            idle = 0 if found.rank < own.rank else idle + 1
            own = min(own, found, key=lambda f: f.rank)
            if moves == _LONGEST * plain and idle >= _IDLE[worker]:
                break
            k += 1

    def _round(
        self,
        ops: Sequence[int],
        moves: int,
        heat: tuple[float, float],
        *,
        copies: bool,
        seed: int,
        worker: int,
        weight: float | None = None,
    ) -> AnnealedRow:
        found = self.annealer.round(
            ops,
            moves=moves,
            hot=heat[0],
            cold=heat[1],
            copies=copies,
            seed=seed + 1,
            deadline=self.deadline,
            target_seconds=self.target_seconds,
            weight=weight,
            running=self._running[worker],
        )
        self._tell(found)
        return found


def lowest_order(game: Game, *, deadline: float, stop_bytes: int, first_peak: int) -> tuple[int, ...]:
    """An order of low peak, every operator once.

    The budget is lowered below the best peak again and again; the step halves where nothing fits.

    Args:
        game: what is played.
        deadline: of :func:`time.monotonic`.
        stop_bytes: a peak that no order goes below.
        first_peak: peak of the given order.
    """
    from lowtide.planning.graph_arrays import profile

    best, peak = game.given, first_peak
    step, seed = 0.1, 1
    moves = _ORDER_SHARE * (_FIRST_MOVES[0] + _FIRST_MOVES[1] * game.plain)
    while peak > stop_bytes and time.monotonic() < deadline:
        budget = max(stop_bytes, int(peak * (1 - step)))
        found = Annealer(game, budget, fixed=False).round(
            best,
            moves=moves,
            hot=_ORDER_HEAT[0],
            cold=_ORDER_HEAT[1],
            copies=False,
            seed=seed,
            deadline=deadline,
            target_seconds=float("inf"),
        )
        seed += 1
        reached = int(profile(game, found.ops).max())
        if reached < peak:
            best, peak = found.ops, reached
        if reached > budget:
            step /= 2
            if step < 1e-5:
                step, moves = 0.01, 2 * moves
    return best
