"""Runs rounds of annealing over rows in two threads, until the time limit or until none improves.

Round ``k`` of a worker depends only on the graph, the budget, its starts and ``k``, never on the time limit: more time runs
the same rounds and then more of them. The first worker starts from the given order. The second waits for offered rows, and
alternates between mending the most recent ones and its own best row; in graphs of few operators, it also begins anew from an
order of low peak. When programs offer rows, or ask the first worker for its core, depends on the clock, and so do the results.
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
"""Start temperatures of successive rounds, as shares of the graph's seconds."""
_COOLED = 1e-3
"""A round's end temperature as a share of its start temperature."""
_ORDER_HEAT = (0.3, 1e-3)
"""Start and end temperature of rounds that change only the order; their energy is bytes above the budget as a share of it."""
_FIRST_MOVES = (4000, 60)
"""Moves of the first round: a constant, plus a number per operator."""
_LONGEST = 8000
"""Moves per operator of the longest round; until then, each round is twice as long as the one before."""
_MENDING_HEATS = (3e-5, 1e-4, 3e-4)
"""Start temperatures of rounds that mend a good row."""
_FIRM, _FIRMER = 0.3, 10.0
"""Initial weight of the bytes above the budget in such rounds, and the factor on it per round without success (at most three
times)."""
_MENDING = 50
"""Moves per operator of the shortest such round: results from one row vary by more than longer rounds gain."""
_FEW = 1000
"""In graphs of up to this many operators, rounds mend warmer, longer, and from all rows in turn, which finds better rows
there."""
_SEEDED, _MENDING_FEW = 0.03, 200
"""Factor on ``_HEATS`` for these rounds, and moves per operator of the shortest of them."""
_WARM_HEATS, _WARM, _WARM_MOST = (3e-2, 1e-1, 1e-2), 2000, 400_000
"""Start temperatures of the second worker's rounds there that begin anew; moves of the shortest of them, per operator and at
most."""
_SAME_LENGTH = 8
"""Number of mending rounds of equal length before the length doubles."""
_IDLE = (40, 12)
"""Per worker, consecutive rounds without a better row after which it ends, once rounds have their full length (the bound gets
the remaining time)."""
_ORDER_SHARE = 10
"""Rounds that change only the order try this many times the moves of the first round."""


@dataclass(slots=True)
class Hunt:
    """A search for the cheapest row that fits, by two worker threads.

    Attributes:
        annealer: the game and its budget.
        starts: rows to start from; each must be able to run.
        fixed: whether first runs keep their order.
        target_seconds: a row that fits and takes no longer ends the hunt; a bound proven meanwhile may raise it.
        deadline: of :func:`time.monotonic`.
        progress: called with every better row.
        best: the best row so far; None if there is none.
        rounds: number of rows counted so far: results of rounds, starts, and offered or suggested rows.
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
        """Start the workers."""
        for worker in range(_WORKERS):
            thread = threading.Thread(target=self._work, args=(worker,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def offer(self, rows: Sequence[Sequence[int]]) -> None:
        """Offer rows to the second worker. It starts with the first rows offered, and ends its round early for later ones."""
        with self._lock:
            self._offered += rows
        self._asked.set()
        if rows:
            end(self._running[1])

    def suggest(self, rows: Sequence[Sequence[int]]) -> None:
        """Consider rows as answers as they are; no worker mends them."""
        self._counted(rows)

    def demand(self, seconds: float) -> None:
        """Raise the target to ``seconds`` after a bound proved that no row takes less."""
        self.target_seconds = max(self.target_seconds, seconds)
        if self.over:
            self._end_rounds()

    def rest(self) -> None:
        """Stop the first worker, which started from the given order, to free its core."""
        self._resting = True
        end(self._running[0])

    def wait(self) -> AnnealedRow:
        """Wait until all workers have ended, and return the best row."""
        for thread in self._threads:
            thread.join()
        self._taken()  # rows offered too late to be mended may still be the best
        assert self.best is not None
        return self.best

    def stop(self) -> None:
        """End the workers now, regardless of the deadline, and wait for them."""
        self.deadline = 0.0
        self._asked.set()
        self._end_rounds()
        for thread in self._threads:
            thread.join()

    @property
    def fits(self) -> bool:
        """Whether a row that fits the budget was found."""
        return self.best is not None and not self.best.over_bytes

    @property
    def over(self) -> bool:
        """Whether the target is met or the deadline has passed."""
        found = self.best
        met = found is not None and not found.over_bytes and found.seconds <= self.target_seconds
        return met or time.monotonic() >= self.deadline

    def within(self, extra_seconds: float) -> bool:
        """Whether a row that fits adds at most ``extra_seconds``."""
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
        """Take the rows that were offered since the last call."""
        with self._lock:
            rows, self._offered = list(dict.fromkeys(map(tuple, self._offered))), []
        return self._counted(rows)

    def _work(self, number: int) -> None:
        plain = self.annealer.game.plain
        first = _FIRST_MOVES[0] + _FIRST_MOVES[1] * plain
        if number:
            self._asked.wait(max(0.0, self.deadline - time.monotonic()))
        worker = _Worker(number, plain, first, self._counted(self.starts))
        worker.take(self._taken() if number else [])
        if not self.fixed and not self.over:
            worker.add(self._ordered(worker.own, number, moves=_ORDER_SHARE * first))
        while not self.over and (number or not self._resting):
            new = self._taken() if number else []
            worker.take(new)
            if worker.begins_anew and worker.fresh is None:
                given = worker.starts[0]
                worker.fresh = given if self.fixed else self._ordered(given, number, moves=first)
            asked = worker.ask(offered=bool(new))
            found = self._round(
                asked.start.ops,
                asked.moves,
                (asked.heat, asked.heat * _COOLED),
                copies=True,
                seed=number + _WORKERS * (worker.rounds + 1),
                worker=number,
                weight=asked.weight,
            )
            if worker.has_ended(found, asked):
                break

    def _ordered(self, start: AnnealedRow, worker: int, *, moves: int) -> AnnealedRow:
        """A round that changes only the order."""
        return self._round(start.ops, moves, _ORDER_HEAT, copies=False, seed=worker, worker=worker)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A round: the row that it starts from, its moves, its start temperature and its weight (None: the usual one)."""

    start: AnnealedRow
    moves: int
    heat: float
    weight: float | None = None


