"""Lower bounds, each with the instant that proves it: on the peak with recomputation, on the peak without, on extra seconds.

The proofs stand in ``docs/planner.md``.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_flow

from lowtide.planning.bounds.precedence import Instant, Precedence, certain_in_order, chain
from lowtide.planning.bounds.solver_process import Told, is_kept, solved_apart
from lowtide.planning.graph_arrays import Game, profile

_EVERY = 1500
"""Operators up to which every one is an instant that is looked at; beyond, two of each stretch are."""
_LOOKED_AT = 96
"""Stretches into which a larger graph is cut."""
_WEIGHED = 24
"""Single instants at most whose programs are weighed."""
_SOLVED = 3
"""How many of them are solved with all variables whole."""
_WEIGHED_SHARE, _WEIGHED_SECONDS = 0.25, 1.5
"""Share of the time, and seconds, after which no further instant is weighed."""
_HARDER = 30
"""So many times what it takes relaxed a program may take with whole variables; HiGHS does not always look at the clock."""
_TRIED, _TRIED_SECONDS = 10, 2.0
"""It is given up after so many times that, and so many seconds; most that end in time end sooner."""
_WHOLE = 1e-4
"""So much a variable may be off a whole number and still be taken for it (HiGHS allows itself 1e-6)."""
_LARGE = 4000
"""Variables, of those that are not settled, beyond which whole ones are looked for in a process that can be ended: one of
12,000 took 26 seconds where it was given two."""
_INFEASIBLE = 2
"""By which scipy says so."""
_EXACT = 1e-6
"""Share of a floor by which a program of real variables may have it too high."""
_LEAST_SECONDS = 0.05
"""Time limit of a program for which none is left."""
_SCALE = 1e4
"""Costs are shares of the graph's seconds; the solver's absolute tolerances (1e-6, 1e-7) must be small beside the least."""
_PRICED = 2.0
"""Seconds that one of the two programs behind a price may take."""
_IDLE = 1000.0
"""So many times the graph's seconds are looked at for waiting, at most."""
_FLOW_SCALE = 1 << 30
"""Capacities of scipy's maximum flow are 32-bit integers: bytes are rounded down to shares of all bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakBound:
    """A peak that no schedule goes below.

    Attributes:
        bytes: the bound.
        node: whose first run proves it; -1 where resident values alone do.
        method: ``stuck`` (values without a way back), ``instant`` (with what the others need to come back), ``forced`` (values
            made before and read after), ``cut`` (minimum cut).
    """

    bytes: int
    node: int
    method: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeBound:
    """Extra seconds that no schedule within a budget does without.

    Attributes:
        seconds: the bound.
        method: ``none``, ``instants`` (each instant's values against the budget), ``instant`` (one of them, with all that must
            run again for what is absent), ``chain`` (what must be on the board from one instant to the next), ``search`` (all
            schedules were looked at).
        solved: whether the program was solved to its end; otherwise its bound at the time limit is given.
        nodes: whose first runs the program looks at, where they are named (all that bind for ``instants``).
        windows: of which two of them (their numbers; their count for the end), and of which value's node, ``chain`` has rows.
        absent: per operator of these, values that the program's answer does not have on the board then.
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


