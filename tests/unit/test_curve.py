"""Law: the budgets of a curve share its time, and what the easy ones leave is the hard ones'."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from lowtide.planning.search import exhaustive
from lowtide.planning.solver import solve
from lowtide.planning.graph import Graph
from lowtide.planning.graph_json import from_json
from lowtide.planning.solver.solve import Answer, Solver

POINTS, SECONDS = 6, 12.0


def _chain(length: int) -> Graph:
    nodes = [{"id": i, "bytes": 100, "seconds": 1.0} for i in range(length)]
    links = [{"source": i, "target": i + 1} for i in range(length - 1)]
    links += [{"source": i, "target": length - 1} for i in range(length - 2)]
    return from_json({"directed": True, "nodes": nodes, "links": links})


def test_what_easy_budgets_leave_is_given_to_those_that_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []
    original = Solver.at

    def at(solver: Solver, budget_bytes: int, **options: Any) -> Answer:
        given.append(options["seconds"])
        return original(solver, budget_bytes, **options)

    monkeypatch.setattr(Solver, "at", at)
    for module in (solve, exhaustive):  # by this clock nothing that is asked takes any time
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 0.0))
    Solver(_chain(8)).curve(POINTS, seconds=SECONDS)  # so small that each is looked at whole, at once
    assert given == [SECONDS / (POINTS - k) for k in range(POINTS)]
