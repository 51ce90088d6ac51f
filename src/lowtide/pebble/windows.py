"""The program of several instants, with rows for what runs between two of them that are not neighbours.

Relaxed, the rows of neighbours alone say little: half a run in one stretch and half in the next are a whole run, of which
each asks for half of what it reads. A *window* is the time from one of the instants to any later one, or to the end. What runs
again in it at all, once or more often, reads what is there at its beginning, or is placed in it; and what is there at its end
was there at its beginning, or is placed in it. There are many such rows; those join that a relaxed answer breaks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import final

import numpy as np
from numpy.typing import NDArray

from lowtide.pebble.before import Instant, Precedence
from lowtide.pebble.bound import Program, TimeBound, again_for, chosen, fetch_in, run_in, stages
from lowtide.pebble.game import Game

_ROUNDS = 8
"""How often rows join, at most."""
_RAISED = 3e-3
"""Nor where they raised what is proven by a smaller share of it."""
_BROKEN = 1e-3
"""A row that a relaxed answer breaks by less does not join."""
_NEARLY = 0.1
"""A variable so near to a whole number is one, where the others are looked for: what is nearer than 1e-4 alone left programs
that took five times as long; at 0.2 some answers were a third dearer."""
_HALF = 0.5
"""What a relaxed answer has on the board by less than this is absent, where nothing better was found."""

Answer = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Window:
    """From the instant ``start`` to the instant ``end``, by their numbers; ``end`` is their count for the schedule's end."""

    start: int
    end: int

    @property
    def stretches(self) -> range:
        """Numbers of the stretches between neighbours that it is made of."""
        return range(self.start + 1, self.end + 1)