def looked_at(game: Game, precedence: Precedence) -> list[Instant]:
    """The instants that bounds look at: all of a small graph, two of each stretch of a large one.

    The two are the highest without a plan, and the one with the most bytes that are there whatever the plan: in fixed order
    the floor is therefore the same as if every instant had been looked at.
    """
    ops = list(range(game.plain))
    if game.plain > _EVERY:
        width = max(1, game.plain // _LOOKED_AT)
        ops = sorted({
            start + int(np.argmax(high[start : start + width]))
            for high in (profile(game, game.given), certain_in_order(game))
            for start in range(0, game.plain, width)
        })
    return [precedence.instant(o) for o in ops]


def floor(game: Game, precedence: Precedence, instants: Sequence[Instant]) -> PeakBound:
    """The peak that no recomputing and moving goes below."""
    best = PeakBound(bytes=game.graph.resident_bytes, node=-1, method="stuck")
    for at in instants:
        size = precedence.bytes_with(at, precedence.stuck(at))
        if size > best.bytes:
            best = PeakBound(bytes=size, node=game.nodes[at.op], method="stuck")
    return best


def closed_floor(game: Game, precedence: Precedence, at: Instant, *, seconds: float) -> PeakBound:
    """The peak that one instant proves when what is absent must come back from what is there: its program, for least bytes.

    Returns:
        0 bytes where the program was not solved in time.
    """
    most = max(1, precedence.bytes_once(at))
    program = stages(game, precedence, [at], most, channels=False)  # what is waited for does not matter here
    program.cost = [0.0] * len(program.cost)
    peak = program.variable("peak", 1.0)
    own = precedence.bytes_with(at, np.zeros(len(game.value_nodes), dtype=bool))
    program.rows[0] |= {peak: 1.0}  # instead of the budget, of which it is the first row
    program.low[0] = own / most
    found = program.solve(seconds, whole=False)
    return PeakBound(bytes=int(found.value * most * (1 - _EXACT)), node=game.nodes[at.op], method="instant")


def once(game: Game, precedence: Precedence, instants: Sequence[Instant], *, seconds: float = np.inf) -> PeakBound:
    """The peak that no order goes below when every operator runs once and nothing is moved.

    What is forced on the board, and while there is time a minimum cut of each instant, those with most on it first.
    """
    deadline = time.monotonic() + seconds
    best = PeakBound(bytes=game.graph.resident_bytes, node=-1, method="forced")
    forced = [precedence.bytes_once(at) for at in instants]
    for at, size in zip(instants, forced, strict=True):
        if size > best.bytes:
            best = PeakBound(bytes=size, node=game.nodes[at.op], method="forced")
    if time.monotonic() < deadline:
        network = _Network(game)
        for i in sorted(range(len(instants)), key=lambda i: -forced[i]):
            if time.monotonic() >= deadline:
                break
            at = instants[i]
            size = network.least(at)
            if size > best.bytes:
                best = PeakBound(bytes=size, node=game.nodes[at.op], method="cut")
    return best


class _Network:
    """Least bytes on the board at an instant, over all sets of operators that may have run by then.

    Such a set holds what the instant's operator needs, none of what needs it, and with an operator all that it needs; a value
    counts where its maker is in the set and a reader is not. The cheapest is a minimum cut.
    """

    def __init__(self, game: Game) -> None:
        self.game = game
        n, values = game.plain, len(game.value_nodes)
        self.source, self.sink = n + values, n + values + 1
        self.scale = min(1.0, _FLOW_SCALE / max(1, int(game.bytes.sum())))
        self.infinite = (1 << 31) - 1
        self.rows: list[int] = []
        self.cols: list[int] = []
        self.capacity: list[int] = []
        for o, parents in enumerate(game.parents):
            for p in parents:
                self._edge(o, p, self.infinite)
        for v, readers in enumerate(game.readers):
            if readers:
                self._edge(int(game.producer[v]), n + v, int(int(game.bytes[v]) * self.scale))
                for r in readers:
                    self._edge(n + v, r, self.infinite)

    def _edge(self, a: int, b: int, capacity: int) -> None:
        self.rows.append(a)
        self.cols.append(b)
        self.capacity.append(capacity)

    def least(self, at: Instant) -> int:
        game = self.game
        before, after = np.nonzero(at.done)[0].tolist(), [*np.nonzero(at.ahead)[0].tolist(), at.op]
        rows = np.asarray([*self.rows, *([self.source] * len(before)), *after])
        cols = np.asarray([*self.cols, *before, *([self.sink] * len(after))])
        capacity = np.asarray([*self.capacity, *([self.infinite] * (len(before) + len(after)))], dtype=np.int32)
        matrix = csr_matrix((capacity, (rows, cols)), shape=(self.sink + 1, self.sink + 1))
        flow = int(maximum_flow(matrix, self.source, self.sink).flow_value / self.scale)
        own = sum(int(game.bytes[v]) for v in game.outputs[at.op]) + int(game.workspace[at.op])
        taken_over = sum(int(game.bytes[v]) for v in game.olds(at.op))
        return flow + own - taken_over + game.graph.resident_bytes


class Program:
    """A mixed-integer program in the making: variables in [0, 1] by name, rows, least cost."""

    def __init__(self) -> None:
        """Nothing is asked yet."""
        self.index: dict[Any, int] = {}
        self.cost: list[float] = []
        self.whole: list[bool] = []
        self.rows: list[dict[int, float]] = []
        self.low: list[float] = []
        self.high: list[float] = []

    def variable(self, name: Any, cost: float = 0.0, *, whole: bool = True) -> int:
        """The variable of a name; it is made, at its cost, when first asked for; it is whole, unless others make it so."""
        found = self.index.get(name)
        if found is None:
            found = self.index[name] = len(self.cost)
            self.cost.append(cost)
            self.whole.append(whole)
        return found

    def row(self, terms: dict[int, float], low: float, high: float = np.inf) -> int:
        """A row: ``low <= sum <= high``."""
        self.rows.append(terms)
        self.low.append(low)
        self.high.append(high)
        return len(self.rows) - 1

    def _arrays(self, settled: Mapping[int, float]) -> dict[str, Any]:
        lengths = [len(r) for r in self.rows]
        size = sum(lengths)
        lower, upper = np.zeros(len(self.cost)), np.ones(len(self.cost))
        for j, value in settled.items():
            lower[j] = upper[j] = value
        return {
            "cost": _SCALE * np.asarray(self.cost),
            "lower": lower,
            "upper": upper,
            "whole": np.asarray(self.whole, dtype=bool),
            "low": np.asarray(self.low),
            "high": np.asarray(self.high),
            "starts": np.cumsum([0, *lengths]),
            "columns": np.fromiter(itertools.chain.from_iterable(self.rows), dtype=np.int64, count=size),
            "values": np.fromiter(itertools.chain.from_iterable(map(dict.values, self.rows)), dtype=float, count=size),
        }

    def solve(
        self,
        seconds: float,
        *,
        whole: bool = True,
        gap: float = 0.0,
        settled: Mapping[int, float] = MappingProxyType({}),
        real: Iterable[int] = (),
        start: Any = None,
        tell: Callable[[Solved], None] | None = None,
    ) -> Solved:
        """Solve it.

        Args:
            seconds: how long the solver may take; it does not always look at the clock.
            whole: whether variables are to be whole.
            gap: it may stop when it is within this relative gap of the best.
            settled: variables whose values are given; what comes of it bounds nothing then.
            real: variables that need not be whole.
            start: an answer to begin from, where the program is solved in a process of its own.
            tell: told of every better answer; where it is, a program is solved there.
        """
        if not self.cost:
            return Solved(value=0.0, cost=0.0, ended=True, x=np.zeros(0))
        asked = self._arrays(settled)
        asked["whole"][list(real)] = False
        if whole and (tell is not None or (is_kept() and len(self.cost) - len(settled) > _LARGE)):
            hear = None if tell is None else lambda told: tell(_solved_as(told))
            told = solved_apart(asked, seconds=seconds, gap=gap, start=start, tell=hear) if seconds > 0 else Told()
        else:
            told = _solved_here(asked, seconds, whole=whole, gap=gap)
        return _solved_as(told)


def _solved_as(told: Told) -> Solved:
    least = min(told.bound, told.cost)
    value = max(0.0, least) / _SCALE if np.isfinite(least) else 0.0
    return Solved(value=value, cost=told.cost / _SCALE, ended=told.ended, x=told.x, impossible=told.impossible)


def _solved_here(asked: Mapping[str, Any], seconds: float, *, whole: bool, gap: float) -> Told:
    shape = (len(asked["low"]), len(asked["cost"]))
    result = milp(
        asked["cost"],
        constraints=LinearConstraint(
            csr_matrix((asked["values"], asked["columns"], asked["starts"]), shape=shape), asked["low"], asked["high"]
        ),
        bounds=Bounds(asked["lower"], asked["upper"]),
        integrality=asked["whole"] & whole,
        options={"time_limit": max(_LEAST_SECONDS, seconds), "mip_rel_gap": gap},
    )
    ended = result.status == 0
    least = result.mip_dual_bound if whole else result.fun if ended else None
    return Told(
        bound=-np.inf if least is None else least,
        cost=np.inf if result.x is None else result.fun,
        x=result.x,
        ended=ended and not gap,
        impossible=result.status == _INFEASIBLE,
    )


@dataclass(frozen=True, slots=True)
class Solved:
    """What came of a program.

    Attributes:
        value: no answer costs less.
        cost: of the best answer found; infinity where there is none.
        ended: whether it was solved to its end, so that one costs so much.
        x: the best answer found; None where none was.
        impossible: whether there is none.
    """

    value: float
    cost: float
    ended: bool
    x: Any
    impossible: bool = False


def all_instants(
    game: Game, precedence: Precedence, instants: Sequence[Instant], budget_bytes: int, *, seconds: float
) -> TimeBound:
    """Extra seconds that no schedule within the budget does without, all instants in one program."""
    program = _over_instants(game, precedence, instants, budget_bytes)
    if program is None:
        return NOTHING
    found = program.solve(seconds)
    return TimeBound(seconds=found.value * (game.base_seconds or 1.0), method="instants", solved=found.ended)


def _over_instants(game: Game, precedence: Precedence, instants: Sequence[Instant], budget_bytes: int) -> Program | None:
    """One row per instant at which the budget binds; None where there is none.

    At an instant, what was made before and is read afterwards is on the board or is placed again; what is placed again must
    make up for all that would stand above the budget. Every operator is paid for once (in fixed order once for every stretch
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
    """Seconds that the bound falls by when the budget grows by so many bytes: what memory is worth, by the bound's account."""
    ops = {v: o for o, v in enumerate(game.nodes[: game.plain])}
    at = [precedence.instant(ops[v]) for v in found.nodes]

    def relaxed(budget: int) -> Solved:
        if found.method in ("instant", "chain"):
            program = stages(game, precedence, at, budget)
        else:
            program = _over_instants(game, precedence, looked_at(game, precedence), budget) or Program()
        return program.solve(_PRICED, whole=False)

    if found.method not in ("instant", "instants", "chain"):
        return 0.0
    less, more = relaxed(budget_bytes), relaxed(budget_bytes + more_bytes)
    if not (less.ended and more.ended):
        return 0.0
    return max(0.0, less.value - more.value) * (game.base_seconds or 1.0)


def _absent(program: Program, game: Game, precedence: Precedence, v: int, op: int) -> int:
    """The variable for a value being absent at an instant."""
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


def run_in(program: Program, game: Game, t: int, o: int) -> int:
    """The variable for an operator running again between the instants ``t - 1`` and ``t``."""
    return program.variable(("run", t, o), game.lists.price[o])


def fetch_in(program: Program, game: Game, t: int, v: int) -> int | None:
    """The variable for a value being fetched between them, which asks for its having been moved; None where it cannot be."""
    fetch = game.lists.fetcher[v]
    if fetch < 0:
        return None
    known = program.index.get(("fetch", t, v))
    if known is not None:
        return known
    found = program.variable(("fetch", t, v), game.lists.price[fetch])
    program.row({program.variable(("write", v), float(game.once[fetch]) / (game.base_seconds or 1.0)): 1.0, found: -1.0}, 0.0)
    return found


def again_for(game: Game, light: AbstractSet[int]) -> NDArray[np.bool_]:
    """Per plain operator, whether it may run again and makes anything that some values do not take for being there."""
    found: NDArray[np.bool_] = game.again[: game.plain].copy()
    if light:
        found &= np.asarray([any(v not in light for v in made) for made in game.outputs[: game.plain]], dtype=bool)
    return found


def stages(
    game: Game,
    precedence: Precedence,
    tight: Sequence[Instant],
    budget_bytes: int,
    *,
    channels: bool = True,
    light: AbstractSet[int] = frozenset(),
) -> Program:
    """What must be on the board from one instant to the next; the instants must be comparable and in order.

    Variables ``("on", t, v)``: value ``v`` is on the board at instant ``t``; ``("run", t, o)``: operator ``o`` runs again
    between the instants ``t - 1`` and ``t``; ``("fetch", t, v)`` likewise; ``("write", v)``: it is offloaded at all.

    Values of ``light`` are taken for 0 bytes, and so for being on the board at all times once they are made.
    """
    program = Program()
    count = len(tight)
    producer, size, overwriter = game.lists.producer, game.lists.bytes, game.lists.overwriter

    def placed(t: int, v: int) -> dict[int, float]:
        """Variables that place a value on the board between two instants."""
        o, fetch = producer[v], fetch_in(program, game, t, v)
        found = {run_in(program, game, t, o): 1.0} if may[o] else {}
        if fetch is not None:
            found[fetch] = 1.0
        return found

    weighed = np.ones(len(game.value_nodes), dtype=bool)
    weighed[list(light)] = False
    again = again_for(game, light)
    may = again.tolist()
    made = [at.done[game.producer] & weighed for at in tight]
    for t, at in enumerate(tight):
        room = budget_bytes - precedence.bytes_with(at, np.zeros(len(game.value_nodes), dtype=bool))
        olds = game.olds(at.op)
        here = [v for v in np.nonzero(made[t])[0].tolist() if v not in olds]
        program.row({program.variable(("on", t, v)): -float(size[v]) / budget_bytes for v in here}, -room / budget_bytes)
        fixed, needed = precedence.stuck(at).tolist(), precedence.forced(at).tolist()
        for v in here:
            if fixed[v]:
                program.row({program.variable(("on", t, v)): 1.0}, 1.0)
            elif needed[v]:
                terms = {program.variable(("on", t, v)): 1.0}
                for later in range(t + 1, count + 1):
                    terms |= placed(later, v)
                program.row(terms, 1.0)
    for t in range(1, count + 1):
        before = tight[t - 1]
        old = made[t - 1].tolist()
        for v in np.nonzero(made[t - 1])[0].tolist():
            there = {program.variable(("on", t - 1, v)): 1.0}
            if t < count and overwriter[v] != tight[t].op:
                program.row(there | placed(t, v) | {program.variable(("on", t, v)): -1.0}, 0.0)
        for o in np.nonzero(before.done & again)[0].tolist():
            run = run_in(program, game, t, o)
            for p in game.inputs[o]:
                if old[p]:
                    program.row({program.variable(("on", t - 1, p)): 1.0} | placed(t, p) | {run: -1.0}, 0.0)
        fresh = before.ahead.copy()
        if t < count:
            fresh &= tight[t].done
            fresh[tight[t].op] = True
        for o in np.nonzero(fresh)[0].tolist():
            for p in game.inputs[o]:
                if old[p]:
                    program.row({program.variable(("on", t - 1, p)): 1.0} | placed(t, p), 1.0)
    if channels and game.graph.offload is not None and game.graph.offload.overlap:
        _channels(program, game, tight)
    return program


def _channels(program: Program, game: Game, tight: Sequence[Instant]) -> None:
    """Rows for transfers that overlap with computing: each channel moves one value at a time, and nothing waits for nothing.

    What is absent at an instant and comes back from the second board was written before; what is fetched after it is read
    after it. Variables ``("idle", t)``: seconds between the instants ``t - 1`` and ``t`` in which nothing runs that this
    program knows of, ``_IDLE`` times the graph's at most.
    """
    offload, base, count = game.graph.offload, game.base_seconds or 1.0, len(tight)
    assert offload is not None
    fetches = [(name[1], name[2], j) for name, j in program.index.items() if name[0] == "fetch"]
    runs = [(name[1], j) for name, j in program.index.items() if name[0] == "run"]
    idle = [program.variable(("idle", t), _IDLE, whole=False) for t in range(count + 1)]
    for t, at in enumerate(tight):
        own = float(game.seconds[at.op])
        before = base - float(game.seconds[: game.plain][at.ahead].sum()) - own
        after = base - float(game.seconds[: game.plain][at.done].sum()) - own
        spent = [{idle[s]: _IDLE for s in range(count + 1) if (s > t) is late} | {
            j: program.cost[j] for s, j in runs if (s > t) is late} for late in (False, True)]
        reads: dict[int, float] = {}
        writes: dict[int, float] = {}
        for s, v, j in fetches:
            on = program.index.get(("on", t, v))
            if s <= t:
                continue
            size = float(game.bytes[v]) / base
            reads[j] = -size / offload.read_bytes_per_second
            if on is None or ("written", t, v) in program.index:
                continue
            ahead = program.variable(("written", t, v), whole=False)
            writes[ahead] = -size / offload.write_bytes_per_second
            again = {k: 1.0 for r in range(t + 1, count + 1)
                     if (k := program.index.get(("run", r, int(game.producer[v])))) is not None}
            for r, u, k in fetches:
                if u == v and r > t:
                    program.row({ahead: 1.0, k: -1.0, on: 1.0} | again, 0.0)
        if writes:
            program.row(spent[False] | writes, -before / base)
        if reads:
            program.row(spent[True] | reads, -after / base)


def tight_chain(
    precedence: Precedence, instants: Sequence[Instant], budget_bytes: int, *, most: int
) -> list[Instant]:
    """Comparable instants at which the budget binds, the heaviest chain of them, thinned to ``most``."""
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
    """The strongest of :func:`single_instants`."""
    every = single_instants(game, precedence, instants, budget_bytes, seconds=seconds)
    return max((t for t in every if t.seconds < np.inf), key=lambda t: t.seconds, default=NOTHING)


def single_instants(
    game: Game, precedence: Precedence, instants: Sequence[Instant], budget_bytes: int, *, seconds: float
) -> Iterator[TimeBound]:
    """Extra seconds that single instants prove: the highest, then the others."""
    deadline = time.monotonic() + seconds
    spread = binding(precedence, instants, budget_bytes)
    for at in spread[:1]:
        yield from highest_instant(game, precedence, at, budget_bytes, deadline=deadline)
    yield from other_instants(game, precedence, spread[1:], budget_bytes, deadline=deadline)


def binding(precedence: Precedence, instants: Sequence[Instant], budget_bytes: int) -> list[Instant]:
    """Instants at which the budget binds, apart from each other, the highest first."""
    over = sorted(((precedence.bytes_once(at) - budget_bytes, i) for i, at in enumerate(instants)), reverse=True)
    spread: list[int] = []
    for need, i in over:
        if need > 0 and len(spread) < _WEIGHED and all(abs(i - j) > len(instants) // (4 * _WEIGHED) for j in spread):
            spread.append(i)
    return [instants[i] for i in spread]


def highest_instant(
    game: Game, precedence: Precedence, at: Instant, budget_bytes: int, *, deadline: float
) -> Iterator[TimeBound]:
    """What an instant proves: what is absent then and runs again needs, in turn, what it reads.

    Yields:
        What its program proves relaxed (what that has on the board only in part is absent) and, if there is time until the
        deadline (of :func:`time.monotonic`), with all variables whole; first of all endless seconds where it has no answer.
    """
    one = _weighed(game, precedence, at, budget_bytes, deadline)
    if one.relaxed.impossible:
        yield TimeBound(seconds=np.inf, method="instant", solved=True, nodes=(game.nodes[at.op],))
    yield from _solved(game, one, deadline)


def other_instants(
    game: Game, precedence: Precedence, others: Sequence[Instant], budget_bytes: int, *, deadline: float
) -> Iterator[TimeBound]:
    """The same for several, those first of which the relaxed program says most; as many as there is time for."""
    now = time.monotonic()
    weigh_until = now + min((deadline - now) * _WEIGHED_SHARE, _WEIGHED_SECONDS)
    weighed: list[_Weighed] = []
    for at in others:
        if time.monotonic() > weigh_until:
            break
        weighed.append(_weighed(game, precedence, at, budget_bytes, deadline))
    weighed.sort(key=lambda w: -w.relaxed.value)
    for one in weighed[: _SOLVED - 1]:
        yield from _solved(game, one, deadline)


@dataclass(frozen=True, slots=True)
class _Weighed:
    """An instant, its program, what came of that relaxed, and in how many seconds."""

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
    """What an instant proves: relaxed, then with whole variables if there is time."""
    yield _single(one.program, one.at, game, one.relaxed.value, one.relaxed.x, ended=False)
    left = deadline - time.monotonic()
    if left > _HARDER * one.seconds:
        found = one.program.solve(min(left / 2, max(_TRIED_SECONDS, _TRIED * one.seconds)))
        yield _single(one.program, one.at, game, max(found.value, one.relaxed.value), found.x, ended=found.ended)


class Alone:
    """One instant's program, relaxed, asked for several budgets: what it has absent, and nothing proven."""

    def __init__(self, game: Game, precedence: Precedence, at: Instant, budget_bytes: int) -> None:
        """Set it up.

        Args:
            game: what is played.
            precedence: of it.
            at: the instant.
            budget_bytes: the largest that is asked.
        """
        self._at, self._budget = at, budget_bytes
        self._program = stages(game, precedence, [at], budget_bytes)
        self._own = precedence.bytes_with(at, np.zeros(len(game.value_nodes), dtype=bool))

    def absent(self, budget_bytes: int, *, seconds: float, kept: AbstractSet[int] = frozenset()) -> TimeBound:
        """What it leaves absent within a budget where some values are to be on the board; nothing where it has no answer."""
        program = self._program
        program.low[0] = -(budget_bytes - self._own) / self._budget  # the budget is the first row
        there = {j: 1.0 for v in kept if (j := program.index.get(("on", 0, v))) is not None}
        found = program.solve(seconds, whole=False, settled=there)
        return replace(NOTHING, **({} if found.x is None else chosen(program, found.x, [self._at])))


def _single(program: Program, at: Instant, game: Game, value: float, x: Any, *, ended: bool) -> TimeBound:
    """What the program of one instant proves, with an answer of its if there is one."""
    proven = value * (game.base_seconds or 1.0)
    bound = TimeBound(seconds=proven, method="instant", solved=ended, nodes=(game.nodes[at.op],))
    return bound if x is None else replace(bound, **chosen(program, x, [at]))


def chosen(program: Program, x: Any, instants: Sequence[Instant], *, least: float = 1 - _WHOLE) -> dict[str, Any]:
    """Which values a program's answer leaves absent (it has less than so much of them), and which it fetches."""
    absent: dict[int, set[int]] = {at.op: set() for at in instants}
    fetched: set[int] = set()
    for name, j in program.index.items():
        if name[0] == "on" and j < len(x) and x[j] < least:
            absent[instants[name[1]].op].add(name[2])
        elif name[0] == "write" and j < len(x) and x[j] > _WHOLE:
            fetched.add(name[1])
    return {"absent": {o: frozenset(v) for o, v in absent.items()}, "fetched": frozenset(fetched)}
