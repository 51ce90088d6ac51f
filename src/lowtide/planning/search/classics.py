"""Named strategies from the literature, for comparison and teaching; each gives a row that the referee can play.

* ``keep-all``: the given order; nothing runs twice.
* ``keep-none``: no forward value is kept; everything that a backward operator reads is recomputed from the beginning.
* ``sqrt-n``: values at about sqrt(n) operators are kept; the segment between two of them runs again when one of its values is
  next read (Chen, Xu, Zhang, Guestrin 2016, "Training deep nets with sublinear memory cost").
* ``revolve``: on a chain and its backward, the fewest runs for a given number of kept values (Griewank and Walther 2000).
* ``greedy``: the largest value alive at the peak is dropped and recomputed before its next use, until the peak fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

from lowtide.base.errors import GraphError
from lowtide.planning.graph_arrays import Game, profile
from lowtide.planning.schedule import Row


def keep_all(game: Game) -> tuple[int, ...]:
    """Every operator once, in the given order."""
    return game.given


def keep_none(game: Game) -> tuple[int, ...]:
    """Keep no forward value: each later operator's inputs are recomputed from the beginning."""
    turn = _turn(game)
    row = list(range(turn))
    for o in range(turn, game.plain):
        present: set[int] = set()
        for p in game.parents[o]:
            row += _made_again(game, p, turn, present, o)
        row.append(o)
    return tuple(row)


def _held(game: Game, o: int, at: int) -> bool:
    """Whether a value of operator ``o`` is held until ``at`` or later; it is on the board then and must not be recomputed."""
    return any(int(game.pin[v]) >= at for v in game.outputs[o])


def _made_again(game: Game, o: int, turn: int, present: set[int], at: int) -> list[int]:
    """Runs of forward operators after which operator ``o``'s values are on the board; adds these operators to ``present``."""
    found: list[int] = []
    stack = [(o, False)]
    while stack:
        q, ready = stack.pop()
        if q >= turn or q in present or not game.again[q] or _held(game, q, at):
            continue
        if ready:
            present.add(q)
            found.append(q)
        else:
            stack.append((q, True))
            stack += [(p, False) for p in game.parents[q]]
    return found


def segments(game: Game, size: int | None = None) -> tuple[int, ...]:
    """Keep the values that leave each of about sqrt(n) forward segments; rerun a segment when a value in it is next read."""
    turn = _turn(game)
    size = size or max(1, math.isqrt(max(1, turn)))
    segment = [o // size for o in range(turn)]
    kept = {
        o
        for o in range(turn)
        if not game.again[o] or any(r < turn and segment[r] != segment[o] for v in game.outputs[o] for r in game.readers[v])
    }
    row = list(range(turn))
    at = segment[-1] if segment else 0
    present = {o for o in range(turn) if segment[o] == at}
    for o in range(turn, game.plain):
        for p in game.parents[o]:
            if p >= turn or p in kept or p in present:
                continue
            if segment[p] != at:
                at, present = segment[p], set()
            stretch = range(at * size, min(turn, (at + 1) * size))
            runs = [q for q in stretch if q not in kept and q not in present and not _held(game, q, o)]
            row += runs
            present |= set(runs)
        row.append(o)
    return tuple(row)


def _turn(game: Game) -> int:
    """The operator at which the backward is taken to begin: the one at which the given order peaks."""
    return int(profile(game, game.given).argmax())


def revolve(game: Game, slots: int | None = None) -> tuple[int, ...]:
    """The row with the fewest runs for a chain and its backward, with ``slots`` kept values (default: about sqrt(n)).

    Raises:
        GraphError: if the graph is not a chain ``f0 … fn`` with a backward ``bn … b1``, where ``bi`` reads ``b(i+1)`` (``bn``
            reads ``fn``) and ``f(i-1)``.
    """
    n = (game.plain - 1) // 2
    chain = game.plain >= 3 and game.plain % 2 == 1
    chain = chain and all(set(game.parents[o]) == ({o - 1} if o else set()) for o in range(n + 1))
    chain = chain and all(set(game.parents[o]) == {o - 1, 2 * n - o} for o in range(n + 1, game.plain))
    if not chain:
        raise GraphError("revolve plans only a chain and its backward, and this graph is not one: try --strategy sqrt-n")
    row: list[int] = [0]

    def forward(first: int, last: int) -> None:
        row.extend(range(first, last + 1))

    def backward(first: int) -> None:
        """Append the backward of the operator after ``first``; the value of ``first`` is on the board."""
        if first + 1 == n:
            row.append(n)
        row.append(2 * n - first)

    def turn(first: int, length: int, free: int) -> None:
        """Append the backwards of the ``length`` operators after ``first``; the value of ``first`` is kept."""
        if length == 1 or free <= 0:
            for i in range(length - 1, -1, -1):
                forward(first + 1, first + i)
                backward(first + i)
            return
        split = _split(length, free)[1]
        forward(first + 1, first + split)
        turn(first + split, length - split, free - 1)
        turn(first, split, free)

    turn(0, n, max(1, math.isqrt(n)) if slots is None else slots)
    return tuple(row)


@cache
def _split(length: int, free: int) -> tuple[int, int]:
    """For the backwards of a stretch whose first value is kept, with ``free`` slots left: fewest runs, next place to keep."""
    if length <= 1:
        return 0, 0
    if free <= 0:
        return length * (length - 1) // 2, 0
    return min((k + _split(length - k, free - 1)[0] + _split(k, free)[0], k) for k in range(1, length))


def greedy(game: Game, budget: int, *, tries: int = 2000) -> tuple[int, ...]:
    """Drop the largest value at the peak and rerun its operator before the next use, until the peak fits the budget."""
    row = list(game.given)
    tried: set[tuple[int, int]] = set()
    for _ in range(tries):
        live = profile(game, row)
        peak = int(live.argmax())
        if int(live[peak]) <= budget:
            break
        best: tuple[int, int, int] | None = None
        placed: dict[int, int] = {}
        for t in range(peak):
            for v in game.outputs[row[t]]:
                placed[v] = t
        reads = set(game.inputs[row[peak]])
        first = {o: t for t, o in reversed(list(enumerate(row)))}
        nexts: dict[int, int] = {}
        for t in range(len(row) - 1, peak, -1):
            for v in game.inputs[row[t]]:
                nexts[v] = t
        for v, t in nexts.items():
            o = int(game.producer[v])
            held = any(first.get(int(game.pin[w]), -1) >= t for w in game.outputs[o])
            if v in placed and v not in reads and game.again[o] and not held and (v, row[t]) not in tried and o in row[:peak]:
                best = max(best or (0, 0, 0), (int(game.bytes[v]), v, t))
        if best is None or not best[0]:
            break
        _, v, t = best
        tried.add((v, row[t]))
        row.insert(t, int(game.producer[v]))
    return tuple(row)


STRATEGIES: dict[str, Callable[[Game, int], tuple[int, ...]]] = {
    "keep-all": lambda game, _: keep_all(game),
    "keep-none": lambda game, _: keep_none(game),
    "sqrt-n": lambda game, _: segments(game),
    "revolve": lambda game, _: revolve(game),
    "greedy": greedy,
}


def rows(game: Game, budget: int) -> list[Row]:
    """The rows of all strategies that apply to the graph."""
    found = []
    for plan in STRATEGIES.values():
        try:
            found.append(game.row(plan(game, budget)))
        except (GraphError, RecursionError):
            continue
    return found
