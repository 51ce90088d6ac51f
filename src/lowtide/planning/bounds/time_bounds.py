"""Lower bounds on extra seconds, each with the program points that prove it.

See ``docs/planner.md`` for the proofs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from lowtide.planning.bounds import instant_cut
from lowtide.planning.bounds.bound_program import WHOLE, Program, Solved
from lowtide.planning.bounds.instant_cut import CutAnswer, InstantCut
from lowtide.planning.bounds.order_cut import OrderCut
from lowtide.planning.bounds.peak_bounds import looked_at
from lowtide.planning.bounds.precedence import Instant, Precedence, chain
from lowtide.planning.bounds.program_points import stages
from lowtide.planning.graph_arrays import Game

_WEIGHED = 24
"""Largest number of single instants whose relaxed programs are compared."""
_SOLVED = 3
"""How many of them are solved with all variables whole, the highest instant included."""
_WEIGHED_SHARE, _WEIGHED_SECONDS = 0.25, 1.5
"""Share of the time, and seconds, after which no further instant is relaxed."""
_HARDER = 30
"""A program is solved with whole variables only if the time left exceeds its relaxed solve by this factor: HiGHS does not
always look at the clock."""
_TRIED, _TRIED_SECONDS = 10, 2.0
"""Time limit with whole variables: the larger of 10x the relaxed solve and 2 s, but at most half the time left. Most programs
that end in time end sooner."""
_PRICED = 2.0
"""Time limit, in seconds, of each of the two programs behind a price."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeBound:
    """A lower bound on the extra seconds of every schedule within a budget.

    Attributes:
        seconds: the bound.
        method: ``none``, ``instants`` (each instant's values against the budget), ``instant`` (one instant, with everything
            that must run again to bring absent values back), ``order`` (the same over all sets of operators that may have run
            by then), ``chain`` (what must be on the board from one instant to the next), ``search`` (exhaustive search of all
            schedules).
        solved: whether the program was solved to optimality; otherwise ``seconds`` is its bound at the time limit.
        nodes: the nodes whose first runs are the program's instants; empty for ``instants``, which uses all that bind.
        windows: the windows for which ``chain`` has rows: first and last instant (indices into ``nodes``; their count for the
            end) and the value's node.
        absent: per operator of an instant, the values that the program's answer does not have on the board then.
        fetched: values that the program's answer fetches.
    """

    seconds: float
    method: str
    solved: bool
    nodes: tuple[int, ...] = ()
    windows: tuple[tuple[int, int, int], ...] = ()
    absent: Mapping[int, frozenset[int]] = field(default_factory=dict, compare=False)
    fetched: frozenset[int] = frozenset()


NOTHING = TimeBound(seconds=0.0, method="none", solved=True)


def all_instants(
    game: Game, precedence: Precedence, instants: Sequence[Instant], budget_bytes: int, *, seconds: float
) -> TimeBound:
    """The lower bound on extra seconds from one program with a row for every instant."""
    program = _over_instants(game, precedence, instants, budget_bytes)
    if program is None:
        return NOTHING
    found = program.solve(seconds)
    return TimeBound(seconds=found.value * (game.base_seconds or 1.0), method="instants", solved=found.ended)


def _over_instants(game: Game, precedence: Precedence, instants: Sequence[Instant], budget_bytes: int) -> Program | None:
    """The program with one row per instant at which the budget binds; None if it binds at none.

    At an instant, a value that is computed before and read afterwards is on the board or is placed again later. The values
    placed again must make up for all bytes above the budget. Every operator is paid for once (in fixed order, once per stretch
    between two reads of its value).
    """
    program = Program()
    for at in instants:
        present, fixed = precedence.forced(at), precedence.stuck(at)
        need = precedence.bytes_with(at, present | fixed) - budget_bytes
        if need > 0:
            free = np.nonzero(present & ~fixed)[0].tolist()
            program.row({_absent(program, game, precedence, v, at.op): float(game.bytes[v]) / need for v in free}, 1.0)
    return program if program.rows else None


