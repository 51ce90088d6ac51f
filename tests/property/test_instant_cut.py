"""Minimum cuts of one instant against the linear program that they stand for, and against what the rules allow."""

from __future__ import annotations

import itertools
import math
from collections.abc import Set as AbstractSet
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lowtide.planning.bounds import instant_cut, peak_bounds, time_bounds
from lowtide.planning.bounds.bound_program import Program
from lowtide.planning.bounds.instant_cut import InstantCut, applies
from lowtide.planning.bounds.precedence import Instant
from lowtide.planning.bounds.program_points import stages
from lowtide.planning.check.check import check
from lowtide.planning.check.points import Points
from lowtide.planning.check.program import closed
from lowtide.planning.graph import Graph
from lowtide.planning.graph_json import from_json
from lowtide.planning.referee import play
from lowtide.planning.schedule import unfold
from lowtide.planning.search.checkpoints import SPACINGS, Crossings
from lowtide.planning.search.rows_from_bound import row_without
from lowtide.planning.solver.figures import to_json
from lowtide.planning.solver.solve import Order, Solver
from property.graphs import full_graphs
from property.test_long_graphs import blocks

KINDS = [(3, 1.0), (1, 2.0), (8, 1.0), (5, 20.0), (2, 1.0)]
CLOSE = 1e-5
"""HiGHS's tolerances, and what rounding capacities down takes, as shares of the graph's seconds."""
MANY, MORE = settings(max_examples=60, deadline=None), settings(max_examples=200, deadline=None)


def _asked(graph: Graph, fixed: bool, percent: int) -> tuple[Solver, int]:
    solver = Solver(graph, order=Order.FIXED if fixed else Order.FREE)
    low, top = solver.floor.bytes, solver.given.peak_bytes
    assume(low < top and applies(solver.game))
    return solver, low + (top - low) * percent // 100


@MANY
@given(full_graphs(most=14, once=3, held=True), st.booleans(), st.integers(0, 99))
def test_the_cuts_prove_what_the_relaxed_program_proves(graph: Graph, fixed: bool, percent: int) -> None:
    """Never more, and no less than tolerances take: also where nothing fits, with a second board and in free order."""
    solver, budget = _asked(graph, fixed, percent)
    for at in solver.instants:
        found = InstantCut(solver.game, solver.precedence, at).at(budget)
        relaxed = stages(solver.game, solver.precedence, [at], budget).solve(60, whole=False)
        if relaxed.impossible:
            assert found.value in (math.inf, 0.0)
        else:
            assert found.value == pytest.approx(relaxed.value, abs=CLOSE)
            assert found.value <= relaxed.value + 1e-6


@MANY
@given(full_graphs(most=14, once=3, held=True), st.booleans())
def test_the_fewest_bytes_are_those_of_the_relaxed_program(graph: Graph, fixed: bool) -> None:
    """The checker proves what is told of them, and at a budget of so many bytes something fits."""
    solver, _ = _asked(graph, fixed, 50)
    points = Points(graph, fixed=fixed)
    for at in solver.instants:
        least = InstantCut(solver.game, solver.precedence, at).least_bytes
        relaxed = peak_bounds.closed_floor(solver.game, solver.precedence, at, seconds=60)
        assert relaxed.bytes == pytest.approx(least, abs=1 + 2e-6 * least)
        with mock.patch.object(peak_bounds, "LONG", 0):
            told = peak_bounds.closed_floor(solver.game, solver.precedence, at, seconds=0)
        assert told.bytes <= least
        if told.node >= 0:
            assert closed(points, points.index[graph.nodes[told.node].id]) >= told.bytes
        value = InstantCut(solver.game, solver.precedence, at).at(least).value
        assert type(value) is float
        assert value < math.inf


