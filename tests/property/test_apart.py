"""Laws: a program that is solved in a process of its own gives what it gives here; one that takes too long is ended, and what
was told of it until then holds."""

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
    """Several knapsacks at once, which branching is long about."""
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
    """The least cost, by scipy."""
    rows = LinearConstraint(asked["values"].reshape(8, -1), asked["low"], asked["high"])
    return milp(asked["cost"], constraints=rows, bounds=Bounds(0, 1), integrality=np.ones(len(asked["cost"]))).fun


def children() -> list[psutil.Process]:
    """Processes of this one that serve programs."""
    return [p for p in psutil.Process().children() if any("solver_process.py" in part for part in p.cmdline())]


def test_a_process_that_was_ended_while_it_waited_costs_no_answer() -> None:
    asked = knapsack(12, 1)
    with kept_ready():
        assert solved_apart(asked, seconds=60).ended
        (process,) = children()
        process.kill()
        process.wait()
        assert solved_apart(asked, seconds=60).ended
    assert not children()


def test_a_process_ends_with_a_parent_that_is_killed_whatever_it_is_at() -> None:
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


def test_its_answer_is_the_one_that_is_found_here() -> None:
    for seed in range(3):
        asked = knapsack(12, seed)
        told = solved_apart(asked, seconds=60)
        assert told.ended
        assert not told.impossible
        assert told.bound == told.cost == pytest.approx(here(asked))
        assert told.x @ asked["cost"] == pytest.approx(told.cost)
    assert not children()


def test_a_program_without_an_answer_is_told_to_have_none() -> None:
    asked = knapsack(12, 1) | {"low": np.full(8, 1e6)}
    told = solved_apart(asked, seconds=60)
    assert told.impossible
    assert told.x is None


def test_it_begins_from_an_answer_that_it_is_given() -> None:
    asked = knapsack(12, 1)
    best = solved_apart(asked, seconds=60)
    told = solved_apart(asked, seconds=60, gap=1.0, start=best.x)
    assert told.cost == pytest.approx(best.cost)
    assert not told.ended


def test_one_process_answers_all_that_is_asked_while_it_is_kept_and_is_gone_afterwards() -> None:
    with kept_ready(), kept_ready():
        first = children()
        assert len(first) == 1
        for seed in range(3):
            assert solved_apart(knapsack(10, seed), seconds=60).ended
        assert children() == first
    assert not children()


def test_a_program_that_does_not_end_is_ended_with_what_was_told_and_the_next_one_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(solver_process, "_EARLY", -600.0)  # it is not told of its end
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


def test_one_that_is_interrupted_leaves_no_process_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(pipe: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(solver_process, "_receive", interrupted)
    with kept_ready(), pytest.raises(KeyboardInterrupt):
        solved_apart(knapsack(200, 1), seconds=60)
    assert not children()


def test_one_that_never_reads_what_it_is_sent_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deaf = tmp_path / "deaf"
    deaf.write_text("#!/bin/sh\nexec sleep 100000\n")
    deaf.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(deaf))
    assert solved_apart(knapsack(20_000, 1), seconds=0.5) == SolverAnswer()
    assert not [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE and "sleep" in p.cmdline()]


def test_what_the_solver_prints_is_no_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """HiGHS 1.12 prints a line or other whatever it was told."""
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


def test_where_no_process_can_be_begun_nothing_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with kept_ready():
        assert solved_apart(knapsack(10, 1), seconds=5) == SolverAnswer()


def test_large_programs_with_whole_variables_go_there_and_prove_what_was_told_when_they_are_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def test_nothing_of_a_search_is_printed_on_the_output_of_who_asks(capfd: pytest.CaptureFixture[str]) -> None:
    """HiGHS 1.16 prints who it is when it is set up: a script's output under a budget would not be its own."""
    solver = Solver(blocks([(2, 20.0), (3, 2.0), (1, 1.0), (4, 20.0)], 12))
    budget = solver.floor.bytes + (solver.given.peak_bytes - solver.floor.bytes) // 30
    chain = Chain(solver.bound_game, solver.precedence, time_bounds.tight_chain(solver.precedence, solver.instants, budget, most=6), budget)
    with kept_ready():
        chain.relax(seconds=5)
        chain.dive(seconds=5)
        chain.whole(seconds=5)
        solved_apart(knapsack(12, 1), seconds=60)
    assert capfd.readouterr() == ("", "")


def test_answers_are_told_as_they_come_each_better_than_the_one_before() -> None:
    heard: list[SolverAnswer] = []
    with kept_ready():
        told = solved_apart(knapsack(30, 3), seconds=600, tell=heard.append)
    assert heard
    assert [t.cost for t in heard] == sorted((t.cost for t in heard), reverse=True)
    assert heard[-1].cost == told.cost
    assert (heard[-1].x == told.x).all()
