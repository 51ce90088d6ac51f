"""Law: the compiled player and ``simulate`` play the same decisions to the same bytes and seconds, and walk the same way."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from command import TIMEOUT
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.base.errors import StructureError
from lowtide.planning.unit import native
from lowtide.planning.unit.greedy import _move, walk
from lowtide.planning.unit.problem import Action, Away, Bandwidth, Key, Problem
from lowtide.planning.unit.simulate import play
from lowtide.planning.unit.solve import Front
from lowtide.planning.unit.state import State
from lowtide.runtime.units.plan_cache import PlanCache
from property.strategies import plans, problems

Planned = tuple[Problem, dict[Key, Away]]

pytestmark = pytest.mark.skipif(native.library() is None, reason="the player was not compiled")
MANY = settings(max_examples=300, deadline=None)
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


@given(plans(), st.sampled_from([(0, -1), (0, 99), (-1, 0), (10**6, 0)]))
def test_decisions_beyond_the_unit_are_refused(planned: Planned, key: Key) -> None:
    """Where the referee knows no such value or gap, nothing is written outside the player's arrays."""
    problem, decisions = planned
    assert problem.native is not None
    wrong = {**decisions, key: Away(Action.RECOMPUTE, 0)}
    assert problem.native.play(wrong) is None
    assert problem.native.play(decisions) is not None


@SOME
@given(plans(), problems())
def test_a_state_of_another_problem_is_moved_by_the_referee(planned: Planned, other: Problem) -> None:
    """A front that is timed anew has states of the problem before it."""
    problem, decisions = planned
    same = replace(problem)
    state, moved = State.of(problem, decisions), _move(same, State.of(problem, decisions), 1)
    again = _move(problem, state, 1)
    assert (moved is None) == (again is None)
    if moved is not None and again is not None:
        assert moved.cost == again.cost
    assert other.native is not problem.native


@given(plans())
def test_problems_and_states_can_be_copied(planned: Planned) -> None:
    """Ranks send each other plans; what is laid out in C++ stays behind."""
    problem, decisions = planned
    state = State.of(problem, decisions)
    for other in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert other.cost == state.cost
        assert other.decisions == state.decisions
        assert "native" not in vars(copy.copy(problem))


@given(problems())
def test_a_tier_without_speed_matters_only_where_something_may_move(problem: Problem) -> None:
    buffers = tuple(replace(b, movable=False) for b in problem.trace.buffers)
    nothing = Bandwidth(write=0.0, read=0.0, read_fresh=0.0)
    still = replace(problem, trace=replace(problem.trace, buffers=buffers), bandwidth=nothing)
    assert State.of(still, {}).peak_bytes == problem.plain_peak
    assert walk(still, seconds=LONG)


@pytest.mark.parametrize("loaded", [SimpleNamespace(), OSError()])
def test_a_library_of_another_version_is_not_used(loaded: object, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(_: str) -> object:
        if isinstance(loaded, Exception):
            raise loaded
        return loaded

    monkeypatch.setattr(native.ctypes, "PyDLL", load)
    assert native.library.__wrapped__() is None


def test_a_recording_keeps_its_number() -> None:
    """When it is kept again, its plans stay worth as much as before."""
    cache = PlanCache()
    first, second = (
        SimpleNamespace(nth=0, trace=SimpleNamespace(base_bytes=n), problem=SimpleNamespace(plain_peak=1)) for n in (0, 10**6)
    )
    for entry in (first, second, first):
        cache.keep("kind", entry)  # type: ignore[arg-type]
    assert (first.nth, second.nth) == (1, 2)


LAST = """
import atexit, sys
found = []
atexit.register(lambda: print(found[0].at(found[1]).status.value))
import torch
sys.path.insert(0, sys.argv[1])
from property.strategies import chain
from lowtide.planning.unit.solve import Front
problem = chain(12)
front = Front(problem)
assert len(front.states) > 3
found[:] = [front, (problem.plain_peak + front.bound.peak_bytes) // 2]
"""


def test_exit_handlers_may_still_plan() -> None:
    """The handler was registered before torch was imported, so it runs last."""
    tests = str(Path(__file__).parents[1])
    command = [sys.executable, "-W", "ignore", "-c", LAST, tests]
    spoilt = {**os.environ, "MALLOC_PERTURB_": "165"}  # what is freed is overwritten
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False, env=spoilt)
    assert done.returncode == 0, done.stderr[-1000:]
    assert done.stdout.strip() in {"optimal", "feasible"}


DENYING = """
#include <cstdlib>
#include <new>
static long left = -1;
extern "C" void deny(long at) { left = at; }
extern "C" long remaining() { return left; }
void *operator new(std::size_t n) {
    if (left > 0 && --left == 0) throw std::bad_alloc();
    void *p = std::malloc(n ? n : 1);
    if (!p) throw std::bad_alloc();
    return p;
}
void operator delete(void *p) noexcept { std::free(p); }
void operator delete(void *p, std::size_t) noexcept { std::free(p); }
"""
DENIED = """
import ctypes, sys
sys.path.insert(0, sys.argv[1])
denying = ctypes.CDLL(sys.argv[2])
from hypothesis import given, settings, HealthCheck
from property.strategies import plans
from lowtide.planning.unit.simulate import play

tried = 0

@settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(plans())
def law(planned):
    global tried
    problem, decisions = planned
    wanted = play(problem, decisions)
    for at in range(1, 400):
        vars(problem).pop("native", None)
        unit = problem.native
        denying.deny(at)
        found = unit.play(decisions)
        hit = denying.remaining() == 0
        denying.deny(-1)
        if not hit:
            break
        tried += 1
        assert found is None
        again = unit.play(decisions)
        assert (again.peak_bytes, again.extra_seconds) == (wanted.peak_bytes, wanted.extra_seconds)

law()
print("denied", tried)
"""


def test_a_unit_that_was_denied_memory_plays_rightly_afterwards(tmp_path: Path) -> None:
    """The n-th allocation of a play is denied, for each n: it has no outcome, and the next play the referee's."""
    source, denying = tmp_path / "deny.cpp", tmp_path / "deny.so"
    source.write_text(DENYING)
    subprocess.run(["c++", "-shared", "-fPIC", "-o", denying, source], check=True)
    preloaded = {**os.environ, "LD_PRELOAD": " ".join(filter(None, [str(denying), os.environ.get("LD_PRELOAD", "")]))}
    command = [sys.executable, "-c", DENIED, str(Path(__file__).parents[1]), denying]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False, env=preloaded)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) > 50
