"""Law: a program solved in another process gives the same answer; one that takes too long is ended, and what it reported
holds.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

from command import TIMEOUT
from patience import in_time
import numpy as np
import psutil
import pytest
from lowtide.planning.bounds import bound_program, solver_process, time_bounds
from lowtide.planning.bounds.solver_process import SolverAnswer, kept_ready, solved_apart
from lowtide.planning.solver.solve import Solver
from lowtide.planning.bounds.windows import Chain
from scipy.optimize import Bounds, LinearConstraint, milp

from property.test_long_graphs import blocks


def knapsack(items: int, seed: int) -> dict[str, Any]:
    """Several knapsacks at once, which take branching a long time."""
    rnd = np.random.default_rng(seed)
    sizes = rnd.integers(100, 1000, (8, items)).astype(float)
    return {
        "cost": -rnd.integers(100, 1000, items).astype(float),
        "lower": np.zeros(items),
        "upper": np.ones(items),
        "whole": np.ones(items, dtype=bool),
        "low": np.full(8, -np.inf),
        "high": sizes.sum(axis=1) / 2,
        "starts": np.arange(0, 8 * items + 1, items),
        "columns": np.tile(np.arange(items), 8),
        "values": sizes.ravel(),
    }


def here(asked: dict[str, Any]) -> float:
    """The least cost, by scipy in this process."""
    rows = LinearConstraint(asked["values"].reshape(8, -1), asked["low"], asked["high"])
    return milp(asked["cost"], constraints=rows, bounds=Bounds(0, 1), integrality=np.ones(len(asked["cost"]))).fun


def children() -> list[psutil.Process]:
    """Child processes of this one that solve programs."""
    return [p for p in psutil.Process().children() if any("solver_process.py" in part for part in p.cmdline())]


def test_an_idle_solver_process_that_was_killed_is_replaced() -> None:
    """The next program is solved all the same, in a new process."""
    asked = knapsack(12, 1)
    with kept_ready():
        assert solved_apart(asked, seconds=60).ended
        (process,) = children()
        process.kill()
        process.wait()
        assert solved_apart(asked, seconds=60).ended
    assert not children()


def test_a_solver_process_ends_when_its_parent_is_killed() -> None:
    """It sleeps and reads nothing, so only the parent-death signal can end it."""
    mine = "import time; from lowtide.planning.bounds import solver_process; solver_process._end_with_parent(); print('armed', flush=True); time.sleep(100000)"
    begin = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {mine!r}]); print(p.pid, flush=True); p.wait()"
    parent = subprocess.Popen([sys.executable, "-c", begin], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    assert parent.stdout.readline().strip() == "armed"
    parent.kill()
    parent.wait()
    with contextlib.suppress(psutil.NoSuchProcess):
        child.wait(timeout=TIMEOUT)
    assert not child.is_running()


def test_the_answer_equals_the_one_found_in_this_process() -> None:
    """Cost, bound and variables agree with scipy, and no process is left."""
    for seed in range(3):
        asked = knapsack(12, seed)
        told = solved_apart(asked, seconds=60)
        assert told.ended
        assert not told.impossible
        assert told.bound == told.cost == pytest.approx(here(asked))
        assert told.x @ asked["cost"] == pytest.approx(told.cost)
    assert not children()


def test_an_infeasible_program_is_reported_as_impossible() -> None:
    asked = knapsack(12, 1) | {"low": np.full(8, 1e6)}
    told = solved_apart(asked, seconds=60)
    assert told.impossible
    assert told.x is None


def test_the_solver_starts_from_a_given_answer() -> None:
    """With a gap of 100 % the solver may stop at once, and returns the best answer, which it was given, without having proven
    it.
    """
    asked = knapsack(12, 1)
    best = solved_apart(asked, seconds=60)
    told = solved_apart(asked, seconds=60, gap=1.0, start=best.x)
    assert told.cost == pytest.approx(best.cost)
    assert not told.ended


def test_one_process_answers_all_programs_while_it_is_kept_ready() -> None:
    """Nested `kept_ready` blocks share one process, which is gone after the outer one."""
    with kept_ready(), kept_ready():
        first = children()
        assert len(first) == 1
        for seed in range(3):
            assert solved_apart(knapsack(10, seed), seconds=60).ended
        assert children() == first
    assert not children()


def test_a_program_that_exceeds_its_time_returns_its_best_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The solver process is killed; its last answer and bound are valid, and the next program is solved."""
    monkeypatch.setattr(solver_process, "_EARLY", -600.0)  # it does not learn of its time limit
    asked = knapsack(200, 1)
    with kept_ready():
        assert solved_apart(knapsack(10, 1), seconds=60).ended  # HiGHS is there
        told = in_time(lambda s: solved_apart(asked, seconds=s), lambda t: t.x is not None and np.isfinite(t.bound), first=1.5)
        assert not told.ended
        assert np.isfinite(told.bound)
        assert told.bound <= told.cost == pytest.approx(told.x @ asked["cost"])
        assert (told.x @ asked["values"].reshape(8, -1).T <= asked["high"] + 1e-6).all()
        assert solved_apart(knapsack(10, 1), seconds=60).ended
    assert not children()