def price(game: Game, precedence: Precedence, found: TimeBound, budget_bytes: int, more_bytes: int) -> float:
    """Seconds by which the relaxed bound falls if the budget grows by ``more_bytes``: the value of memory by the bound.

    0.0 if the bound has no program, or one of the two programs is not solved in time.
    """
    ops = {v: o for o, v in enumerate(game.nodes[: game.plain])}
    at = [precedence.instant(ops[v]) for v in found.nodes]

    def relaxed(budget: int) -> Solved:
        if found.method in ("instant", "chain"):
            program = stages(game, precedence, at, budget)
        else:
            program = _over_instants(game, precedence, looked_at(game, precedence), budget) or Program()
        return program.solve(_PRICED, whole=False)

    if found.method not in ("instant", "instants", "chain", "order"):
        return 0.0
    if found.method == "order" or (found.method == "instant" and is_cut(game)):
        one = (OrderCut if found.method == "order" else InstantCut)(game, precedence, at[0])

        def cut(budget: int) -> float:
            return one.at(budget, deadline=time.monotonic() + _PRICED).value

        now, then = cut(budget_bytes), cut(budget_bytes + more_bytes)
        return max(0.0, now - then) * (game.base_seconds or 1.0) if now < np.inf else 0.0
    less, more = relaxed(budget_bytes), relaxed(budget_bytes + more_bytes)
    if not (less.ended and more.ended):
        return 0.0
    return max(0.0, less.value - more.value) * (game.base_seconds or 1.0)


def _absent(program: Program, game: Game, precedence: Precedence, v: int, op: int) -> int:
    """The variable for value ``v`` being absent when ``op`` first runs."""
    o, base = int(game.producer[v]), game.base_seconds or 1.0
    stretch = sum(1 for r in game.readers[v] if r < op) if precedence.fixed else 0
    name = ("absent", v, stretch)
    if name in program.index:
        return program.index[name]
    absent = program.variable(name)
    terms = {absent: -1.0}
    if game.again[o]:
        alone = len(game.outputs[o]) == 1
        terms[program.variable(("run", o, stretch if alone else 0), float(game.seconds[o]) / base)] = 1.0
    fetch = int(game.fetcher[v])
    if fetch >= 0:
        moved = program.variable(("fetch", v, stretch), float(game.seconds[fetch]) / base)
        terms[moved] = 1.0
        program.row({program.variable(("write", v), float(game.once[fetch]) / base): 1.0, moved: -1.0}, 0.0)
    program.row(terms, 0.0)
    return absent


def tight_chain(
    precedence: Precedence, instants: Sequence[Instant], budget_bytes: int, *, most: int
) -> list[Instant]:
    """The heaviest chain of comparable instants at which the budget binds, thinned to at most ``most``."""
    over = []
    for at in instants:
        need = precedence.bytes_once(at) - budget_bytes
        if need > 0:
            over.append((at, need))
    if not over:
        return []
    by_op = {at.op: (at, need) for at, need in over}
    found = chain([at.op for at, _ in over], [need / budget_bytes + 1e-3 for _, need in over], precedence)
    while len(found) > most:
        width = len(found) / most
        found = [
            max(found[int(i * width) : max(int(i * width) + 1, int((i + 1) * width))], key=lambda o: by_op[o][1])
            for i in range(most)
        ]
    return [by_op[o][0] for o in found]


def one_instant(
    game: Game, precedence: Precedence, instants: Sequence[Instant], budget_bytes: int, *, seconds: float
) -> TimeBound:
    """The strongest finite bound of :func:`single_instants`."""
    every = single_instants(game, precedence, instants, budget_bytes, seconds=seconds)
    return max((t for t in every if t.seconds < np.inf), key=lambda t: t.seconds, default=NOTHING)


def single_instants(
    game: Game, precedence: Precedence, instants: Sequence[Instant], budget_bytes: int, *, seconds: float
) -> Iterator[TimeBound]:
    """Lower bounds on extra seconds from single instants: the highest first, then the others."""
    deadline = time.monotonic() + seconds
    spread = binding(precedence, instants, budget_bytes)
    for at in spread[:1]:
        yield from highest_instant(game, precedence, at, budget_bytes, deadline=deadline)
    yield from other_instants(game, precedence, spread[1:], budget_bytes, deadline=deadline)


