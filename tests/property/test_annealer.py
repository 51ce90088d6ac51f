"""The counts that the compiled search updates move by move, against fresh counts of the rows that it reaches."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.planning.search.annealing import Annealer, library
from lowtide.planning.graph_arrays import game_of, profile
from lowtide.planning.graph import Graph, Node
from lowtide.planning.search.rows_from_bound import row_without
from property.graphs import full_graphs


@pytest.mark.skipif(library() is None, reason="the search was not compiled")
@settings(max_examples=150, deadline=None)
@given(
    st.booleans().flatmap(lambda held: full_graphs(most=60, states=True, held=held)),
    st.booleans(), st.booleans(), st.integers(1, 1000), st.data(),
)
def test_incremental_counts_equal_fresh_counts_of_the_row(
    graph: Graph, fixed: bool, copies: bool, seed: int, data: st.DataObject
) -> None:
    """After thousands of moves made and undone, over_bytes and seconds are those of a fresh count of the row. Where the row is
    a schedule without a limit on the offload tier, over_bytes is also that of the profile.
    """
    game = game_of(graph)
    peak = int(profile(game, game.given).max())
    budget = data.draw(st.integers(peak // 3, peak))
    annealer = Annealer(game, budget, fixed=fixed)
    found = annealer.round(
        game.given, moves=5000, hot=1e-1, cold=1e-3, copies=copies, seed=seed, deadline=time.monotonic() + 60,
        target_seconds=-1.0,
    )
    anew = annealer.count(found.ops)
    assert (found.over_bytes, found.seconds) == (anew.over_bytes, pytest.approx(anew.seconds))
    held = any(node.held_until is not None for node in graph.nodes)  # rows that run an operator whose value is held are no schedules
    if not held and (graph.offload is None or graph.offload.host_bytes is None):
        high = profile(game, found.ops)
        assert found.over_bytes == np.maximum(high - max(budget, graph.resident_bytes + 1), 0).sum()


@pytest.mark.skipif(library() is None, reason="the search was not compiled")
@pytest.mark.parametrize("readers", [10, 30, 100])
def test_counts_hold_however_often_an_operator_runs_again(readers: int) -> None:
    """Law: however often an operator stands in a row (a mask that every layer reads), the row is counted correctly."""
    nodes = [Node(id="mask", bytes=100, seconds=1e-3)]
    for k in range(readers):
        before = (2 * k,) if k else ()
        nodes.append(Node(id=f"wide{k}", bytes=100, seconds=1.0, workspace_bytes=200 + k, parents=before))
        nodes.append(Node(id=f"masked{k}", bytes=10, seconds=1.0, parents=(2 * k + 1, 0)))
    game = game_of(Graph(nodes=tuple(nodes), order=tuple(range(len(nodes)))))
    row = row_without(game, {o: {0} for o in range(1, game.plain, 2)})
    assert row.count(0) >= readers
    for below in (5, 100):
        budget = int(profile(game, row).max()) - below
        annealer = Annealer(game, budget, fixed=True)
        assert annealer.count(row).over_bytes == np.maximum(profile(game, row) - budget, 0).sum()
        found = annealer.round(
            row, moves=20000, hot=1e-2, cold=1e-5, copies=True, seed=1, deadline=time.monotonic() + 60, target_seconds=-1.0
        )
        assert found.over_bytes == np.maximum(profile(game, found.ops) - budget, 0).sum()
        assert found.seconds == pytest.approx(sum(game.seconds[o] for o in found.ops))
