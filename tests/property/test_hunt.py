"""Laws of the hunt: it ends when the target is met, whoever meets it, and no row that it was offered is lost."""

from __future__ import annotations

import threading
import math
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from patience import in_time
import pytest

from lowtide.planning.search.annealing import Annealer, library
from lowtide.planning.search.programs import Programs
from lowtide.planning.search.rounds import Hunt
from lowtide.planning.solver.solve import Answer, Solver
from lowtide.planning.bounds.windows import Chain
from property.test_long_graphs import blocks

pytestmark = pytest.mark.skipif(library() is None, reason="the search was not compiled")
KINDS = [(3, 1.0), (7, 20.0), (2, 1.0), (8, 2.0), (5, 1.0)]


def hunt_of(solver: Solver, budget: int, *, target: float, seconds: float) -> Hunt:
    """A hunt that has not begun."""
    return Hunt(
        annealer=Annealer(solver.game, budget, fixed=True), starts=[solver.game.given], fixed=True,
        target_seconds=target, deadline=time.monotonic() + seconds,
    )


def test_a_row_that_meets_the_target_ends_running_rounds() -> None:
    """A suggested row that meets the target sets the deadline of every running round to 0."""
    solver = Solver(blocks(KINDS, 5))
    hunt = hunt_of(solver, solver.given.peak_bytes, target=solver.game.base_seconds, seconds=60)
    rounds: list[Any] = [SimpleNamespace(deadline=hunt.deadline) for _ in range(2)]
    for running, one in zip(hunt._running, rounds, strict=True):
        running.append(one)
    hunt.suggest([solver.game.given])
    assert [one.deadline for one in rounds] == [0.0, 0.0]


def test_a_row_offered_too_late_to_improve_still_counts() -> None:
    """If it is the best one, it is the answer, although no time is left to improve it."""
    solver = Solver(blocks(KINDS, 5))
    budget = solver.given.peak_bytes - 1
    lower = solver.descent.below(budget, deadline=math.inf)
    hunt = hunt_of(solver, budget, target=0.0, seconds=0.0)
    hunt.start()
    assert hunt.wait().over_bytes
    hunt.offer([lower])
    assert not hunt.wait().over_bytes


def test_no_thread_survives_a_failing_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in a program ends the search, and its threads, long before the time limit."""
    def failing(self: Programs, single: object) -> None:
        raise RuntimeError("a program failed")

    monkeypatch.setattr(Programs, "prove", failing)
    solver, before = Solver(blocks(KINDS, 30)), threading.active_count()
    with pytest.raises(RuntimeError, match="a program failed"):
        solver.searched((solver.floor.bytes + solver.given.peak_bytes) // 2, seconds=100_000)  # the error alone can end it
    assert threading.active_count() == before


@pytest.mark.long("30-5", "20-10")
@pytest.mark.parametrize(("depth", "share"), [(10, 2), (20, 10), (30, 5)])
def test_the_strongest_bound_of_any_chain_is_reported(depth: int, share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain that has grown may prove less, relaxed, than the one before."""
    proven: list[float] = []
    made: dict[int, int] = {}
    bound_of = Chain._bound

    def weaker(self: Chain, *, ended: bool) -> Any:
        """What the first proves, and of those after it less."""
        found = bound_of(self, ended=ended)
        found = replace(found, seconds=found.seconds * (0.9 if made.setdefault(id(self), len(made)) else 1.0))
        proven.append(found.seconds)
        return found

    monkeypatch.setattr(Chain, "_bound", weaker)
    solver = Solver(blocks(KINDS, depth))
    budget = solver.floor.bytes + (solver.given.peak_bytes - solver.floor.bytes) * share // 100

    def searched(seconds: float) -> Answer:
        proven.clear()
        made.clear()
        return solver.searched(budget, seconds=seconds)

    answer = in_time(searched, lambda _: len(made) > 1 and max(proven) > 0, first=2)
    assert len(made) > 1
    assert answer.time_bound.seconds >= max(proven) > 0


def test_a_time_limit_beyond_the_clock_is_accepted() -> None:
    """A limit of 1e12 seconds does not overflow."""
    solver = Solver(blocks(KINDS, 5))
    answer = solver.at((solver.floor.bytes + solver.given.peak_bytes) // 2, seconds=1e12)
    assert answer.status.has_plan
