"""Minimum cuts of one instant in free order against all schedules of small graphs, and against what one instant proves alone."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lowtide.planning.bounds.instant_cut import InstantCut, applies
from lowtide.planning.bounds.order_cut import OrderCut
from lowtide.planning.check.points import Points
from lowtide.planning.check.program import Program, closed
from lowtide.planning.graph import Graph
from lowtide.planning.referee import play
from lowtide.planning.schedule import unfold
from lowtide.planning.search import exhaustive
from lowtide.planning.solver.solve import Order, Solver
from property.graphs import full_graphs

CLOSE = 1e-6


def _bounds(solver: Solver, budget: int) -> list[float]:
    return [OrderCut(solver.game, solver.precedence, at).at(budget).value for at in solver.instants]


@settings(max_examples=100, deadline=None)
@given(full_graphs(most=7, once=3, held=True), st.integers(0, 99))
def test_no_schedule_in_any_order_beats_the_bound(graph: Graph, percent: int) -> None:
    """Against the cheapest of all schedules, with everything that a graph can have."""
    solver = Solver(graph, order=Order.FREE)
    low, top = solver.floor.bytes, solver.given.peak_bytes
    assume(applies(solver.game) and exhaustive.small(graph))
    budget = low + (top - low) * percent // 100
    row = exhaustive.search(graph, budget, fixed=False)
    assume(row is not None)
    least = play(graph, unfold(graph, row)).seconds - graph.base_seconds
    for bound in _bounds(solver, budget):
        assert bound * graph.base_seconds <= least + CLOSE * (1 + graph.base_seconds)


@settings(max_examples=100, deadline=None)
@given(full_graphs(most=12, once=3, held=True), st.integers(0, 99))
def test_the_checker_proves_the_same_by_a_linear_program(graph: Graph, percent: int) -> None:
    """Its rows say the same in other words: what the cuts prove is not above it, and little below."""
    solver = Solver(graph, order=Order.FREE)
    low, top = solver.floor.bytes, solver.given.peak_bytes
    assume(applies(solver.game) and low < top)
    budget = low + (top - low) * percent // 100
    points, base = Points(graph, fixed=False), graph.base_seconds or 1.0
    for at in solver.instants:
        if at.op == solver.game.last:
            continue
        op = points.index[graph.nodes[solver.game.nodes[at.op]].id]
        cut = OrderCut(solver.game, solver.precedence, at)
        program = Program(points, max(1, budget), base)
        program.any_order(op)
        proved, found = program.solve(0.0), cut.at(budget).value
        if proved == math.inf:
            assert found in (0.0, math.inf)
        else:
            assert found == pytest.approx(proved, abs=1e-5)
        least = closed(points, op, any_order=True)
        assert least == pytest.approx(cut.least_bytes, abs=1 + 2e-6 * least)
        if all(n.held_until is None for n in graph.nodes):  # what a script holds counts only as read here
            alone = InstantCut(solver.game, solver.precedence, at)
            assert cut.at(budget).value >= alone.at(budget).value - 1e-6
            assert cut.least_bytes >= alone.least_bytes - 1


@settings(max_examples=100, deadline=None)
@given(full_graphs(most=7, once=3, held=True))
def test_nothing_fits_below_the_floor_over_all_orders(graph: Graph) -> None:
    solver = Solver(graph, order=Order.FREE)
    assume(exhaustive.small(graph))
    for at in solver.instants:
        floor = OrderCut(solver.game, solver.precedence, at).least_bytes
        assert floor <= 0 or exhaustive.search(graph, floor - 1, fixed=False) is None