def _seconds_to_come_back(solver: Solver, at: Instant, absent: AbstractSet[int], fetched: AbstractSet[int]) -> float:
    """Seconds to bring back, from what is on the board at an instant, everything that is read there or later."""
    game, made = solver.game, at.done[solver.game.producer]
    later = [*np.nonzero(at.ahead)[0].tolist(), at.op]
    wanted = [v for o in later for v in game.inputs[o] if made[v]]
    spent, runs, seen = 0.0, set(), set()
    while wanted:
        v = wanted.pop()
        if v in seen or v not in absent:
            continue
        seen.add(v)
        o, fetch = int(game.producer[v]), int(game.fetcher[v])
        if v in fetched:
            spent += game.seconds[fetch] + game.once[fetch]
        elif o not in runs:
            assert game.again[o]
            runs.add(o)
            spent += game.seconds[o]
            wanted += [p for p in game.inputs[o] if made[p]]
    return float(spent)


@MANY
@given(full_graphs(most=14, once=3, held=True), st.integers(0, 99), st.data())
def test_the_answer_is_whole_and_fits_at_the_instant(graph: Graph, percent: int, data: st.DataObject) -> None:
    """What is absent can come back, which costs at least the bound; the rest, with what was to be kept, is within the budget."""
    solver, budget = _asked(graph, True, percent)
    game = solver.game
    at = max(solver.instants, key=solver.precedence.bytes_once)
    made = at.done[game.producer]
    kept = frozenset(data.draw(st.sets(st.sampled_from(np.nonzero(made)[0].tolist()), max_size=2))) if made.any() else frozenset()
    found = InstantCut(game, solver.precedence, at).at(budget, kept=kept)
    assume(found.absent)
    assert not found.absent & kept
    assert found.fetched <= found.absent
    on = made.copy()
    on[list(found.absent)] = False
    assert solver.precedence.bytes_with(at, on) <= budget
    spent = _seconds_to_come_back(solver, at, found.absent, found.fetched)
    assert spent >= found.value * graph.base_seconds * (1 - CLOSE)


def test_parts_that_change_keep_what_their_operators_read() -> None:
    """Where one cut runs an operator for a value and the other has no need of it, both belong to the same part."""
    sizes = {"w": 10, "v": 150, "x": 100, "big": 200, "end": 1}
    nodes = [{"id": name, "bytes": size, "seconds": 1, "move": name not in "wv"} for name, size in sizes.items()]
    nodes[0]["recompute"] = False
    links = [{"source": a, "target": b} for a, b in ("wv", "vx")] + [{"source": a, "target": "end"} for a in ("x", "big")]
    offload = {"write_bytes_per_second": 20.0, "read_bytes_per_second": 20.0}
    solver = Solver(from_json({"nodes": nodes, "links": links, "graph": {"offload": offload}}))
    at = solver.precedence.instant(3)
    for budget in range(200, 312):
        found = InstantCut(solver.game, solver.precedence, at).at(budget)
        assert _seconds_to_come_back(solver, at, found.absent, found.fetched) >= found.value * 5 * (1 - CLOSE)


