"""Laws: a program that is solved in a process of its own gives what it gives here; one that takes too long is ended."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from lowtide.pebble import apart, bound
from lowtide.pebble.apart import kept_ready, milp_apart
from scipy.optimize import Bounds, LinearConstraint, milp


def knapsack(items: int, seed: int) -> dict[str, Any]:
    """Several knapsacks at once, which branching is long about."""
    rnd = np.random.default_rng(seed)
    sizes = rnd.integers(100, 1000, (8, items))
    return {
        "c": -rnd.integers(100, 1000, items).astype(float),
        "constraints": LinearConstraint(sizes, -np.inf, sizes.sum(axis=1) / 2),
        "bounds": Bounds(0, 1),
        "integrality": np.ones(items),
    }


def children() -> list[psutil.Process]:
    """Processes of this one that serve programs."""
    return [p for p in psutil.Process().children() if any("apart.py" in part for part in p.cmdline())]


def test_its_answer_is_the_one_that_is_found_here() -> None:
    for seed in range(3):
        asked = knapsack(12, seed)
        found = milp_apart(asked, seconds=60)
        assert found is not None
        assert found.fun == milp(**asked).fun
    assert not children()


def test_one_process_answers_all_that_is_asked_while_it_is_kept_and_is_gone_afterwards() -> None:
    with kept_ready(), kept_ready():
        first = children()
        assert len(first) == 1
        for seed in range(3):
            assert milp_apart(knapsack(10, seed), seconds=60) is not None
        assert children() == first
    assert not children()


def test_a_program_that_does_not_end_is_ended_and_the_next_one_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "_EARLY", -600.0)  # it is not told of its end
    with kept_ready():
        began = time.monotonic()
        assert milp_apart(knapsack(200, 1), seconds=1.5) is None
        assert time.monotonic() - began < 30
        assert milp_apart(knapsack(10, 1), seconds=60) is not None
    assert not children()


def test_one_that_is_interrupted_leaves_no_process_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(pipe: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(apart, "_receive", interrupted)
    with kept_ready(), pytest.raises(KeyboardInterrupt):
        milp_apart(knapsack(200, 1), seconds=60)
    assert not children()


def test_one_that_never_reads_what_it_is_sent_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deaf = tmp_path / "deaf"
    deaf.write_text("#!/bin/sh\nexec sleep 60\n")
    deaf.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(deaf))
    began = time.monotonic()
    assert milp_apart(knapsack(20_000, 1), seconds=0.5) is None
    assert time.monotonic() - began < 30


def test_what_the_solver_prints_is_no_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """HiGHS 1.12 prints a line or other whatever it was told."""
    (tmp_path / "sitecustomize.py").write_text(
        "import scipy.optimize, os\n"
        "plain = scipy.optimize.milp\n"
        "def milp(*a, **k):\n"
        "    os.write(1, b'HighsMipSolverData\\n' * 100)\n"
        "    return plain(*a, **k)\n"
        "scipy.optimize.milp = milp\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    asked = knapsack(12, 1)
    found = milp_apart(asked, seconds=60)
    assert found is not None
    assert found.fun == milp(**asked).fun


def test_where_no_process_can_be_begun_nothing_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with kept_ready():
        assert milp_apart(knapsack(10, 1), seconds=5) is None


def test_large_programs_with_whole_variables_go_there_and_prove_nothing_when_they_are_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def never(arguments: Any, *, seconds: float) -> None:
        asked.append((len(arguments["c"]), seconds))

    monkeypatch.setattr(bound, "milp_apart", never)
    monkeypatch.setattr(bound, "is_kept", lambda: True)
    program = bound.Program()
    count = bound._LARGE + 1
    program.row({program.variable(i, 1.0): 1.0 for i in range(count)}, 1.0)
    assert program.solve(3.0).value == 0.0
    assert program.solve(3.0).x is None
    assert asked == [(count, 3.0)] * 2
    assert program.solve(3.0, whole=False).value == 1.0
