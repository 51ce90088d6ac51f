"""The referee against a second implementation of the rules; solvers and bounds against all schedules of small graphs."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import time
from dataclasses import replace
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lowtide.base.errors import GraphError, StructureError
from lowtide.recording.peak_floor import with_board
from lowtide.planning.solver import figures
from lowtide.planning.bounds import bound_program, peak_bounds, time_bounds
from lowtide.planning.search import exhaustive
from lowtide.planning.search.annealing import Annealer, AnnealedRow, library
from lowtide.planning.bounds.precedence import certain_in_order
from lowtide.planning.check.check import check
from lowtide.planning.search.classics import STRATEGIES
from lowtide.planning.graph_arrays import Game, game_of, profile
from lowtide.planning.graph import Graph
from lowtide.planning.graph_json import from_json, to_json
from lowtide.planning.search.prefetch import faster, with_fetches_ahead
from lowtide.planning.referee import play
from lowtide.planning.schedule import Act, Move, Row, plain_row, unfold
from lowtide.planning.search.rounds import Hunt
from lowtide.planning.solver.solve import Order, Solver, Status
from lowtide.planning.bounds.windows import chain_seconds
from patience import in_time
from property.graphs import cheapest, full_graphs, plain_graphs

_FEW = settings(max_examples=60, deadline=None)


def _random_row(graph: Graph, rnd: random.Random) -> Row:
    """Any order of first runs, with random reruns and fetches in between."""
    nodes = graph.nodes
    ops = [v for v in graph.order if nodes[v].made_with is None and not nodes[v].resident]
    leader = {u: v for v in ops for u in (v, *graph.members[v])}
    done: list[int] = []
    row: list[Move] = []
    while len(done) < len(ops):
        ready = [v for v in ops if v not in done and all(leader[p] in done for p in graph.reads[v] if not nodes[p].resident)]
        v = rnd.choice(ready)
        done.append(v)
        row.append(Move(Act.COMPUTE, v))
        for _ in range(rnd.randint(0, 2)):
            again = rnd.choice(done)
            if nodes[again].recompute:
                row.append(Move(Act.COMPUTE, again))
            elif graph.offload is not None and nodes[again].move:
                row.append(Move(Act.FETCH, again))
    return tuple(row)


@_FEW
@given(full_graphs(states=True, overlap=True), st.integers(0, 2**32), st.floats(0, 1))
def test_prefetches_keep_rules_order_and_budget_and_cost_no_time(graph: Graph, seed: int, share: float) -> None:
    """with_fetches_ahead: the same moves, with the order among fetches and among all others unchanged, within the budget.
    faster: never slower.
    """
    row = _random_row(graph, random.Random(seed))
    try:
        plain = play(graph, unfold(graph, row))
    except StructureError:
        assume(False)
    assume(graph.offload is not None)
    budget = plain.peak_bytes + int(share * sum(n.bytes for n in graph.nodes))
    ahead = with_fetches_ahead(graph, row, plain, budget)
    for fetches in (True, False):
        assert [m for m in ahead if (m.act is Act.FETCH) is fetches] == [m for m in row if (m.act is Act.FETCH) is fetches]
    assert play(graph, unfold(graph, ahead)).peak_bytes <= budget
    assert faster(graph, row, plain, budget)[1].seconds <= plain.seconds


def _boards(seed: int, *, overlap: bool) -> Graph:
    """120 operators, half of which may run again or move."""
    rnd = random.Random(seed)
    nodes = [
        {"id": k, "bytes": rnd.randint(1, 100), "seconds": rnd.random(), "recompute": rnd.random() < 0.5,
         "move": rnd.random() < 0.5, "workspace_bytes": rnd.randint(0, 50)} for k in range(120)
    ]  # fmt: skip
    links = [{"source": a, "target": b} for b in range(120) for a in range(b) if rnd.random() < 3 / 120]
    board2 = {"write_bytes_per_second": 100.0, "read_bytes_per_second": 100.0, "overlap": overlap}
    return from_json({"graph": {"offload": board2}, "nodes": nodes, "links": links})


def test_instants_crossed_by_a_row_are_never_fetches() -> None:
    """They are first runs; the arrays of a program have no place for other moves."""
    solver = Solver(_boards(0, overlap=False))
    game = solver.game
    fetch = next(o for o in range(game.plain, len(game.outputs)))
    programs = solver.programs(0, deadline=0.0)
    for place in range(1, len(game.given)):
        found = programs.crossed((*game.given[:place], fetch, *game.given[place:]), set(), most=3)
        assert found
        assert all(o < game.plain for o in found)


@pytest.mark.parametrize("lower_first", [False, True])
def test_of_two_searches_without_a_plan_the_lower_row_is_reported(*, lower_first: bool) -> None:
    solver = Solver(_boards(0, overlap=True))
    floor = solver.floor.bytes
    lower = solver.game.row(solver.descent.below(floor, deadline=math.inf))
    high, low = (solver.follow(row, floor) for row in (solver.row, lower))
    assert low.timeline.peak_bytes < high.timeline.peak_bytes
    found = solver.better(*((low, high) if lower_first else (high, low)))
    assert found.status is Status.UNKNOWN
    assert found.timeline.peak_bytes == low.timeline.peak_bytes


def test_a_fetch_during_computation_costs_nothing() -> None:
    """One large value has to leave in the middle and is read at the end: writing and reading it takes 4 s, beside 10 s of
    work.
    """
    names = [f"op{k}" for k in range(12)]
    nodes = [{"id": "large", "bytes": 100, "seconds": 5.0}]
    nodes += [{"id": n, "bytes": 100 if 4 <= k < 7 else 1, "seconds": 1.0} for k, n in enumerate(names)]
    links = [{"source": "large", "target": names[k]} for k in (0, 2, -1)]
    links += [{"source": a, "target": b} for a, b in itertools.pairwise(names)]
    about = {"offload": {"write_bytes_per_second": 50, "read_bytes_per_second": 50, "overlap": True}}
    graph = from_json({"graph": about, "nodes": nodes, "links": links})
    answer = Solver(graph).at(210, seconds=600)
    assert [m.act for m in answer.row].count(Act.FETCH) == 1
    assert answer.status is Status.OPTIMAL
    assert answer.extra_seconds == 0


@_FEW
@given(full_graphs(states=True, overlap=True), st.integers(0, 2**32))
def test_the_referee_agrees_with_the_checker_on_random_schedules(graph: Graph, seed: int) -> None:
    """Peak, seconds and legality of random schedules, including illegal ones."""
    rnd = random.Random(seed)
    schedule = list(unfold(graph, _random_row(graph, rnd)))
    if rnd.random() < 0.4:
        i = rnd.randrange(len(schedule))
        schedule[i : i + rnd.randint(0, 1)] = [Move(rnd.choice(list(Act)), rnd.randrange(len(graph.nodes)))]
    try:
        timeline = play(graph, tuple(schedule))
    except StructureError:
        timeline = None
    claimed = {
        "status": "feasible",
        "order": "free",
        "strategy": "random",
        "rounding_bytes": 1,
        "budget_bytes": None,
        "given_peak_bytes": Solver(graph).given.peak_bytes,
        "base_seconds": graph.base_seconds,
        "peak_bytes": timeline.peak_bytes if timeline else 0,
        "seconds": timeline.seconds if timeline else 0.0,
        "extra_fraction": max(0.0, timeline.seconds / graph.base_seconds - 1) if timeline and graph.base_seconds else 0.0,
        "wait_seconds": timeline.wait_seconds if timeline else 0.0,
        "lowest_peak_bytes": timeline.peak_bytes if timeline else 0,
        "host_peak_bytes": timeline.host_peak_bytes if timeline else 0,
        "moved_bytes": timeline.moved_bytes if timeline else 0,
        "bound": {"peak_bytes": 0, "method": "stuck", "node": None, "extra_seconds": 0.0, "extra_method": "none"},
        "schedule": [[m.act.value, graph.nodes[m.node].id] for m in schedule],
    }
    wrong = check(graph, claimed)
    assert bool(wrong) == (timeline is None), wrong


@_FEW
@given(full_graphs(states=True), st.integers(0, 2**32))
def test_the_fast_profile_equals_the_referees(graph: Graph, seed: int) -> None:
    """Bytes per operator of a row, counted without playing it; compared unless an operator overwrites several values."""
    rnd = random.Random(seed)
    game = game_of(graph)
    row = tuple(m for m in _random_row(graph, rnd) if m.act is Act.COMPUTE)
    timeline = play(graph, unfold(graph, row))
    schedule = unfold(graph, row)
    at = [t for t, m in enumerate(schedule) if m.act in (Act.COMPUTE, Act.UPDATE)]
    mine = profile(game, game.ops(row))[: len(row)]
    several = any(len(graph.olds[m.node]) > 1 for m in row)
    if not several:
        assert mine.tolist() == timeline.bytes_at[at].tolist()


@_FEW
@given(full_graphs(), st.booleans(), st.data())
def test_small_graphs_are_solved_exactly(graph: Graph, fixed: bool, data: st.DataObject) -> None:
    """With views, workspaces, offload and the rest: the cheapest of all schedules, or none if there is none."""
    solver = Solver(graph, order=Order.FIXED if fixed else Order.FREE)
    budget = data.draw(st.integers(max(1, solver.floor.bytes - 1), max(1, solver.given.peak_bytes)))
    wanted = cheapest(graph, budget, fixed=fixed)
    row = exhaustive.search(graph, budget, fixed=fixed)
    assert (row is None) == (wanted is None)
    if row is not None and wanted is not None:
        timeline = play(graph, unfold(graph, row))
        assert timeline.peak_bytes <= budget
        assert math.isclose(timeline.seconds, wanted)
    answer = solver.at(budget, seconds=600)
    if wanted is None:
        assert answer.status is Status.INFEASIBLE
    else:
        assert answer.status is Status.OPTIMAL
        assert math.isclose(answer.timeline.seconds, wanted)
    assert check(graph, figures.to_json(answer)) == []


@pytest.mark.skipif(library() is None, reason="the search was not compiled")
@settings(max_examples=40, deadline=None)
@given(full_graphs(most=5), st.booleans(), st.data())
def test_search_and_bounds_enclose_the_cheapest_schedule(graph: Graph, fixed: bool, data: st.DataObject) -> None:
    """What annealing finds is legal, fits, and is no cheaper than the cheapest schedule; no bound is above it; "optimal" is
    optimal.
    """
    solver = Solver(graph, order=Order.FIXED if fixed else Order.FREE)
    if solver.floor.bytes >= solver.given.peak_bytes:
        return
    budget = data.draw(st.integers(solver.floor.bytes, solver.given.peak_bytes - 1))
    wanted = cheapest(graph, budget, fixed=fixed)
    if wanted is None:
        assert solver.searched(budget, seconds=0.1).status is Status.UNKNOWN
        return
    answer = in_time(lambda seconds: solver.searched(budget, seconds=seconds), lambda answer: answer.status.has_plan, first=0.1)
    assert answer.time_bound.seconds <= wanted - graph.base_seconds + 1e-9
    every = time_bounds.one_instant(solver.game, solver.precedence, solver.instants, budget, seconds=1)
    assert every.seconds <= wanted - graph.base_seconds + 1e-9
    chain = time_bounds.tight_chain(solver.precedence, solver.instants, budget, most=9)
    if len(chain) > 1:
        found = chain_seconds(solver.game, solver.precedence, chain, budget, seconds=2)
        assert found.seconds <= wanted - graph.base_seconds + 1e-9
    assert answer.timeline.peak_bytes <= budget
    assert answer.timeline.seconds >= wanted - 1e-9
    if answer.status is Status.OPTIMAL:
        assert math.isclose(answer.timeline.seconds, wanted, abs_tol=1e-6)
    assert check(graph, figures.to_json(answer)) == []


@pytest.mark.skipif(library() is None, reason="the search was not compiled")
@settings(max_examples=40, deadline=None)
@given(plain_graphs(), st.booleans(), st.data())
def test_search_finds_the_cheapest_plan_of_small_plain_graphs(graph: Graph, fixed: bool, data: st.DataObject) -> None:
    """On graphs of up to seven nodes annealing always finds the cheapest plan."""
    solver = Solver(graph, order=Order.FIXED if fixed else Order.FREE)
    if solver.floor.bytes >= solver.given.peak_bytes:
        return
    budget = data.draw(st.integers(solver.floor.bytes, solver.given.peak_bytes - 1))
    wanted = cheapest(graph, budget, fixed=fixed)
    answer = solver.searched(budget, seconds=600)  # so small a graph ends its search by itself
    if wanted is not None:
        assert answer.status is not Status.UNKNOWN
        assert math.isclose(answer.timeline.seconds, wanted, abs_tol=1e-9)


@_FEW
@given(full_graphs(most=14), st.floats(0.3, 1.0))
def test_every_classic_strategy_gives_a_legal_plan(graph: Graph, share: float) -> None:
    """On any graph, with values that are held, may not be recomputed, are updated in place or are views. Only revolve may
    refuse: it is for chains.
    """
    game = game_of(graph)
    budget = int(share * play(graph, unfold(graph, game.row(game.given))).peak_bytes)
    for name, plan in STRATEGIES.items():
        with contextlib.suppress(GraphError) if name == "revolve" else contextlib.nullcontext():  # that one is for chains
            play(graph, unfold(graph, game.row(plan(game, budget))))


@_FEW
@given(plain_graphs())
def test_the_lowest_order_is_found_and_no_order_is_below_the_bounds(graph: Graph) -> None:
    """Each operator runs once: the forced-live and minimum-cut bounds against the lowest peak of all orders."""
    solver = Solver(graph, order=Order.FREE)
    best = _lowest_peak(graph)
    least = peak_bounds.once(solver.game, solver.precedence, solver.instants)
    assert least.bytes <= best
    answer = in_time(lambda seconds: solver.lowest(seconds=seconds), lambda found: found.timeline.peak_bytes == best, first=0.3)
    assert answer.timeline.peak_bytes == best


def _lowest_peak(graph: Graph) -> int:
    """The lowest peak of all orders, found by walking all sets of operators that can have run."""
    ops = list(range(len(graph.nodes)))
    best = {frozenset[int](): 0}
    for _ in ops:
        after: dict[frozenset[int], int] = {}
        for done, peak in best.items():
            for v in ops:
                if v not in done and set(graph.nodes[v].parents) <= done:
                    live = {u for u in done if any(c not in done for c in graph.children[u])} | {v}
                    high = max(peak, sum(graph.nodes[u].bytes for u in live))
                    key = done | {v}
                    after[key] = min(after.get(key, 1 << 60), high)
        best = after
    return min(best.values())


@_FEW
@given(full_graphs(states=True))
def test_a_graph_is_read_back_from_its_file_unchanged(graph: Graph) -> None:
    """Nodes are equal, and the given order has the same peak."""
    again = from_json(to_json(graph))
    assert [(n.id, n.bytes, n.seconds, n.workspace_bytes, n.keep) for n in again.nodes] == [
        (n.id, n.bytes, n.seconds, n.workspace_bytes, n.keep) for n in graph.nodes
    ]
    assert play(again, unfold(again, plain_row(again))).peak_bytes == play(graph, unfold(graph, plain_row(graph))).peak_bytes


@pytest.mark.skipif(library() is None, reason="the search was not compiled")
def test_more_time_never_gives_a_worse_plan() -> None:
    """A longer search runs the same rounds first, because rounds do not depend on the time limit."""
    rnd = random.Random(5)
    nodes = [{"id": i, "bytes": rnd.randint(1, 50), "seconds": rnd.randint(1, 9)} for i in range(60)]
    links = [{"source": rnd.randrange(max(0, b - 12), b), "target": b} for b in range(1, 60) for _ in range(3)]
    graph = from_json({"nodes": nodes, "links": links})
    solver = Solver(graph)
    budget = int(0.8 * solver.given.peak_bytes)
    found = []
    for rounds in (1, 3, 6):
        annealer = _Counted(solver.game, max(budget, solver.floor.bytes), rounds)
        annealer.hunt = Hunt(annealer=annealer, starts=[solver.game.given], fixed=True, target_seconds=-1.0, deadline=time.monotonic() + 600)
        annealer.hunt._work(0)
        found.append((annealer.hunt.best.rank, annealer.asked))
    for (few, first), (more, then) in itertools.pairwise(found):
        assert then[: len(first)] == first
        assert more <= few


class _Counted(Annealer):
    """Ends its hunt after a given number of rounds."""

    def __init__(self, game: Game, budget: int, rounds: int) -> None:
        super().__init__(game, budget, fixed=True)
        self.left = rounds
        self.asked: list[tuple[Any, ...]] = []
        self.hunt: Hunt | None = None

    def round(self, row: Any, *, moves: int, **how: Any) -> AnnealedRow:
        found = super().round(row, moves=moves, **how)
        if moves:  # else the row is only counted
            self.asked.append((tuple(row), moves, how["hot"], how["seed"]))
            self.left -= 1
            if not self.left:
                self.hunt.deadline = 0.0
        return found


_LIES: tuple[Callable[[dict[str, Any]], dict[str, Any]], ...] = (
    lambda s: {"status": "infeasible"} if s["status"] == "optimal" else {"status": "optimal", "schedule": []},
    lambda s: {"status": "best"},
    lambda s: {"order": "any"},
    lambda s: {"rounding_bytes": 0},
    lambda s: {"rounding_bytes": -1},
    lambda s: {"rounding_bytes": True},
    lambda s: {"budget_bytes": -5},
    lambda s: {"budget_bytes": "much"},
    lambda s: {"given_peak_bytes": s["given_peak_bytes"] + 1},
    lambda s: {"base_seconds": s["base_seconds"] + 1},
    lambda s: {"bound": {**s["bound"], "method": "known"}},
    lambda s: {"bound": {**s["bound"], "extra_method": "trust"}},
    lambda s: {"bound": {**s["bound"], "peak_bytes": s["given_peak_bytes"] + 1}},
    lambda s: {} if s["status"] == "infeasible" else {"bound": {**s["bound"], "extra_seconds": s["bound"]["extra_seconds"] + 1}},
    lambda s: {"bound": {**s["bound"], "extra_seconds": -1}},
    lambda s: {"bound": {**s["bound"], "node": "nowhere"}},
    lambda s: {"bound": None},
)


@settings(max_examples=60, deadline=None)
@given(full_graphs(most=5), st.booleans(), st.booleans(), st.data())
def test_no_false_claim_passes_the_check(graph: Graph, fixed: bool, budgeted: bool, data: st.DataObject) -> None:
    """Solutions of every status, each with one false claim."""
    solver = Solver(graph, order=Order.FIXED if fixed else Order.FREE)
    if budgeted:
        answer = solver.at(data.draw(st.integers(max(1, solver.floor.bytes - 1), max(1, solver.given.peak_bytes))))
    else:
        answer = solver.lowest()
    told = figures.to_json(answer)
    assert check(graph, told) == []
    for lie in _LIES:
        assert not (changed := lie(told)) or check(graph, told | changed), changed
    if budgeted and answer.status is Status.OPTIMAL:
        below = answer.timeline.peak_bytes - 1
        assert check(graph, told | {"budget_bytes": below})
    if budgeted and answer.status is Status.INFEASIBLE:
        assert check(graph, told | {"budget_bytes": solver.given.peak_bytes})


_LIES_BESIDES: tuple[Callable[[dict[str, Any]], dict[str, Any] | None], ...] = (
    lambda s: {"host_peak_bytes": s["host_peak_bytes"] + 1},
    lambda s: {"moved_bytes": s["moved_bytes"] + 1},
    lambda s: {"wait_seconds": s["wait_seconds"] + 1},
    lambda s: {"lowest_peak_bytes": s["lowest_peak_bytes"] - 1},
    lambda s: {"modules": s["modules"][1:]} if s["modules"] else None,
    lambda s: {"modules": [s["modules"][0] | {"kept_bytes": s["modules"][0]["kept_bytes"] + 1}, *s["modules"][1:]]}
    if s["modules"] else None,
    lambda s: {"modules": [*s["modules"][:-1], s["modules"][-1] | {"seconds": s["modules"][-1]["seconds"] + 1}]}
    if s["modules"] else None,
    lambda s: {"decides": s["decides"] | {"tight_node": "nowhere"}},
    lambda s: {"decides": s["decides"] | {"dear": [{"node": s["schedule"][0][1], "bytes": -1, "seconds": 0.0}]}},
    lambda s: {"curve": None},
    lambda s: {"curve": [{}]},
    lambda s: {"curve": [s["curve"][0] | {"budget_bytes": None}]},
    lambda s: {"curve": [s["curve"][0] | {"budget_bytes": s["curve"][0]["peak_bytes"] - 1}]},
    lambda s: {"curve": [s["curve"][0] | {"seconds": s["curve"][0]["seconds"] + 1}]},
    lambda s: {"curve": [s["curve"][0] | {"extra_seconds": s["curve"][0]["extra_seconds"] + 1}]},
    lambda s: {"curve": [s["curve"][0] | {"schedule": s["curve"][0]["schedule"][1:]}]},
    lambda s: {"curve": [s["curve"][0] | {"bound": s["curve"][0]["bound"] | {"extra_seconds": 1e9}}]},
)


@settings(max_examples=40, deadline=None)
@given(full_graphs(most=5), st.booleans(), st.data())
def test_no_false_claim_about_a_plans_figures_passes_the_check(graph: Graph, fixed: bool, data: st.DataObject) -> None:
    """What decides, figures per module, transfers and waits, and every point of a curve."""
    solver = Solver(graph, order=Order.FIXED if fixed else Order.FREE)
    low, high = max(1, solver.floor.bytes), max(1, solver.given.peak_bytes)
    answer = solver.at(data.draw(st.integers(low, high)), seconds=600)
    assume(answer.status.has_plan)
    points = [solver.at(budget, seconds=600) for budget in sorted({high, (low + high) // 2, low}, reverse=True)]
    points = [point for point in points if point.status.has_plan]  # of another there is no bound but its floor
    told = figures.to_json(answer) | {
        "decides": figures.decides_json(graph, figures.decides(solver, answer)),
        "modules": figures.modules_json(figures.by_module(answer)),
        "curve": figures.curve_json(points),
    }
    assert check(graph, told) == []
    for lie in _LIES_BESIDES:
        assert (changed := lie(told)) is None or check(graph, told | changed), changed
    if len(points) > 1 and points[-1].status.has_plan and points[-1].timeline.seconds > points[0].timeline.seconds:
        swapped = [dict(told["curve"][-1]), *told["curve"][1:-1], dict(told["curve"][0])]
        swapped[0]["budget_bytes"], swapped[-1]["budget_bytes"] = high, high + 1
        assert check(graph, told | {"curve": swapped})


@settings(max_examples=200, deadline=None)
@given(graph=full_graphs(most=7, once=3, held=True), fixed=st.booleans())
def test_no_schedule_is_below_the_floor_of_one_instants_program(graph: Graph, fixed: bool) -> None:
    """The floor proven by one instant's program, which accounts for what must be recomputed later, against all schedules; it
    is never weaker than what is stuck at that instant.
    """
    if not exhaustive.small(graph):
        return
    solver = Solver(graph, order=Order.FIXED if fixed else Order.FREE)
    for at in solver.instants:
        lowest = peak_bounds.closed_floor(solver.bound_game, solver.precedence, at, seconds=60)
        stuck = peak_bounds.floor(solver.game, solver.precedence, [at])
        assert lowest.bytes == 0 or lowest.bytes >= stuck.bytes - 1
        for floor in (lowest.bytes, stuck.bytes):
            if floor > 0:
                assert exhaustive.search(graph, floor - 1, fixed=fixed) is None


@settings(max_examples=300, deadline=None)
@given(graph=full_graphs(most=9, once=3, held=True), offload=st.booleans(), stretches=st.integers(1, 4))
def test_sampling_instants_never_misses_the_floor_of_a_fixed_order(
    graph: Graph, offload: bool, stretches: int
) -> None:
    """One sweep gives the bytes that are certain at every operator, and sampling a large graph never misses the highest of
    them.
    """
    solver = Solver(with_board(graph) if offload else graph)
    game, precedence = solver.game, solver.precedence
    certain = [precedence.bytes_with(at, precedence.stuck(at)) for at in map(precedence.instant, range(game.plain))]
    assert certain_in_order(game).tolist() == certain
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peak_bounds, "_EVERY", 0)
        patch.setattr(peak_bounds, "_LOOKED_AT", stretches)
        sampled = peak_bounds.looked_at(game, precedence)
    assert peak_bounds.floor(game, precedence, sampled).bytes == max([graph.resident_bytes, *certain])


def test_a_value_the_script_holds_is_not_overwritten_in_place() -> None:
    """By the referee, by the search through all schedules, and by the checker."""
    nodes = [
        {"id": "v", "bytes": 10, "seconds": 1, "held_until": "z"}, {"id": "u", "bytes": 10, "seconds": 1, "overwrites": "v"},
        {"id": "w", "bytes": 10, "seconds": 1}, {"id": "z", "bytes": 1, "seconds": 1},
    ]
    graph = from_json({"nodes": nodes, "links": [{"source": "u", "target": "w"}, {"source": "w", "target": "z"}]})
    acts = [(Act.COMPUTE, 0), (Act.UPDATE, 1), (Act.COMPUTE, 2), (Act.FREE, 1), (Act.COMPUTE, 3)]
    with pytest.raises(StructureError, match="held"):
        play(graph, tuple(Move(act, v) for act, v in acts))
    assert exhaustive.search(graph, 29, fixed=True) is None
    answer = Solver(graph).at(30)
    assert answer.status.has_plan
    told = figures.to_json(answer)
    assert check(graph, told) == []
    told["schedule"] = [[act.value, nodes[v]["id"]] for act, v in acts]
    assert any("held" in line for line in check(graph, told))


def test_a_budget_ruled_out_by_one_instant_has_a_verified_floor() -> None:
    """At the operator "top", one value of each pair is in memory: either the one that may run only once, or the one made from
    it that is read later. The checker verifies the floor and refuses a higher one.
    """
    pairs = 6
    nodes: list[dict[str, Any]] = []
    for i in range(pairs):
        nodes.append({"id": f"x{i}", "bytes": 100, "seconds": 1.0, "recompute": False})
        nodes.append({"id": f"f{i}", "bytes": 10, "seconds": 1.0})
    nodes.append({"id": "top", "bytes": 1, "seconds": 1.0, "workspace_bytes": 150})
    nodes += [{"id": f"b{i}", "bytes": 1, "seconds": 1.0} for i in range(pairs)]
    links = [{"source": f"x{i}", "target": f"f{i}"} for i in range(pairs)]
    links += [{"source": f"f{i}", "target": f"b{i}"} for i in range(pairs)]
    links += [{"source": "top" if i == 0 else f"b{i - 1}", "target": f"b{i}"} for i in range(pairs)]
    links.append({"source": f"f{pairs - 1}", "target": "top"})
    graph = from_json({"nodes": nodes, "links": links})
    solver = Solver(graph)
    assert solver.floor.bytes < 200
    answer = solver.at(200, seconds=600)
    assert answer.status is Status.INFEASIBLE
    assert answer.peak_bound.method == "instant"
    assert 209 <= answer.peak_bound.bytes <= 211
    told = figures.to_json(answer)
    assert check(graph, told) == []
    told["bound"]["peak_bytes"] += 3
    assert any("bound.peak_bytes" in line for line in check(graph, told))
    assert solver.at(211, seconds=600).status.has_plan


@settings(max_examples=200, deadline=None)
@given(
    full_graphs(states=True, overlap=True), st.integers(0, 2**32), st.floats(0, 1), st.sampled_from([1.0, 30.0, 1000.0]), st.booleans()
)
def test_no_schedule_with_overlapping_transfers_beats_the_time_bounds(
    graph: Graph, seed: int, share: float, slower: float, fixed: bool
) -> None:
    """Random rows, with fetches right before their use and ahead of it, against the bounds for the peak that they reach."""
    offload = graph.offload
    assume(offload is not None)
    assert offload is not None
    slow = replace(
        offload,
        write_bytes_per_second=offload.write_bytes_per_second / slower,
        read_bytes_per_second=offload.read_bytes_per_second / slower,
        host_bytes=None,
    )
    graph = replace(graph, offload=slow)
    rnd = random.Random(seed)
    row = _with_fetches(graph, plain_row(graph), rnd) if fixed else _random_row(graph, rnd)
    try:
        timeline = play(graph, unfold(graph, row))
    except StructureError:
        assume(False)
    solver = Solver(graph, order=Order.FIXED if fixed else Order.FREE)
    rows = [(row, timeline)]
    rows.append(faster(graph, row, timeline, timeline.peak_bytes + int(share * (solver.given.peak_bytes - timeline.peak_bytes))))
    for _, played in rows:
        budget = played.peak_bytes
        found = list(time_bounds.single_instants(solver.bound_game, solver.precedence, solver.instants, budget, seconds=20))
        chain = time_bounds.tight_chain(solver.precedence, solver.instants, budget, most=4)
        if len(chain) > 1:
            found.append(chain_seconds(solver.bound_game, solver.precedence, chain, budget, seconds=20))
        for one in found:
            assert played.seconds - graph.base_seconds >= one.seconds - 1e-6 * max(1.0, graph.base_seconds)


def _with_fetches(graph: Graph, row: Row, rnd: random.Random) -> Row:
    """A row in which values are fetched from the second board right before some of their uses."""
    found: list[Move] = []
    made: set[int] = set()
    for move in row:
        for p in graph.reads[move.node]:
            node = graph.nodes[p]
            if p in made and rnd.random() < 0.5 and not node.resident and node.move and node.bytes and graph.offload is not None:
                found.append(Move(Act.FETCH, p))
        found.append(move)
        made.update((move.node, *graph.members[move.node]))
    return tuple(found)


def test_a_kept_value_counts_until_the_end_in_any_order() -> None:
    """A value that is kept and may not run again is in memory while all operators after it run, whether they lead to a kept
    value or not.
    """
    nodes = [
        {"id": "kept", "bytes": 10, "seconds": 1.0, "keep": True, "recompute": False},
        {"id": "after", "bytes": 5, "seconds": 1.0, "workspace_bytes": 6},
    ]
    solver = Solver(from_json({"nodes": nodes, "links": [{"source": "kept", "target": "after"}]}), order=Order.FREE)
    other = {"id": "later", "bytes": 5, "seconds": 1.0, "workspace_bytes": 16}
    links = [{"source": "kept", "target": "after"}, {"source": "after", "target": "later"}]
    longer = Solver(from_json({"nodes": [*nodes, other], "links": links}), order=Order.FREE)
    assert solver.floor.bytes == 21
    assert longer.floor.bytes == 36


def test_resident_bytes_are_a_peak_without_any_operator() -> None:
    solver = Solver(from_json({"nodes": [{"id": "weights", "bytes": 6000, "seconds": 0, "resident": True}], "links": []}))
    assert solver.given.peak_bytes == 6000
    assert solver.at(100).status is Status.INFEASIBLE
    assert check(solver.graph, figures.to_json(solver.at(100))) == []
    assert solver.at(6000).status is Status.OPTIMAL


def _has_no_time(*_args, **_options):
    raise TimeoutError


def test_a_small_graph_without_time_for_all_schedules_is_searched(monkeypatch) -> None:
    """Ten operators with a second board in free order have millions of schedules: the time limit also ends the exhaustive
    search.
    """
    nodes = [{"id": i, "bytes": 100 + i % 5, "seconds": 1.0} for i in range(10)]
    links = [{"source": i, "target": 5 + j} for i in range(5) for j in range(5) if (i + j) % 3]
    offload = {"write_bytes_per_second": 300.0, "read_bytes_per_second": 300.0}
    solver = Solver(from_json({"graph": {"offload": offload}, "nodes": nodes, "links": links}), order=Order.FREE)
    budget = (solver.floor.bytes + 9 * solver.given.peak_bytes) // 10
    assert exhaustive.small(solver.graph)
    with pytest.raises(TimeoutError):
        exhaustive.search(solver.graph, budget, fixed=False, deadline=time.monotonic())
    monkeypatch.setattr(exhaustive, "search", _has_no_time)
    answer = solver.at(budget, seconds=10.0)
    assert answer.status.has_plan
    assert answer.timeline.peak_bytes <= budget


def test_without_time_for_the_minimum_cut_the_forced_bound_remains() -> None:
    nodes = [{"id": i, "bytes": 100 + i % 7, "seconds": 1.0} for i in range(40)]
    links = [{"source": a, "target": b} for b in range(1, 40) for a in {max(0, b - 1 - b % 5), max(0, b - 9)}]
    solver = Solver(from_json({"nodes": nodes, "links": links}), order=Order.FREE)
    forced, cut = (peak_bounds.once(solver.game, solver.precedence, solver.instants, seconds=s) for s in (0.0, 60.0))
    assert forced.method == "forced"
    assert forced.bytes <= cut.bytes


def test_memory_has_no_price_if_its_programs_were_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The value of a program that was cut off is 0, and the difference to it is not a saving."""
    nodes = [{"id": i, "bytes": 50, "seconds": 1.0} for i in range(20)]
    links = [{"source": i, "target": i + 1} for i in range(19)] + [{"source": i, "target": 19 - i} for i in range(9)]
    solver = Solver(from_json({"nodes": nodes, "links": links}))
    budget = (solver.floor.bytes + solver.given.peak_bytes) // 2
    proven = time_bounds.one_instant(solver.bound_game, solver.precedence, solver.instants, budget, seconds=600)
    asked = (solver.bound_game, solver.precedence, proven, budget, 100)
    assert time_bounds.price(*asked) > 0
    solve, calls = bound_program.Program.solve, itertools.count()

    def cut_off(self: bound_program.Program, seconds: float, **how: Any) -> bound_program.Solved:
        found = solve(self, seconds, **how)
        return found if next(calls) % 2 == 0 else replace(found, value=0.0, ended=False, x=None)

    monkeypatch.setattr(bound_program.Program, "solve", cut_off)
    assert time_bounds.price(*asked) == 0


def test_plans_of_graphs_with_zero_seconds_are_accepted() -> None:
    nodes = [{"id": i, "bytes": 50, "seconds": 0.0} for i in range(14)]
    links = [{"source": i, "target": i + 1} for i in range(13)] + [{"source": i, "target": 13 - i} for i in range(6)]
    offload = {"write_bytes_per_second": 30.0, "read_bytes_per_second": 30.0}
    solver = Solver(from_json({"graph": {"offload": offload}, "nodes": nodes, "links": links}))
    answer = solver.at((solver.floor.bytes + solver.given.peak_bytes) // 2, seconds=600)
    assert answer.status.has_plan
    assert check(solver.graph, figures.to_json(answer)) == []
