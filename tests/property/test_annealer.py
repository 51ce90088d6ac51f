"""What the compiled search counts move by move against fresh counts of the rows that it comes to."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.pebble.anneal import Annealer, library
from lowtide.pebble.game import game_of, profile
from lowtide.pebble.graph import Graph
from property.graphs import full_graphs


@pytest.mark.skipif(library() is None, reason="the search was not compiled")
@settings(max_examples=150, deadline=None)
@given(
    st.booleans().flatmap(lambda held: full_graphs(most=60, states=True, held=held)),
    st.booleans(), st.booleans(), st.integers(1, 1000), st.data(),
)
def test_bytes_above_the_budget_and_seconds_are_those_of_the_row(
    graph: Graph, fixed: bool, copies: bool, seed: int, data: st.DataObject
) -> None:
    """After thousands of moves taken and taken back: over_bytes and seconds are what fresh counts of the row say."""
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
    held = any(node.held_until is not None for node in graph.nodes)  # rows that place what is held again are no schedules
    if not held and (graph.offload is None or graph.offload.host_bytes is None):
        high = profile(game, found.ops)
        assert found.over_bytes == np.maximum(high - max(budget, graph.resident_bytes + 1), 0).sum()
