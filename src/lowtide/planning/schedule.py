"""Schedules of a graph, move by move, and rows, the short form that solvers work on."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from lowtide.base.errors import GraphError
from lowtide.planning.graph import Graph


class Act(StrEnum):
    """One kind of move.

    ``update`` computes a node in place: the node takes over the storages of the nodes that it overwrites.
    """

    COMPUTE = "compute"
    UPDATE = "update"
    FREE = "free"
    OFFLOAD = "offload"
    FETCH = "fetch"


class Move(NamedTuple):
    """One act on one node (its index)."""

    act: Act
    node: int


Schedule = tuple[Move, ...]

Row = tuple[Move, ...]
"""Only the moves ``compute`` and ``fetch``, in order; frees and offloads follow from them (:func:`unfold`)."""


def plain_row(graph: Graph, order: Sequence[int] | None = None) -> Row:
    """The row that runs every operator once in ``order`` (default: the graph's given order)."""
    return tuple(
        Move(Act.COMPUTE, v)
        for v in (graph.order if order is None else order)
        if graph.nodes[v].made_with is None and not graph.nodes[v].resident
    )


def unfold(graph: Graph, row: Row) -> Schedule:
    """The schedule that a row stands for: every value is freed right after the last use before it is placed again.

    An operator that can overwrite runs in place wherever no later move uses the old value. A value that is fetched anywhere
    is offloaded right after it is first computed.

    Raises:
        GraphError: if the row computes a node before a value that it reads.
    """
    lives, leaving = _lives(graph, row)
    out: list[Move] = []
    written: set[int] = set()
    fetched = {m.node for m in row if m.act is Act.FETCH}
    board: set[int] = set()
    for t, move in enumerate(row):
        for v in [u for u in _placed(graph, move) if u in board]:
            out.append(Move(Act.FREE, v))
            board.discard(v)
        act = move.act
        olds = graph.olds[move.node]
        if act is Act.COMPUTE and olds and all((t, old) in leaving for old in olds):
            act = Act.UPDATE
            board.difference_update(olds)
        out.append(Move(act, move.node))
        board.update(_placed(graph, move))
        for v in _placed(graph, move):
            if v in fetched and v not in written and move.act is Act.COMPUTE:
                written.add(v)
                out.append(Move(Act.OFFLOAD, v))
        for v in lives.get(t, ()):
            if v in board:
                out.append(Move(Act.FREE, v))
                board.discard(v)
    return tuple(out)


def _placed(graph: Graph, move: Move) -> tuple[int, ...]:
    return (move.node,) if move.act is Act.FETCH else (move.node, *graph.members[move.node])


def _lives(graph: Graph, row: Row) -> tuple[dict[int, list[int]], set[tuple[int, int]]]:
    """Per place in the row, the values whose lives end there; and the (place, value) pairs that end by being overwritten."""
    placed: dict[int, int] = {}
    last: dict[tuple[int, int], int] = {}
    first_run: dict[int, int] = {}
    for t, move in enumerate(row):
        if move.act is not Act.FETCH:
            first_run.setdefault(move.node, t)
            for p in graph.reads[move.node]:
                if not graph.nodes[p].resident:
                    if p not in placed:
                        raise GraphError(f"the row computes {graph.nodes[move.node].id!r} before {graph.nodes[p].id!r}")
                    last[p, placed[p]] = t
        for v in _placed(graph, move):
            placed[v] = t
            last[v, t] = t
    held = {v: n.held_until for v, n in enumerate(graph.nodes) if n.held_until is not None}
    ends: dict[int, list[int]] = {}
    overwritten: set[tuple[int, int]] = set()
    first_seen: set[int] = set()
    for (v, start), used in last.items():
        end = used
        if v in held and v not in first_seen:
            end = max(used, first_run.get(graph.leader(held[v]), used))
        first_seen.add(v)
        if graph.nodes[v].keep and placed[v] == start:
            continue
        ends.setdefault(end, []).append(v)
        move = row[end]
        if move.act is Act.COMPUTE and v in graph.olds[move.node] and end > start:
            overwritten.add((end, v))
    return ends, overwritten


def life_ends(graph: Graph, row: Row) -> dict[int, list[int]]:
    """Per value, the places in a row at which its lives end, in ascending order."""
    found: dict[int, list[int]] = {}
    for t, values in sorted(_lives(graph, row)[0].items()):
        for v in values:
            found.setdefault(v, []).append(t)
    return found


def to_json(graph: Graph, schedule: Schedule) -> list[list[Any]]:
    """``[[action, node id], …]``."""
    return [[m.act.value, graph.nodes[m.node].id] for m in schedule]


def from_json(graph: Graph, data: object) -> Schedule:
    """A schedule from ``[[action, node id], …]``.

    Raises:
        GraphError: names the first entry that is not a move of this graph.
    """
    if not isinstance(data, list):
        raise GraphError("a schedule must be a list of [action, node] pairs")
    index = {n.id: v for v, n in enumerate(graph.nodes)}
    known = {a.value for a in Act}
    moves = []
    for i, entry in enumerate(data):
        match entry:
            case [str(act), int() | str() as name] if act in known and name in index:
                moves.append(Move(Act(act), index[name]))
            case _:
                raise GraphError(f"entry {i} of the schedule, {entry!r}, is not an [action, node] pair of this graph")
    return tuple(moves)