@dataclass(slots=True)
class _Worker:
    """Decides what each round of one worker starts from.

    Attributes:
        number: 0 for the worker that starts from the given order, 1 for the one that mends.
        plain: operators of the graph.
        first: moves of the first round.
        starts: rows to start from; the given order is the first.
        near: the rows that were offered last.
        fresh: the row from which the second worker begins anew in graphs of few operators; made when first needed.
        rounds, mends, long: how many rounds, rounds that mended, and other rounds were asked for.
        mended, annealed: moves of both kinds.
        idle: consecutive rounds without a better row.
    """

    number: int
    plain: int
    first: int
    starts: list[AnnealedRow]
    own: AnnealedRow = field(init=False)
    near: list[AnnealedRow] = field(default_factory=list)
    fresh: AnnealedRow | None = None
    rounds: int = 0
    mends: int = 0
    long: int = 0
    mended: int = 0
    annealed: int = 0
    idle: int = 0

    def __post_init__(self) -> None:
        self.own = min(self.starts, key=lambda f: f.rank)

    @property
    def few(self) -> bool:
        return self.plain <= _FEW

    @property
    def mends_next(self) -> bool:
        """Whether the next round mends: in graphs of few operators, half of the moves begin anew."""
        return bool(self.near) and (not self.few or self.mended <= self.annealed)

    @property
    def begins_anew(self) -> bool:
        """Whether the next round starts from a fresh order of low peak."""
        return bool(self.near) and self.few and not self.mends_next

    def add(self, row: AnnealedRow) -> None:
        """Start from one more row."""
        self.starts.append(row)
        self.own = min(self.own, row, key=lambda f: f.rank)

    def take(self, offered: list[AnnealedRow]) -> None:
        """Mend the rows offered, from the next round on."""
        if not offered:
            return
        first = not self.near
        self.near, self.mends = offered, 0
        if first or not self.few:
            self.own = min(self.own, *offered, key=lambda f: f.rank)
        self.starts += offered if self.few else []

    def ask(self, *, offered: bool) -> _Asked:
        """The next round; ``offered`` says whether rows were offered since the last one."""
        k, plain = self.rounds, self.plain
        start = self.own if k % 2 else self.starts[-1 - k // 2 % len(self.starts)]
        heat = _HEATS[(k + self.number) % len(_HEATS)]
        moves, weight = self.first << min(self.long, 40), None
        mending = self.mends_next or (offered and self.few)
        if mending and self.few:
            start = self.near[-1] if offered else start
            heat, weight, moves = heat * _SEEDED, _FIRM, _MENDING_FEW * plain << self.mends // _SAME_LENGTH
        elif mending:
            start = self.own if self.mends % 2 else self.near[self.mends // 2 % len(self.near)]
            heat = _MENDING_HEATS[self.mends // 2 % len(_MENDING_HEATS)]
            weight = _FIRM * (_FIRMER ** min(self.idle, 3) if start.over_bytes and self.mends % 2 else 1)
            moves = _MENDING * plain << self.mends // _SAME_LENGTH
        elif self.begins_anew and self.fresh is not None:
            start, heat = self.fresh, _WARM_HEATS[self.long % len(_WARM_HEATS)]
            moves = max(moves, min(_WARM * plain, _WARM_MOST))
        moves = min(moves, _LONGEST * plain)
        if mending:
            self.mends, self.mended = self.mends + 1, self.mended + moves
        else:
            self.long, self.annealed = self.long + 1, self.annealed + moves
        return _Asked(start=start, moves=moves, heat=heat, weight=weight)

    def has_ended(self, found: AnnealedRow, asked: _Asked) -> bool:
        """Count a round's result; whether rounds have their full length and too many brought nothing."""
        self.rounds += 1
        self.idle = 0 if found.rank < self.own.rank else self.idle + 1
        self.own = min(self.own, found, key=lambda f: f.rank)
        return asked.moves == _LONGEST * self.plain and self.idle >= _IDLE[self.number]


def lowest_order(game: Game, *, deadline: float, stop_bytes: int, first_peak: int) -> tuple[int, ...]:
    """An order of low peak in which every operator runs once.

    Each round sets its budget below the best peak so far; the step halves whenever nothing fits.

    Args:
        game: the game.
        deadline: of :func:`time.monotonic`.
        stop_bytes: lower bound on the peak of every order; the search ends there.
        first_peak: peak of the given order in bytes.
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
