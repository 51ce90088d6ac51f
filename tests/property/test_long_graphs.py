"""Long graphs of repeated blocks: rounding a relaxed program gives a plan that fits and costs little more than the proven
bound.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.planning.bounds import time_bounds
from lowtide.planning.search import programs
from lowtide.planning.search.annealing import library
from lowtide.planning.graph_arrays import game_of, profile
from lowtide.planning.graph import Graph
from lowtide.planning.graph_json import from_json
from lowtide.planning.search.rows_from_bound import row_without
from lowtide.planning.referee import play
from lowtide.planning.schedule import unfold
from lowtide.planning.solver.solve import Solver
from patience import in_time
from property.graphs import plain_graphs

KINDS = st.lists(st.tuples(st.integers(1, 8), st.sampled_from([1.0, 2.0, 20.0])), min_size=3, max_size=6)


def blocks(kinds: list[tuple[int, float]], depth: int) -> Graph:
    """A forward of repeated blocks, each a chain whose end also reads its beginning, and the backward in eager order."""
    nodes: list[dict[str, Any]] = []
    links: list[dict[str, str]] = []

    def node(size: int, seconds: float, parents: list[str]) -> str:
        name = f"n{len(nodes)}"
        nodes.append({"id": name, "bytes": size << 20, "seconds": seconds})
        links.extend({"source": p, "target": name} for p in dict.fromkeys(parents))
        return name

    last = node(4, 0.0, [])
    forward: list[tuple[str, int, float, list[str]]] = []
    for _ in range(depth):
        skip = last
        for k, (size, seconds) in enumerate(kinds):
            parents = [last, skip] if k == len(kinds) - 1 else [last]
            last = node(size, seconds, parents)
            forward.append((last, size, seconds, parents))
    gradient = node(1, 1.0, [last])
    for name, size, seconds, parents in reversed(forward):
        gradient = node(size, 2 * seconds, [gradient, name, *parents])
    return from_json({"nodes": nodes, "links": links})


def seconds_of(graph: Graph, row: tuple[int, ...]) -> float:
    """Seconds of a row, by the referee."""
    return play(graph, unfold(graph, game_of(graph).row(row))).seconds


@settings(max_examples=15, deadline=None)
@given(KINDS, st.integers(20, 60), st.integers(30, 90))
def test_dropping_fractional_values_makes_the_instant_fit(kinds, depth, percent):
    """Values that the relaxed program keeps only in part are dropped. At that instant the row is within the budget, and it
    costs at least what the program proves, which is more than nothing.
    """
    solver = Solver(blocks(kinds, depth))
    budget = solver.floor.bytes + (solver.given.peak_bytes - solver.floor.bytes) * percent // 100
    at = max(solver.instants, key=solver.precedence.bytes_once)
    if solver.precedence.bytes_once(at) <= budget:
        return
    found = time_bounds.Alone(solver.game, solver.precedence, at, budget).absent(budget, seconds=60)
    row = row_without(solver.game, found.absent, found.fetched)
    proven = next(time_bounds.single_instants(solver.game, solver.precedence, [at], budget, seconds=60))
    first = row.index(at.op)
    assert profile(solver.game, row)[first] <= budget
    assert seconds_of(solver.graph, row) >= solver.game.base_seconds + proven.seconds - 1e-6
    assert proven.seconds > 0


@settings(max_examples=60, deadline=None)
@given(plain_graphs(most=12), st.integers(5, 95))
def test_a_row_costs_no_more_than_its_program_says(graph, percent):
    """The program may also recompute from values that no operator reads any more."""
    solver = Solver(graph)
    budget = solver.floor.bytes + (solver.given.peak_bytes - solver.floor.bytes) * percent // 100
    for found in time_bounds.single_instants(solver.game, solver.precedence, solver.instants, budget, seconds=10):
        if found.solved and found.absent:
            row = row_without(solver.game, found.absent, found.fetched)
            assert seconds_of(solver.graph, row) <= graph.base_seconds + found.seconds + 1e-6


@pytest.mark.skipif(library() is None, reason="the search was not compiled")
@pytest.mark.long("50")
@pytest.mark.parametrize("percent", [50, 70])
def test_three_thousand_operators_are_planned_within_a_fifth_of_a_percent(percent):
    """The plan's extra seconds are at most 0.2 % above the proven bound."""
    solver = Solver(blocks([(3, 1.0), (1, 2.0), (8, 1.0), (5, 20.0), (2, 1.0)], 300))
    budget = solver.floor.bytes + (solver.given.peak_bytes - solver.floor.bytes) * percent // 100
    answer = in_time(
        lambda seconds: solver.at(budget, seconds=seconds),
        lambda found: found.status.has_plan and found.extra_seconds <= 1.002 * found.time_bound.seconds, first=10,
    )
    assert answer.timeline.peak_bytes <= budget
    assert answer.extra_seconds <= 1.002 * answer.time_bound.seconds


def test_a_longer_search_begins_with_the_programs_of_a_shorter_one(monkeypatch):
    """The time limit only ends a search. On a graph where several instants bind, the programs of the shorter search are the
    first ones of the longer search.
    """
    graph = blocks([(3, 1.0), (7, 20.0), (2, 1.0), (8, 2.0), (5, 1.0)], 30)
    asked: list[tuple[str, object]] = []

    class Watched(programs.Chain):
        def __init__(self, game: Any, precedence: Any, tight: Any, budget: int, **given: Any) -> None:
            asked.append(("instants", tuple(at.op for at in tight)))
            super().__init__(game, precedence, tight, budget, **given)

        def relax(self, *, rounds: int = 8, **given: Any) -> time_bounds.TimeBound:
            asked.append(("relaxed", rounds))
            return super().relax(rounds=rounds, **given)

        def dive(self, **given: Any) -> time_bounds.TimeBound:
            asked.append(("dived", given["gap"]))
            return super().dive(**given)

        def whole(self, **given: Any) -> time_bounds.TimeBound:
            asked.append(("whole", None))
            return super().whole(**given)

    monkeypatch.setattr(programs, "Chain", Watched)
    monkeypatch.setattr(programs, "_DIVED_SECONDS", 60.0)  # what ends a program early must not be this machine
    monkeypatch.setattr(time_bounds, "_TRIED_SECONDS", 60.0)
    limits: list[float] = []

    def programs_within(seconds: float) -> list[tuple[str, object]]:
        asked.clear()
        limits.append(seconds)
        solver = Solver(graph)
        budget = solver.floor.bytes + (solver.given.peak_bytes - solver.floor.bytes) * 15 // 100
        solver.searched(budget, seconds=seconds)
        return list(asked)

    shorter = in_time(programs_within, lambda found: len({what for what, _ in found}) >= 2, first=0.5)
    assert len({what for what, _ in shorter}) >= 2
    longer = programs_within(6 * limits[-1])
    assert longer[: len(shorter)] == shorter
