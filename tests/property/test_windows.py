"""Programs of several instants, with rows for what runs between non-neighbors: they prove more, and never too much."""

from __future__ import annotations

import dataclasses

from patience import PATIENCE, in_time
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.planning.solver import figures
from lowtide.planning.bounds import time_bounds, windows
from lowtide.planning.search.annealing import library
from lowtide.planning.check.check import check
from lowtide.planning.solver.solve import Order, Solver, Status
from lowtide.planning.bounds.windows import Chain
from property.graphs import cheapest, full_graphs
from property.test_long_graphs import blocks

KINDS = [(2, 20.0), (3, 2.0), (1, 1.0), (4, 20.0)]


def tight_blocks(share: int, most: int) -> tuple[Solver, int, Chain]:
    """A network of blocks with a budget at a share of the way above its floor, and a chain of the instants at which it binds.
    """
    solver = Solver(blocks(KINDS, 12))
    budget = solver.floor.bytes + (solver.given.peak_bytes - solver.floor.bytes) * share // 100
    tight = time_bounds.tight_chain(solver.precedence, solver.instants, budget, most=most)
    return solver, budget, Chain(solver.bound_game, solver.precedence, tight, budget)


@settings(max_examples=150, deadline=None)
@given(full_graphs(most=5), st.booleans(), st.data())
def test_no_schedule_beats_the_bound_of_a_chain_with_its_rows(graph, fixed, data):
    """Whichever values are taken as weightless (`light`), relaxed or integer, the bound is at most the cheapest schedule's
    extra seconds.
    """
    solver = Solver(graph, order=Order.FIXED if fixed else Order.FREE)
    if solver.floor.bytes >= solver.given.peak_bytes:
        return
    budget = data.draw(st.integers(solver.floor.bytes, solver.given.peak_bytes - 1))
    wanted = cheapest(graph, budget, fixed=fixed)
    tight = time_bounds.tight_chain(solver.precedence, solver.instants, budget, most=9)
    if wanted is None or not tight:
        return
    light = data.draw(st.frozensets(st.integers(0, len(solver.game.value_nodes) - 1)))
    chain = Chain(solver.bound_game, solver.precedence, tight, budget, light=light)
    for found in (chain.relax(seconds=5), chain.whole(seconds=5)):
        assert found.seconds <= wanted - graph.base_seconds + 1e-9


def test_window_rows_raise_the_bound_of_a_relaxed_chain():
    """By more than 5 %; rows for neighbors alone are not enough."""
    _, _, chain = tight_blocks(3, 8)
    alone = chain.program.solve(60, whole=False).value * chain.game.base_seconds
    together = chain.relax(seconds=60)
    assert chain.joined
    assert together.seconds > 1.05 * alone


def test_a_chain_that_inherits_rows_proves_as_much_as_a_fresh_one():
    solver, budget, small = tight_blocks(3, 6)
    _, _, large = tight_blocks(3, 8)
    small.relax(seconds=60)
    tight = [solver.precedence.instant(o) for o in sorted({at.op for at in (*small.tight, *large.tight)})]
    fresh, grown = (Chain(small.game, solver.precedence, tight, budget, like=like) for like in (None, small))
    assert grown.joined
    assert grown.relax(seconds=60).seconds == pytest.approx(fresh.relax(seconds=60).seconds, rel=1e-2)


@pytest.mark.parametrize("share", [3, 10, 30])
def test_a_known_answer_satisfies_rows_added_later(share):
    """Law: integer answers violate no window row, so an answer found before such rows were added is a valid start after it."""
    _, _, chain = tight_blocks(share, 8)
    chain.relax(seconds=60, rounds=1)
    chain.dive(seconds=60)
    known = len(chain.joined)
    chain.relax(seconds=60, rounds=2)
    start, program = chain.start(), chain.program
    assert len(start) == len(program.cost)
    for row, low, high in zip(program.rows, program.low, program.high, strict=True):
        assert low - 1e-6 <= sum(a * start[j] for j, a in row.items()) <= high + 1e-6
    assert len(chain.joined) > known


@pytest.mark.parametrize("share", [2, 20, 30])
def test_rounding_is_reduced_where_it_leaves_no_answer(share, monkeypatch):
    """For these chains rounding a relaxed answer at 0.3 leaves no answer; rounding at 0.01 finds one."""
    found = []
    for nearly in ((0.3,), (0.3, 0.01)):
        monkeypatch.setattr(windows, "_NEARLY", nearly)
        _, _, chain = tight_blocks(share, {2: 5, 20: 3, 30: 5}[share])
        chain.relax(seconds=60, rounds=1)
        chain.dive(seconds=60)
        found.append(chain.start())
    assert found[0] is None
    assert found[1] is not None


@pytest.mark.long
@pytest.mark.skipif(library() is None, reason="the search was not compiled")
@pytest.mark.parametrize("share", [20, 30, 40])
def test_plans_of_long_graphs_respect_a_bound_the_checker_verifies(share):
    """Law: no plan that annealing finds is cheaper than the bound, and the checker's own rows prove it. A bound half-way to
    the plan is refused wherever the integer program is solved in time and proves less than it.
    """
    solver, budget, chain = tight_blocks(share, 6)
    found = chain.dive(seconds=PATIENCE) if chain.relax(seconds=PATIENCE).seconds else time_bounds.NOTHING
    answer = in_time(lambda seconds: solver.searched(budget, seconds=seconds), lambda answer: answer.status.has_plan, first=0.5)
    assert 0 < found.seconds < 0.999 * answer.extra_seconds
    told = figures.to_json(dataclasses.replace(answer, status=Status.FEASIBLE, time_bound=found))
    assert check(solver.graph, told) == []
    told["bound"]["extra_seconds"] = (found.seconds + answer.extra_seconds) / 2
    told["bound"]["windows"] = []
    proven = chain.whole(seconds=60)
    if proven.solved and proven.seconds < 0.999 * told["bound"]["extra_seconds"]:
        assert check(solver.graph, told)
