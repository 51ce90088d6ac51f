"""The 0-1 program of a few instants: values on the board at each, runs and fetches between them."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import numpy as np
from numpy.typing import NDArray

from lowtide.planning.bounds.bound_program import Program
from lowtide.planning.bounds.precedence import Instant, Precedence
from lowtide.planning.graph_arrays import Game

_IDLE = 1000.0
"""Upper limit for the waiting time in one stretch, as a multiple of the graph's seconds."""


def run_in(program: Program, game: Game, t: int, o: int) -> int:
    """The variable for operator ``o`` running again between the instants ``t - 1`` and ``t``."""
    return program.variable(("run", t, o), game.lists.price[o])


def fetch_in(program: Program, game: Game, t: int, v: int) -> int | None:
    """The variable for value ``v`` being fetched between the instants ``t - 1`` and ``t``; None if it cannot be moved.

    A row requires that a fetched value has been offloaded.
    """
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
    """Per plain operator, whether it may run again and computes any value that is not in ``light``."""
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
    """The program of several instants, which must be comparable and in order.

    Its rows say what must be on the board at each instant and come back from one instant to the next. Its variables are
    ``("on", t, v)``: value ``v`` is on the board at instant ``t``; ``("run", t, o)``: operator ``o`` runs again between the
    instants ``t - 1`` and ``t``; ``("fetch", t, v)``: value ``v`` is fetched between them; ``("write", v)``: value ``v`` is
    offloaded at all. Costs are shares of the graph's seconds.

    Values in ``light`` count as 0 bytes, and therefore as on the board at all times once they are computed.

    Args:
        game: the game.
        precedence: of the game.
        tight: the instants.
        budget_bytes: the peak that no schedule may exceed.
        channels: whether to add rows for the second board's channels where transfers overlap with computation.
        light: values that count as 0 bytes.
    """
    program = Program()
    count = len(tight)
    producer, size, overwriter = game.lists.producer, game.lists.bytes, game.lists.overwriter

    def placed(t: int, v: int) -> dict[int, float]:
        """Variables that place value ``v`` on the board between the instants ``t - 1`` and ``t``."""
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
    """Rows for transfers that overlap with computation: each channel moves one value at a time, and idle time has a cost.

    A value that is absent at an instant and comes back from the second board was written before the instant; a value that is
    fetched after the instant is read from there after it. Transfer time that operators do not fill is waiting time. Variables
    ``("idle", t)``: seconds between the instants ``t - 1`` and ``t`` in which no operator runs that this program accounts for,
    at most ``_IDLE`` times the graph's.
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
