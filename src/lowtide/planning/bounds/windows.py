"""The program of several instants, strengthened with rows for windows that span several stretches.

Relaxed, the rows between neighboring instants alone prove little: half a run in one stretch and half in the next add up to a
whole run, while each requires only half of its inputs. A *window* is the time from one instant to any later one, or to the
end. An operator that runs again in a window, once or more often, reads values that were on the board at the window's beginning
or are placed within it. A value on the board at the window's end was there at its beginning or is placed within it. There are
many such rows, so only those that a relaxed answer violates are added.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import final

import numpy as np
from numpy.typing import NDArray

from lowtide.planning.bounds.bound_program import Program, Solved
from lowtide.planning.bounds.precedence import Instant, Precedence
from lowtide.planning.bounds.program_points import again_for, fetch_in, run_in, stages
from lowtide.planning.bounds.time_bounds import TimeBound, chosen
from lowtide.planning.graph_arrays import Game

_ROUNDS = 8
"""Largest number of rounds in which violated rows are added."""
_RAISED = 3e-3
"""No further rows are added once a round raises the bound by less than this share of it."""
_BROKEN = 1e-3
"""A row is added only if a relaxed answer violates it by more than this."""
_NEARLY = (0.1, 0.01, 1e-3)
"""Distances from a whole number within which :meth:`Chain.dive` settles a variable before it solves for the others. It tries
the next distance if one leaves no answer. With 1e-4 the remaining programs took five times as long; with 0.2 some answers cost
a third more."""
_HALF = 0.5
"""If no better answer is found, values that the relaxed answer has on the board by less than this count as absent."""

Answer = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Window:
    """From instant ``start`` to instant ``end``, by index; ``end`` is the number of instants for the schedule's end."""

    start: int
    end: int

    @property
    def stretches(self) -> range:
        """Indices of the stretches between neighboring instants that make up the window."""
        return range(self.start + 1, self.end + 1)


@dataclass(frozen=True, slots=True)
class _LaidOut:
    """A relaxed answer as arrays; its entries are shares from 0 to 1.

    Attributes:
        on: [instants, values], how much of the value is on the board; NaN where the program has no variable.
        runs: [stretches, operators], how much of a run the operator runs again.
        fetched: [stretches, values], how much of the value is fetched.
    """

    on: Answer
    runs: Answer
    fetched: Answer