def test_an_interrupt_leaves_no_solver_process_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(pipe: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(solver_process, "_receive", interrupted)
    with kept_ready(), pytest.raises(KeyboardInterrupt):
        solved_apart(knapsack(200, 1), seconds=60)
    assert not children()


def test_a_solver_process_that_never_reads_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A large program that the process does not read returns an empty answer in time, and the process is gone."""
    deaf = tmp_path / "deaf"
    deaf.write_text("#!/bin/sh\nexec sleep 100000\n")
    deaf.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(deaf))
    assert solved_apart(knapsack(20_000, 1), seconds=0.5) == SolverAnswer()
    assert not [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE and "sleep" in p.cmdline()]


def test_output_printed_by_the_solver_is_not_read_as_an_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """HiGHS 1.12 prints a line now and then, whatever its options."""
    (tmp_path / "sitecustomize.py").write_text(
        "import highspy, os\n"
        "plain = highspy.Highs.run\n"
        "def run(*a, **k):\n"
        "    os.write(1, b'HighsMipSolverData\\n' * 100)\n"
        "    return plain(*a, **k)\n"
        "highspy.Highs.run = run\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    asked = knapsack(12, 1)
    assert solved_apart(asked, seconds=60).cost == pytest.approx(here(asked))


def test_without_a_solver_process_the_answer_is_empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with kept_ready():
        assert solved_apart(knapsack(10, 1), seconds=5) == SolverAnswer()


def test_large_integer_programs_are_solved_in_another_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Programs with integer variables above a size go to the solver process; its bound counts although it was ended. The
    relaxed program is solved in this process.
    """
    asked = []
    told = iter((SolverAnswer(), SolverAnswer(bound=0.5 * bound_program._SCALE)))

    def never(arguments: Any, *, seconds: float, gap: float, start: Any, tell: Any) -> SolverAnswer:
        asked.append((len(arguments["cost"]), seconds))
        return next(told)

    monkeypatch.setattr(bound_program, "solved_apart", never)
    monkeypatch.setattr(bound_program, "is_kept", lambda: True)
    program = bound_program.Program()
    count = bound_program._LARGE + 1
    program.row({program.variable(i, 1.0): 1.0 for i in range(count)}, 1.0)
    nothing, half = program.solve(3.0), program.solve(3.0)
    assert (nothing.value, half.value) == (0.0, 0.5)
    assert nothing.x is half.x is None
    assert not nothing.ended
    assert asked == [(count, 3.0)] * 2
    assert program.solve(3.0, whole=False).value == 1.0


def test_a_search_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """HiGHS 1.16 prints a banner when it is set up, which would appear in the output of a script under a budget."""
    solver = Solver(blocks([(2, 20.0), (3, 2.0), (1, 1.0), (4, 20.0)], 12))
    budget = solver.floor.bytes + (solver.given.peak_bytes - solver.floor.bytes) // 30
    chain = Chain(solver.bound_game, solver.precedence, time_bounds.tight_chain(solver.precedence, solver.instants, budget, most=6), budget)
    with kept_ready():
        chain.relax(seconds=5)
        chain.dive(seconds=5)
        chain.whole(seconds=5)
        solved_apart(knapsack(12, 1), seconds=60)
    assert capfd.readouterr() == ("", "")


def test_answers_are_reported_as_found_and_only_improve() -> None:
    """Each reported answer costs less than the one before, and the last one is the result."""
    heard: list[SolverAnswer] = []
    with kept_ready():
        told = solved_apart(knapsack(30, 3), seconds=600, tell=heard.append)
    assert heard
    assert [t.cost for t in heard] == sorted((t.cost for t in heard), reverse=True)
    assert heard[-1].cost == told.cost
    assert (heard[-1].x == told.x).all()
