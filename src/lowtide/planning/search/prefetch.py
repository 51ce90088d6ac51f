"""Fetches ahead of need: where transfers overlap with computing, a row's fetches begin as early as they must and may.

A fetched value counts from the request on, so what is asked for too early takes room from others: each fetch moves back just
as far as it must for its value to have arrived when it is read, or as far as there is room.
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
    """A row whose fetches stand earlier, in the same order.

    Args:
        graph: what is asked, with a second board.
        row: the plan, in short.
        timeline: how it plays.
        budget: what the new row's peak is within.
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
        place, begins = t, max(arrives, before[t] - took)  # no use in being earlier
        while place > first and before[place] > begins and high[place - 1] + size <= budget:
            place -= 1
        high[place:t] += size
        moved.setdefault(place, []).append(row[t])
        arrives, earliest = max(before[place], arrives) + took, place
    return tuple(
        move for t in range(len(row)) for move in (*moved.get(t, ()), *(() if row[t].act is Act.FETCH else (row[t],)))
    )


def _high(graph: Graph, row: Row, timeline: Timeline) -> NDArray[np.int64]:
    """Per move of a row the highest point until the next one."""
    at = [k for k, move in enumerate(unfold(graph, row)) if move.act in (Act.COMPUTE, Act.UPDATE, Act.FETCH)]
    return np.maximum.reduceat(timeline.bytes_at, at)


def faster(graph: Graph, row: Row, timeline: Timeline, budget: int) -> tuple[Row, Timeline]:
    """The row with fetches ahead of need where the referee says that it fits and takes less time; else the row itself.

    Args:
        graph: what is asked; nothing changes where transfers do not overlap with computing.
        row: the plan, in short.
        timeline: how it plays.
        budget: what its peak is within.
    """
    if graph.offload is None or not graph.offload.overlap or all(move.act is not Act.FETCH for move in row):
        return row, timeline
    ahead = with_fetches_ahead(graph, row, timeline, budget)
    played = play(graph, unfold(graph, ahead))
    better = played.peak_bytes <= budget and played.seconds < timeline.seconds
    return (ahead, played) if better else (row, timeline)
