"""Prefetching: if transfers overlap with computation, moves a row's fetches ahead so that values arrive in time.

A fetched value's bytes count from the request on, so a fetch that starts too early takes room from others. Each fetch is moved
ahead only as far as necessary for the value to have arrived when it is read, and only as far as there is room.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

from lowtide.planning.graph import Graph
from lowtide.planning.referee import Timeline, play
from lowtide.planning.schedule import Act, Move, Row, life_ends, unfold


def with_fetches_ahead(graph: Graph, row: Row, timeline: Timeline, budget: int) -> Row:
    """The row with its fetches moved ahead, in unchanged order.

    Args:
        graph: the graph; it must have a second board.
        row: the plan.
        timeline: the outcome of playing it.
        budget: in bytes; fetches are moved only as far as it allows.
    """
    assert graph.offload is not None
    high = _high(graph, row, timeline)
    work = [0.0 if move.act is Act.FETCH else graph.nodes[move.node].seconds for move in row]
    before = [0.0, *itertools.accumulate(work)]
    ends = life_ends(graph, row)
    moved: dict[int, list[Move]] = {}
    arrives, earliest = 0.0, 0
    for t in [t for t, move in enumerate(row) if move.act is Act.FETCH]:
        size, gone = graph.nodes[row[t].node].bytes, ends.get(row[t].node, [])
        took = size / graph.offload.read_bytes_per_second
        first = max(earliest, gone[k - 1] + 1 if (k := bisect_left(gone, t)) else 0)
        place, begins = t, max(arrives, before[t] - took)  # starting earlier gains nothing
        while place > first and before[place] > begins and high[place - 1] + size <= budget:
            place -= 1
        high[place:t] += size
        moved.setdefault(place, []).append(row[t])
        arrives, earliest = max(before[place], arrives) + took, place
    return tuple(
        move for t in range(len(row)) for move in (*moved.get(t, ()), *(() if row[t].act is Act.FETCH else (row[t],)))
    )


def _high(graph: Graph, row: Row, timeline: Timeline) -> NDArray[np.int64]:
    """Per move of a row, peak bytes from that move until the next one."""
    at = [k for k, move in enumerate(unfold(graph, row)) if move.act in (Act.COMPUTE, Act.UPDATE, Act.FETCH)]
    return np.maximum.reduceat(timeline.bytes_at, at)


def faster(graph: Graph, row: Row, timeline: Timeline, budget: int) -> tuple[Row, Timeline]:
    """The row with its fetches moved ahead, if the referee finds that it fits and is faster; otherwise the row itself.

    Args:
        graph: the graph; the row is unchanged if transfers do not overlap with computation.
        row: the plan.
        timeline: the outcome of playing it.
        budget: in bytes, for the peak.

    Returns:
        The row and the outcome of playing it.
    """
    if graph.offload is None or not graph.offload.overlap or all(move.act is not Act.FETCH for move in row):
        return row, timeline
    ahead = with_fetches_ahead(graph, row, timeline, budget)
    played = play(graph, unfold(graph, ahead))
    better = played.peak_bytes <= budget and played.seconds < timeline.seconds
    return (ahead, played) if better else (row, timeline)
