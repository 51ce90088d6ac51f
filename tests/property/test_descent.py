"""Laws: the greedy descent gives rows that can run with ever lower peaks, and comes near the floor of networks."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lowtide.planning.search.descent import Descent
from lowtide.planning.graph import Graph
from lowtide.planning.referee import play
from lowtide.planning.schedule import unfold
from lowtide.planning.solver.solve import Solver
from property.graphs import full_graphs
from property.test_long_graphs import blocks

KINDS = [(2, 1.0), (8, 20.0), (3, 2.0), (8, 1.0), (2, 20.0)]


@settings(max_examples=150, deadline=None)
@given(graph=full_graphs(most=12, states=True))
def test_every_row_can_run_and_peaks_lower_than_the_one_before(graph: Graph) -> None:
    """The peaks are those of the referee, and none is below the floor."""
    solver = Solver(graph)
    way = Descent(solver.game, solver.floor.bytes)
    way.below(solver.floor.bytes, deadline=math.inf)
    peaks = [play(graph, unfold(graph, solver.game.row(row))).peak_bytes for _, row in way.rows]
    assert peaks == [peak for peak, _ in way.rows]
    assert peaks == sorted(set(peaks), reverse=True)
    assert peaks[-1] >= solver.floor.bytes


@pytest.mark.parametrize("depth", [12, 40])
def test_networks_of_blocks_descend_close_to_their_floor(depth: int) -> None:
    """The lowest row is within 12 % of the way from the floor to the given order's peak."""
    solver = Solver(blocks(KINDS, depth))
    low, top = solver.floor.bytes, solver.given.peak_bytes
    way = Descent(solver.game, low)
    way.below(low, deadline=math.inf)
    assert way.rows[-1][0] - low < 0.12 * (top - low)


@settings(max_examples=20, deadline=None)
@given(share=st.floats(0.2, 0.9))
def test_the_descent_continues_the_same_whatever_was_asked_before(share: float) -> None:
    """A descent to a higher budget first gives the same rows as one directly to the budget."""
    solver = Solver(blocks(KINDS, 12))
    low, top = solver.floor.bytes, solver.given.peak_bytes
    budget = int(low + share * (top - low))
    once, twice = Descent(solver.game, low), Descent(solver.game, low)
    twice.below((budget + top) // 2, deadline=math.inf)
    assert twice.below(budget, deadline=math.inf) == once.below(budget, deadline=math.inf)
    assert twice.rows == once.rows


@pytest.mark.long
def test_a_curve_has_a_plan_for_every_budget_above_the_floor() -> None:
    solver = Solver(blocks(KINDS, 12))
    solver.descent.below(solver.floor.bytes, deadline=math.inf)  # each of its rows is a plan for some budget, whatever the time
    answers = solver.curve(13, seconds=6)
    assert all(answer.status.has_plan for answer in answers[:-1])