def binding(precedence: Precedence, instants: Sequence[Instant], budget_bytes: int) -> list[Instant]:
    """Up to ``_WEIGHED`` instants at which the budget binds, spread over the order, the highest first."""
    over = sorted(((precedence.bytes_once(at) - budget_bytes, i) for i, at in enumerate(instants)), reverse=True)
    spread: list[int] = []
    for need, i in over:
        if need > 0 and len(spread) < _WEIGHED and all(abs(i - j) > len(instants) // (4 * _WEIGHED) for j in spread):
            spread.append(i)
    return [instants[i] for i in spread]


def highest_instant(
    game: Game, precedence: Precedence, at: Instant, budget_bytes: int, *, deadline: float
) -> Iterator[TimeBound]:
    """Bounds from the closed program of one instant: an absent value that runs again needs, in turn, what it reads.

    Yields:
        The bound of the relaxed program (values that are only partly on the board count as absent), and, if there is time
        until the deadline (of :func:`time.monotonic`), that with all variables whole. In long graphs only one, from minimum
        cuts: :func:`solved_instant` is for the time that is left at the end. If the program has no answer, a bound of infinite
        seconds comes first.
    """
    if is_cut(game):
        found = InstantCut(game, precedence, at).at(budget_bytes, deadline=deadline)
        if found.value == np.inf:
            yield TimeBound(seconds=np.inf, method="instant", solved=True, nodes=(game.nodes[at.op],))
        else:
            yield _cut_bound(game, at, found)
        return
    yield from solved_instant(game, precedence, at, budget_bytes, deadline=deadline)


def solved_instant(
    game: Game, precedence: Precedence, at: Instant, budget_bytes: int, *, deadline: float
) -> Iterator[TimeBound]:
    """What :func:`highest_instant` yields, by a solver of linear programs in long graphs, too."""
    one = _weighed(game, precedence, at, budget_bytes, deadline)
    if one.relaxed.impossible:
        yield TimeBound(seconds=np.inf, method="instant", solved=True, nodes=(game.nodes[at.op],))
    yield from _solved(game, one, deadline)


def any_order(
    game: Game, precedence: Precedence, instants: Sequence[Instant], budget_bytes: int, *, deadline: float
) -> Iterator[TimeBound]:
    """Bounds of single instants in free order, over all sets of operators that may have run by then (``order_cut``).

    The highest instants come first, as time allows. None where transfers overlap with computing, or no board fits.
    """
    if precedence.fixed or not instant_cut.applies(game):
        return
    for at in binding(precedence, instants, 0):
        if time.monotonic() >= deadline:
            return
        found = OrderCut(game, precedence, at).at(budget_bytes, deadline=deadline)
        if 0 < found.value < np.inf and at.op != game.last:
            seconds = found.value * (game.base_seconds or 1.0)
            yield TimeBound(seconds=seconds, method="order", solved=False, nodes=(game.nodes[at.op],))


def other_instants(
    game: Game, precedence: Precedence, others: Sequence[Instant], budget_bytes: int, *, deadline: float
) -> Iterator[TimeBound]:
    """The same for several instants, as time allows; those with the strongest relaxed bounds come first."""
    now = time.monotonic()
    weigh_until = now + min((deadline - now) * _WEIGHED_SHARE, _WEIGHED_SECONDS)
    if is_cut(game):
        bounds: list[TimeBound] = []
        for at in others:
            if time.monotonic() > weigh_until:
                break
            found = InstantCut(game, precedence, at).at(budget_bytes, deadline=deadline)
            if found.value < np.inf:  # no schedule fits otherwise, which only the highest instant is asked to prove
                bounds.append(_cut_bound(game, at, found))
        yield from sorted(bounds, key=lambda b: -b.seconds)[: _SOLVED - 1]
        return
    weighed: list[_Weighed] = []
    for at in others:
        if time.monotonic() > weigh_until:
            break
        weighed.append(_weighed(game, precedence, at, budget_bytes, deadline))
    weighed.sort(key=lambda w: -w.relaxed.value)
    for one in weighed[: _SOLVED - 1]:
        yield from _solved(game, one, deadline)


def is_cut(game: Game) -> bool:
    """Whether single instants of a game are bounded by minimum cuts: it is long, and they can be."""
    return game.plain > instant_cut.LONG and instant_cut.applies(game)


def _cut_bound(game: Game, at: Instant, found: CutAnswer) -> TimeBound:
    absent = {at.op: found.absent} if found.absent else {}
    seconds = found.value * (game.base_seconds or 1.0)
    return TimeBound(
        seconds=seconds, method="instant", solved=False, nodes=(game.nodes[at.op],), absent=absent, fetched=found.fetched
    )


@dataclass(frozen=True, slots=True)
class _Weighed:
    """An instant, its program, the result of its relaxation, and the seconds that the relaxation took."""

    at: Instant
    program: Program
    relaxed: Solved
    seconds: float


def _weighed(game: Game, precedence: Precedence, at: Instant, budget_bytes: int, deadline: float) -> _Weighed:
    program = stages(game, precedence, [at], budget_bytes)
    began = time.monotonic()
    relaxed = program.solve(deadline - began, whole=False)
    return _Weighed(at, program, relaxed, time.monotonic() - began)


def _solved(game: Game, one: _Weighed, deadline: float) -> Iterator[TimeBound]:
    """An instant's bounds: relaxed, then with whole variables if there is time."""
    yield _single(one.program, one.at, game, one.relaxed.value, one.relaxed.x, ended=False)
    left = deadline - time.monotonic()
    if left > _HARDER * one.seconds:
        found = one.program.solve(min(left / 2, max(_TRIED_SECONDS, _TRIED * one.seconds)))
        yield _single(one.program, one.at, game, max(found.value, one.relaxed.value), found.x, ended=found.ended)


class Alone:
    """One instant's relaxed program for several budgets; gives what the answer leaves absent, and proves nothing."""

    def __init__(self, game: Game, precedence: Precedence, at: Instant, budget_bytes: int) -> None:
        """Set up the program.

        Args:
            game: the game.
            precedence: of the game.
            at: the instant.
            budget_bytes: the largest budget that will be asked for.
        """
        self._game, self._precedence, self._at, self._budget = game, precedence, at, budget_bytes

    def absent(self, budget_bytes: int, *, seconds: float, kept: AbstractSet[int] = frozenset()) -> TimeBound:
        """What the answer for a budget leaves absent if ``kept`` values stay on the board; ``NOTHING`` if none is found."""
        if is_cut(self._game):
            cut = self._cut.at(budget_bytes, kept=kept, deadline=time.monotonic() + seconds)
            return replace(_cut_bound(self._game, self._at, cut), seconds=0.0) if cut.absent else NOTHING
        program = self._program
        program.low[0] = -(budget_bytes - self._own) / self._budget  # the budget is the first row
        there = {j: 1.0 for v in kept if (j := program.index.get(("on", 0, v))) is not None}
        found = program.solve(seconds, whole=False, settled=there)
        return replace(NOTHING, **({} if found.x is None else chosen(program, found.x, [self._at])))

    @cached_property
    def _cut(self) -> InstantCut:
        return InstantCut(self._game, self._precedence, self._at)

    @cached_property
    def _program(self) -> Program:
        return stages(self._game, self._precedence, [self._at], self._budget)

    @cached_property
    def _own(self) -> int:
        return self._precedence.bytes_with(self._at, np.zeros(len(self._game.value_nodes), dtype=bool))


def _single(program: Program, at: Instant, game: Game, value: float, x: Any, *, ended: bool) -> TimeBound:
    """The bound that the program of one instant proves, with its answer ``x`` if there is one."""
    proven = value * (game.base_seconds or 1.0)
    bound = TimeBound(seconds=proven, method="instant", solved=ended, nodes=(game.nodes[at.op],))
    return bound if x is None else replace(bound, **chosen(program, x, [at]))


def chosen(program: Program, x: Any, instants: Sequence[Instant], *, least: float = 1 - WHOLE) -> dict[str, Any]:
    """The values that a program's answer leaves absent (on the board by less than ``least``), and those that it fetches."""
    absent: dict[int, set[int]] = {at.op: set() for at in instants}
    fetched: set[int] = set()
    for name, j in program.index.items():
        if name[0] == "on" and j < len(x) and x[j] < least:
            absent[instants[name[1]].op].add(name[2])
        elif name[0] == "write" and j < len(x) and x[j] > WHOLE:
            fetched.add(name[1])
    return {"absent": {o: frozenset(v) for o, v in absent.items()}, "fetched": frozenset(fetched)}