def test_a_deadline_ends_the_search_for_a_price(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is proven then is weaker and holds, and the answer fits."""
    solver = Solver(blocks(KINDS, 40))
    budget = solver.floor.bytes + (solver.given.peak_bytes - solver.floor.bytes) // 3
    at = max(solver.instants, key=solver.precedence.bytes_once)
    cut = InstantCut(solver.game, solver.precedence, at)
    clock = itertools.chain([0.0, 0.0], itertools.repeat(1.0))
    monkeypatch.setattr(instant_cut, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    early, whole = cut.at(budget, deadline=1.0), cut.at(budget)
    assert 0 <= early.value < whole.value
    on = at.done[solver.game.producer]
    on[list(early.absent)] = False
    assert solver.precedence.bytes_with(at, on) <= budget


@pytest.mark.parametrize("percent", [30, 50, 80])
def test_an_answer_for_equal_blocks_costs_at_most_one_block_more_than_the_bound(percent: int) -> None:
    """Between the two cheapest cuts, as many blocks change as the budget demands; the first of them are dropped."""
    depth = 60
    solver = Solver(blocks(KINDS, depth))
    budget = solver.floor.bytes + (solver.given.peak_bytes - solver.floor.bytes) * percent // 100
    at = max(solver.instants, key=solver.precedence.bytes_once)
    found = InstantCut(solver.game, solver.precedence, at).at(budget)
    row = row_without(solver.game, {at.op: found.absent})
    spent = play(solver.graph, unfold(solver.graph, solver.game.row(row))).seconds - solver.graph.base_seconds
    proven = found.value * solver.graph.base_seconds
    assert proven * (1 - CLOSE) <= spent <= proven + sum(seconds for _, seconds in KINDS)


def test_a_long_graph_is_bounded_and_planned_without_a_linear_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """6,000 operators at 30 %: a row with checkpoints fits, within 1 % of the graph's seconds of what the cut proves."""
    monkeypatch.setattr(Program, "solve", mock.Mock(side_effect=AssertionError("a linear program was solved")))
    solver = Solver(blocks(KINDS, 600))
    assert solver.game.plain > instant_cut.LONG
    budget = solver.floor.bytes + (solver.given.peak_bytes - solver.floor.bytes) * 3 // 10
    bounds = list(time_bounds.single_instants(solver.game, solver.precedence, solver.instants, budget, seconds=60))
    at = solver.precedence.instant(next(iter(bounds[0].absent)))
    alone = time_bounds.Alone(solver.game, solver.precedence, at, budget)
    programs = solver.programs(budget, deadline=math.inf)
    rows = [programs.with_room(alone, kept=Crossings(solver.game, at.op).values(s))[-1:] for s in SPACINGS]
    fitting = [row for new in rows for row in new if programs.fits(row)]
    spent = min(play(solver.graph, unfold(solver.graph, solver.game.row(row))).seconds for row in fitting)
    assert 0 < bounds[0].seconds <= spent - solver.game.base_seconds <= bounds[0].seconds + 0.01 * solver.game.base_seconds
    assert time_bounds.price(solver.game, solver.precedence, bounds[0], budget, budget // 10) > 0
    assert solver.told_floor.bytes >= solver.floor.bytes


@MORE
@given(full_graphs(most=14, once=3, held=True), st.booleans(), st.integers(0, 3))
def test_no_instant_but_the_highest_is_bounded_by_infinity(graph: Graph, fixed: bool, percent: int) -> None:
    """Bounds stand in the answer, and the seconds at which a search ends are made of them."""
    solver, budget = _asked(graph, fixed, percent)
    with mock.patch.object(instant_cut, "LONG", 0):
        spread = time_bounds.binding(solver.precedence, solver.instants, budget)
        others = time_bounds.other_instants(solver.game, solver.precedence, spread, budget, deadline=math.inf)
        for bound in others:
            assert bound.seconds < math.inf
            assert time_bounds.price(solver.game, solver.precedence, bound, budget, 1) < math.inf


def test_a_proof_that_nothing_fits_is_no_bound_of_an_answer() -> None:
    """It is for floors to prove; an answer's seconds stand in a file, and a search ends when a plan meets them."""
    solver = Solver(blocks(KINDS, 20))
    programs = solver.programs(solver.given.peak_bytes - 1, deadline=0.0)
    nothing_fits = time_bounds.TimeBound(seconds=math.inf, method="instant", solved=True)
    assert programs.prove([[nothing_fits], []]).seconds == 0.0


def test_what_a_cut_proves_passes_the_checker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checker solves the linear program of the instant with a model of its own."""
    monkeypatch.setattr(instant_cut, "LONG", 10)
    monkeypatch.setattr(peak_bounds, "LONG", 10)
    solver = Solver(blocks(KINDS, 20))
    budget = solver.floor.bytes + (solver.given.peak_bytes - solver.floor.bytes) // 2
    answer = solver.at(budget, seconds=1)
    assert answer.time_bound.seconds > 0
    assert check(answer.graph, to_json(answer)) == []
    raised = to_json(answer)
    raised["bound"]["extra_seconds"] = answer.time_bound.seconds * 1.001
    assert check(answer.graph, raised)
