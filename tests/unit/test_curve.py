"""Law: the budgets of a curve share its time limit, and the time that easy budgets leave goes to the ones after them."""

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


def test_time_left_by_easy_budgets_goes_to_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each budget may take the remaining time divided by the number of remaining budgets."""
    given: list[float] = []
    original = Solver.at

    def at(solver: Solver, budget_bytes: int, **options: Any) -> Answer:
        given.append(options["seconds"])
        return original(solver, budget_bytes, **options)

    monkeypatch.setattr(Solver, "at", at)
    for module in (solve, exhaustive):  # by this clock nothing that is asked takes any time
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 0.0))
    Solver(_chain(8)).curve(POINTS, seconds=SECONDS)  # so small that each budget is searched exhaustively, at once
    assert given == [SECONDS / (POINTS - k) for k in range(POINTS)]
