"""Law: the compiled player and ``simulate`` play the same decisions to the same bytes and seconds, and walk the same way."""

from __future__ import annotations

from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lowtide.base.errors import StructureError
from lowtide.planning.unit import native
from lowtide.planning.unit.greedy import walk
from lowtide.planning.unit.problem import Action, Away, Key, Problem
from lowtide.planning.unit.simulate import play
from lowtide.planning.unit.solve import Front
from lowtide.planning.unit.state import State
from property.strategies import plans, problems

Planned = tuple[Problem, dict[Key, Away]]

pytestmark = pytest.mark.skipif(native.library() is None, reason="the player was not compiled")
MANY = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
SOME = settings(MANY, max_examples=60)
LONG = 1e6
"""Seconds in which every walk of these units ends by itself."""


def _plain(problem: Problem) -> Problem:
    """The same problem, for which no compiled player is used."""
    other = Problem(
        trace=problem.trace, base_bytes=problem.base_bytes, bandwidth=problem.bandwidth, pinned=problem.pinned,
        replay_seconds=problem.replay_seconds, fetch_seconds=problem.fetch_seconds,
    )  # fmt: skip
    with mock.patch.object(native, "library", return_value=None):
        assert other.native is None
    return other


@MANY
@given(plans())
def test_the_compiled_player_agrees_with_the_referee_at_every_event(planned: Planned) -> None:
    """Also on seconds to the last bit, on the peak's event, on what is absent when, and on seconds by value."""
    problem, decisions = planned
    wanted, found = play(problem, decisions), State.of(problem, decisions)
    assert isinstance(found.outcome, native.NativeOutcome)
    assert found.peak_bytes_at.tolist() == wanted.peak_bytes_at.tolist()
    assert (found.peak_bytes, found.extra_seconds) == (wanted.peak_bytes, wanted.extra_seconds)
    if len(wanted.peak_bytes_at):
        assert found.outcome.peak_event == wanted.peak_event
    assert found.outcome.decisions == decisions
    other = State.of(_plain(problem), decisions)
    assert other.outcome is not found.outcome
    values = range(len(problem.trace.buffers))
    assert [found.spent_seconds(v) for v in values] == pytest.approx([other.spent_seconds(v) for v in values])


@SOME
@given(problems())
def test_both_walk_the_same_way(problem: Problem) -> None:
    """State by state: the same decisions, peaks and seconds."""
    compiled, plain = walk(problem, seconds=LONG), walk(_plain(problem), seconds=LONG)
    assert [(s.cost, s.decisions) for s in compiled] == [(s.cost, s.decisions) for s in plain]


@SOME
@given(problems(), st.floats(0, 1))
def test_both_give_the_same_plan(problem: Problem, share: float) -> None:
    """With backtracking and after undoing what a budget does not need."""
    fronts = [Front(p, seconds=LONG, program_seconds=0) for p in (problem, _plain(problem))]
    low, high = fronts[0].bound.peak_bytes, problem.plain_peak
    budget = int(low + share * (high - low))
    compiled, plain = (front.at(budget) for front in fronts)
    assert compiled.status == plain.status
    assert compiled.lowest_bytes == plain.lowest_bytes
    if compiled.state is not None and plain.state is not None:
        assert compiled.state.cost == plain.state.cost


@given(problems())
def test_the_compiled_player_refuses_what_the_runtime_cannot_carry_out(problem: Problem) -> None:
    """The error is the referee's."""
    for v, buffer in enumerate(problem.trace.buffers):
        for action in Action:
            decisions = {(v, problem.gap_starts[v]): Away(action, 0)}
            try:
                play(problem, decisions)
            except StructureError as error:
                assert problem.native is not None
                assert problem.native.play(decisions) is None
                with pytest.raises(StructureError, match=str(v)):
                    State.of(problem, decisions)
                assert str(error)
            else:
                assert buffer.released >= 0
                assert isinstance(State.of(problem, decisions).outcome, native.NativeOutcome)
