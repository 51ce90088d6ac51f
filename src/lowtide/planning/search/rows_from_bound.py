"""Builds a row from the values absent at a few instants: each comes back as late and as directly as possible."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from lowtide.planning.graph_arrays import Game


def row_without(
    game: Game, absent: Mapping[int, AbstractSet[int]], fetched: AbstractSet[int] = frozenset(), *, forgets: bool = False
) -> tuple[int, ...]:
    """The given order, with values dropped before some operators run and brought back when they are next read.

    Args:
        game: the game.
        absent: per operator, values that are not on the board when it first runs.
        fetched: values that come back from the second board; all others are recomputed, with everything that this needs.
        forgets: whether values that no operator of the given order reads any more are dropped, although others could be
            recomputed from them: more runs, fewer bytes. (If False, the old value of an in-place operator may stay beside
            the new one.)
    """
    readers_left = [len(r) for r in game.readers]
    returns = game.returns.tolist()
    present: set[int] = set()
    row: list[int] = []
    for o in range(game.plain):
        present -= {v for v in absent.get(o, frozenset()) if returns[v]}
        for q in _missing(game, o, present, fetched):
            row.append(q)
            present.update(game.outputs[q])
        row.append(o)
        present.update(game.outputs[o])
        for v in game.inputs[o]:
            readers_left[v] -= 1
            if readers_left[v] or not returns[v] or game.graph.nodes[game.value_nodes[v]].keep:
                continue
            if forgets:
                present.discard(v)
    return tuple(row)


def _missing(game: Game, o: int, present: set[int], fetched: AbstractSet[int]) -> list[int]:
    """Operators to run, in a valid order, so that everything that operator ``o`` reads is on the board."""
    if present.issuperset(game.inputs[o]):
        return []
    producer, fetcher, again = game.lists.producer, game.lists.fetcher, game.lists.again
    found: list[int] = []
    seen: set[int] = set()
    stack = [(v, False) for v in reversed(game.inputs[o])]
    while stack:
        v, ready = stack.pop()
        if ready:
            found.append(producer[v])
            continue
        if v in present or v in seen:
            continue
        q, fetch = producer[v], fetcher[v]
        if fetch >= 0 and (v in fetched or not again[q]):
            seen.add(v)
            found.append(fetch)
            continue
        seen.update(game.outputs[q])
        stack.append((v, True))
        stack += [(u, False) for u in reversed(game.inputs[q])]
    return found