@final
class Chain:
    """Comparable instants, in order, and the bound that they prove together.

    Attributes:
        program: the program, with the window rows that were added.
        joined: the windows and values of these rows.
        took: seconds that the last relaxed solve took.
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
        """Set up the program; nothing is proven yet.

        Args:
            game: the game.
            precedence: of the game.
            tight: the instants, in order.
            budget_bytes: the peak that no schedule may exceed.
            like: a chain of some of these instants; the window rows of its program are added at once.
            light: values that count as 0 bytes.
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
        self.took = 0.0
        self._asked: list[int] = []
        self._proven = 0.0
        self._relaxed: Answer | None = None
        self._known: Answer | None = None
        if like is not None:
            self._join_as_in(like)

    def relax(self, *, seconds: float, rounds: int = _ROUNDS) -> TimeBound:
        """Solve the relaxed program up to ``rounds`` times, adding violated rows in between, and return the bound.

        The bound does not say which values would be absent.
        """
        deadline = time.monotonic() + seconds
        for _ in range(rounds):
            if time.monotonic() >= deadline:
                break
            if self._relaxed is not None and not self._tighten(self._relaxed):
                break
            began = time.monotonic()
            found = self.program.solve(deadline - began, whole=False)
            self.took = time.monotonic() - began
            if found.x is None:
                break
            raised = found.value - self._proven
            self._proven, self._relaxed = max(self._proven, found.value), found.x
            if raised < _RAISED * found.value:
                break
        return self.proven

    def rounded(self) -> TimeBound:
        """The bound, with the values that the relaxed answer has on the board by less than half as absent.

        The rounded answer meets the program's rows only approximately.
        """
        bound = self.proven
        if self._relaxed is None:
            return bound
        return replace(bound, **chosen(self.program, self._relaxed, self.tight, least=_HALF))

    def dive(
        self, *, seconds: float, gap: float = 0.0, tell: Callable[[TimeBound, float], None] | None = None
    ) -> TimeBound:
        """The bound, with a whole answer near the relaxed one: values almost entirely on the board, or off it, stay so.

        Runs follow from what is on the board, so their variables need not be whole. If there is no such answer, returns that
        of :meth:`rounded`.

        Args:
            seconds: time limit.
            gap: relative gap to the best such answer within which the solver may stop.
            tell: called with every better answer as it comes, and its extra seconds as a share of the graph's.
        """
        bound = self.proven
        if self._relaxed is None or seconds <= 0:
            return bound
        deadline = time.monotonic() + seconds
        runs = [j for name, j in self.program.index.items() if name[0] == "run"]
        for nearly in _NEARLY:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            settled = self._settled(self._relaxed, nearly)
            found = self.program.solve(left, gap=gap, settled=settled, real=runs, tell=self._teller(tell))
            if found.x is not None:
                self._known = found.x
                return replace(bound, **chosen(self.program, found.x, self.tight))
        return self.rounded()

    def _settled(self, answer: Answer, nearly: float) -> dict[int, float]:
        """The ``on`` variables of an answer that are closer than ``nearly`` to a whole number, with that number."""
        on = np.asarray([j for name, j in self.program.index.items() if name[0] == "on" and j < len(answer)], dtype=int)
        near = on[np.abs(answer[on] - np.round(answer[on])) < nearly]
        return dict(zip(near.tolist(), np.round(answer[near]).tolist(), strict=True))

    def whole(
        self, *, seconds: float, gap: float = 0.0, tell: Callable[[TimeBound, float], None] | None = None
    ) -> TimeBound:
        """The bound of the program with whole variables, and its answer; the arguments are those of :meth:`dive`."""
        if seconds <= 0:
            return self.proven
        if self._relaxed is not None:
            self._tighten(self._relaxed)
        found = self.program.solve(seconds, gap=gap, start=self.start(), tell=self._teller(tell))
        self._proven = max(self._proven, found.value)
        bound = self._bound(ended=found.ended)
        return bound if found.x is None else replace(bound, **chosen(self.program, found.x, self.tight))

    def start(self) -> Answer | None:
        """The last answer of :meth:`dive`, extended by the variables of the rows that were added since; None if there is none.

        These variables say whether an operator runs again in a window.
        """
        if self._known is None:
            return None
        size = len(self._known)
        start = np.concatenate([self._known, np.zeros(len(self.program.cost) - size)])
        for name, j in self.program.index.items():
            if j >= size and name[0] == "again":
                _, window, o = name
                runs = (self.program.index.get(("run", t, o)) for t in window.stretches)
                start[j] = min(1.0, sum(float(start[k]) for k in runs if k is not None))
        return start

    @property
    def ops(self) -> frozenset[int]:
        """The operators whose first runs are the instants."""
        return frozenset(at.op for at in self.tight)

    @property
    def proven(self) -> TimeBound:
        """The bound proven so far."""
        return self._bound(ended=False)

    def _teller(self, tell: Callable[[TimeBound, float], None] | None) -> Callable[[Solved], None] | None:
        if tell is None:
            return None
        return lambda found: tell(replace(self.proven, **chosen(self.program, found.x, self.tight)), found.cost)

    def _bound(self, *, ended: bool) -> TimeBound:
        nodes = tuple(self.game.nodes[at.op] for at in self.tight)
        base = self.game.base_seconds or 1.0
        rows = tuple((w.start, w.end, self.game.value_nodes[v]) for w, v in self.joined)
        return TimeBound(seconds=self._proven * base, method="chain", solved=ended, nodes=nodes, windows=rows)

    def _tighten(self, answer: Answer) -> bool:
        """Add the window rows that a relaxed answer violates; returns whether there were any."""
        joined = False
        laid = self._laid_out(answer)
        for window, runs in self._windows(laid):
            for v in self._broken(window, runs, laid):
                if (window, v) not in self.joined:
                    self._join(window, v)
                    joined = True
        return joined

    def _laid_out(self, answer: Answer) -> _LaidOut:
        count, values = len(self.tight), len(self.game.value_nodes)
        laid = _LaidOut(
            on=np.full((count, values), np.nan),
            runs=np.zeros((count + 1, self.game.plain)),
            fetched=np.zeros((count + 1, values)),
        )
        arrays = {"on": laid.on, "run": laid.runs, "fetch": laid.fetched}
        for name, j in self.program.index.items():
            if j < len(answer) and name[0] in arrays:
                arrays[name[0]][name[1], name[2]] = answer[j]
        return laid

    def _windows(self, laid: _LaidOut) -> Iterator[tuple[_Window, Answer]]:
        """Every window, with how much each operator runs again in it according to an answer, at most 1."""
        count = len(self.tight)
        for start in range(count):
            total = np.zeros(self.game.plain)
            here = self._again[start]
            for end in range(start + 1, count + 1):
                total[here] += laid.runs[end, here]
                yield _Window(start, end), np.minimum(1.0, total)

    def _broken(self, window: _Window, runs: Answer, laid: _LaidOut) -> list[int]:
        """Values that are on the board at a window's end by more than what was there at its beginning or is placed in it.

        ``runs`` is lowered in place where an operator lacks inputs for as much of a run.
        """
        game, start = self.game, window.start
        again = game.again[game.producer]
        before = laid.on[start] + laid.fetched[start + 1 : window.end + 1].sum(axis=0)
        have = before + np.where(again, runs[game.producer], 0.0)
        for o in self._again[start]:
            if runs[o] > 0:
                least = min((have[p] for p in game.inputs[o] if have[p] < runs[o]), default=None)
                if least is not None:
                    runs[o] = least
                    made = list(game.outputs[o])
                    have[made] = before[made] + least
        last = window.end == len(self.tight)
        want = self._wanted[start].astype(float) if last else np.nan_to_num(laid.on[window.end])
        made_before = self._made[start]
        short = (want > _BROKEN) & (want - have > _BROKEN)
        return [v for v in made_before if short[v]]

    def _join_as_in(self, like: Chain) -> None:
        ends = {at.op: t for t, at in enumerate(self.tight)}
        place = [*(ends.get(at.op, -1) for at in like.tight), len(self.tight)]
        for window, v in like.joined:
            here = _Window(place[window.start], place[window.end])
            known = here.start >= 0 and here.end >= 0 and ("on", here.start, v) in self.program.index
            if known and (here.end == len(self.tight) or ("on", here.end, v) in self.program.index):
                self._join(here, v)

    def _join(self, window: _Window, v: int) -> None:
        """Add the row of a value and a window, and the rows of the operators that it requires to run again in the window."""
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
        """Variables that place a value on the board within a window."""
        o = int(self.game.producer[v])
        found = {self._again_in(window, o): 1.0} if self.game.again[o] else {}
        for t in window.stretches:
            j = fetch_in(self.program, self.game, t, v)
            if j is not None:
                found[j] = 1.0
        return found

    def _again_in(self, window: _Window, o: int) -> int:
        """The variable for an operator running again at least once in a window."""
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
    """The lower bound on extra seconds from several comparable instants, in order; the solver may stop within ``gap``."""
    deadline = time.monotonic() + seconds
    chain = Chain(game, precedence, tight, budget_bytes)
    relaxed = chain.relax(seconds=seconds)
    left = deadline - time.monotonic()
    return chain.whole(seconds=left, gap=gap) if left > 0 else relaxed