@final
class Chain:
    """Comparable instants, in order, and what they prove together.

    Attributes:
        program: it, with the rows that have joined.
        joined: of which windows and values these are.
    """

    def __init__(
        self,
        game: Game,
        precedence: Precedence,
        tight: Sequence[Instant],
        budget_bytes: int,
        *,
        like: Chain | None = None,
        light: AbstractSet[int] = frozenset(),
    ) -> None:
        """Nothing is proven yet.

        Args:
            game: what is played.
            precedence: of it.
            tight: the instants, in order.
            budget_bytes: the peak that may not be crossed.
            like: of some of the instants; rows that joined its program join this one at once.
            light: values that are taken for 0 bytes.
        """
        self.game = game
        self.tight = tight
        self.light = light
        self.program: Program = stages(game, precedence, tight, budget_bytes, light=light)
        self._made = [[v for v in np.nonzero(at.done[game.producer])[0].tolist() if v not in light] for at in tight]
        self._wanted = [precedence.forced(at) & ~precedence.stuck(at) for at in tight]
        again = again_for(game, light)
        self._again = [np.nonzero(at.done & again)[0].tolist() for at in tight]
        self.joined: dict[tuple[_Window, int], None] = {}
        self._asked: list[int] = []
        self._proven: float = 0.0 if like is None else like._proven
        self._relaxed: Answer | None = None
        self._known: Answer | None = None
        if like is not None:
            self._join_as_in(like)

    def relax(self, *, seconds: float, rounds: int = _ROUNDS) -> TimeBound:
        """What the relaxed program proves, as rows join it so often; nothing is said of what would be absent."""
        deadline = time.monotonic() + seconds
        for _ in range(rounds):
            if self._relaxed is not None and not self._tighten(self._relaxed):
                break
            found = self.program.solve(deadline - time.monotonic(), whole=False)
            if found.x is None:
                break
            raised = found.value - self._proven
            self._proven, self._relaxed = max(self._proven, found.value), found.x
            if time.monotonic() >= deadline or raised < _RAISED * found.value:
                break
        return self.proven

    def rounded(self) -> TimeBound:
        """The same, with what the relaxed answer has on the board by less than half as absent; that fits it only nearly."""
        bound = self.proven
        if self._relaxed is None:
            return bound
        return replace(bound, **chosen(self.program, self._relaxed, self.tight, least=_HALF))

    def dive(self, *, seconds: float, gap: float = 0.0) -> TimeBound:
        """The same, with a whole answer near the relaxed one: what that has on the board nearly wholly, or hardly, stays so.

        What runs again follows from what is on the board, and need not be asked to be whole.
        """
        bound = self.proven
        if self._relaxed is None:
            return bound
        settled = {
            j: round(self._relaxed[j])
            for name, j in self.program.index.items()
            if name[0] == "on" and j < len(self._relaxed) and abs(self._relaxed[j] - round(self._relaxed[j])) < _NEARLY
        }
        runs = [j for name, j in self.program.index.items() if name[0] == "run"]
        found = self.program.solve(seconds, gap=gap, settled=settled, real=runs)
        if found.x is None:
            return self.rounded()
        self._known = found.x
        return replace(bound, **chosen(self.program, found.x, self.tight))

    def whole(self, *, seconds: float, gap: float = 0.0) -> TimeBound:
        """What the program proves with whole variables, and its answer."""
        if self._relaxed is not None:
            self._tighten(self._relaxed)
        found = self.program.solve(seconds, gap=gap, start=self._known)
        self._proven = max(self._proven, found.value)
        bound = self._bound(ended=found.ended)
        return bound if found.x is None else replace(bound, **chosen(self.program, found.x, self.tight))

    @property
    def proven(self) -> TimeBound:
        """What was proven so far."""
        return self._bound(ended=False)

    def _bound(self, *, ended: bool) -> TimeBound:
        nodes = tuple(self.game.nodes[at.op] for at in self.tight)
        base = self.game.base_seconds or 1.0
        rows = tuple((w.start, w.end, self.game.value_nodes[v]) for w, v in self.joined)
        return TimeBound(seconds=self._proven * base, method="chain", solved=ended, nodes=nodes, windows=rows)

    def _tighten(self, answer: Answer) -> bool:
        """Let rows join that a relaxed answer breaks; whether there were any."""
        joined = False
        for window, runs in self._windows(answer):
            for v in self._broken(window, runs, answer):
                if (window, v) not in self.joined:
                    self._join(window, v)
                    joined = True
        return joined

    def _windows(self, answer: Answer) -> Iterator[tuple[_Window, Answer]]:
        """Every window, and how much of what an answer has run again in it counts as one run of each operator."""
        index, count = self.program.index, len(self.tight)
        for start in range(count):
            total = np.zeros(self.game.plain)
            for end in range(start + 1, count + 1):
                for o in self._again[start]:
                    j = index.get(("run", end, o))
                    if j is not None:
                        total[o] += answer[j]
                yield _Window(start, end), np.minimum(1.0, total)

    def _broken(self, window: _Window, runs: Answer, answer: Answer) -> list[int]:
        """Values of which an answer has more at a window's end than was there at its beginning or is placed within it."""
        game, index = self.game, self.program.index
        start, again = window.start, game.again

        def there(v: int) -> float | None:
            j = index.get(("on", start, v))
            if j is None:
                return None
            fetched = 0.0
            if game.fetcher[v] >= 0:
                ways = (index.get(("fetch", t, v)) for t in window.stretches)
                fetched = sum(float(answer[k]) for k in ways if k is not None)
            o = int(game.producer[v])
            return float(answer[j]) + fetched + (float(runs[o]) if again[o] else 0.0)

        for o in self._again[start]:
            if runs[o] > 0:
                for p in game.inputs[o]:
                    have = there(p)
                    if have is not None and have < runs[o]:
                        runs[o] = have
        broken = []
        for v in self._made[start]:
            want = self._want(window, v, answer)
            have = there(v) if want > _BROKEN else None
            if have is not None and want - have > _BROKEN:
                broken.append(v)
        return broken

    def _want(self, window: _Window, v: int, answer: Answer) -> float:
        """How much of a value an answer has on the board at a window's end; at the schedule's, whether it must come back."""
        if window.end == len(self.tight):
            return float(self._wanted[window.start][v])
        j = self.program.index.get(("on", window.end, v))
        return 0.0 if j is None else float(answer[j])

    def _join_as_in(self, like: Chain) -> None:
        ends = {at.op: t for t, at in enumerate(self.tight)}
        place = [*(ends.get(at.op, -1) for at in like.tight), len(self.tight)]
        for window, v in like.joined:
            here = _Window(place[window.start], place[window.end])
            known = here.start >= 0 and here.end >= 0 and ("on", here.start, v) in self.program.index
            if known and (here.end == len(self.tight) or ("on", here.end, v) in self.program.index):
                self._join(here, v)

    def _join(self, window: _Window, v: int) -> None:
        """The row of a value and a window, with those of the operators that it asks to run again in it."""
        program, index = self.program, self.program.index
        self.joined[window, v] = None
        terms = {index["on", window.start, v]: 1.0} | self._placed(window, v)
        if window.end == len(self.tight):
            program.row(terms, 1.0)
        else:
            program.row(terms | {index["on", window.end, v]: -1.0}, 0.0)
        while self._asked:
            o = self._asked.pop()
            again = self._again_in(window, o)
            for p in self.game.inputs[o]:
                j = index.get(("on", window.start, p))
                if j is not None:
                    program.row({j: 1.0} | self._placed(window, p) | {again: -1.0}, 0.0)

    def _placed(self, window: _Window, v: int) -> dict[int, float]:
        """Variables that place a value within a window."""
        o = int(self.game.producer[v])
        found = {self._again_in(window, o): 1.0} if self.game.again[o] else {}
        for t in window.stretches:
            j = fetch_in(self.program, self.game, t, v)
            if j is not None:
                found[j] = 1.0
        return found

    def _again_in(self, window: _Window, o: int) -> int:
        """The variable for an operator running again in a window at all."""
        name = ("again", window, o)
        known = self.program.index.get(name)
        if known is not None:
            return known
        again = self.program.variable(name, whole=False)
        runs = {run_in(self.program, self.game, t, o): 1.0 for t in window.stretches}
        self.program.row(runs | {again: -1.0}, 0.0)
        self._asked.append(o)
        return again


def chain_seconds(
    game: Game, precedence: Precedence, tight: Sequence[Instant], budget_bytes: int, *, seconds: float, gap: float = 0.0
) -> TimeBound:
    """Extra seconds that several comparable instants prove together, in order; within a relative gap if that is quicker."""
    deadline = time.monotonic() + seconds
    chain = Chain(game, precedence, tight, budget_bytes)
    relaxed = chain.relax(seconds=seconds)
    left = deadline - time.monotonic()
    return chain.whole(seconds=left, gap=gap) if left > 0 else relaxed
