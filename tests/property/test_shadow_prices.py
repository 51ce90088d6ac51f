"""Law: a curve says at each budget what one more byte saves, by the highest convex curve below its plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.planning.check.check import check
from lowtide.planning.graph import Graph
from lowtide.planning.solver import figures
from lowtide.planning.solver.solve import Answer, Solver
from lowtide.planning.status import Status
from property.graphs import plain_graphs

SLOW = settings(max_examples=40, deadline=None)


def _curve(graph: Graph, points: int = 6) -> list[Answer]:
    return Solver(graph).curve(points, seconds=600)  # so small that each budget is searched exhaustively, at once


@SLOW
@given(plain_graphs(most=6), st.integers(2, 8))
def test_the_checker_agrees_on_every_price(graph: Graph, points: int) -> None:
    """Prices fall as budgets rise, the highest budget's is 0, and from any budget they never promise more than plans cost."""
    answers = _curve(graph, points)
    told: dict[str, Any] = figures.to_json(answers[0]) | {"curve": figures.curve_json(answers)}
    assert check(graph, told) == []
    prices = figures.shadow_prices(answers)
    known = [(a.budget_bytes or 0, a.extra_seconds, p) for a, p in zip(answers, prices, strict=True) if p is not None]
    assert [p for *_, p in known] == sorted(p for *_, p in known), "budgets fall along a curve"
    assert all(p >= 0 for *_, p in known)
    top = max(b for b, *_ in known)
    assert {p for b, _, p in known if b == top} == {0.0}
    for lower, _, price in known:
        for higher, less, _ in known:
            if higher > lower:
                assert _below(known, lower) - price * (higher - lower) <= less + 1e-9


def _below(known: list[tuple[int, float, float]], at: int) -> float:
    """The lowest line at a budget between a plan for no more and a plan for no less."""
    found = []
    for a, s, _ in known:
        for b, t, _ in known:
            if a <= at <= b:
                found.append(s if a == b else s + (t - s) * (at - a) / (b - a))
    return min(found)


@pytest.mark.parametrize(("seconds", "prices"), [
    ((0.0, 1.0, 4.0, 9.0), (0.0, 0.1, 0.3, 0.5)),
    ((0.0, 3.0, 4.0, 9.0), (0.0, 0.2, 0.2, 0.5)),
    ((0.0, 0.0, 0.0, 6.0), (0.0, 0.0, 0.0, 0.6)),
    ((0.0, None, 4.0, 9.0), (0.0, None, 0.2, 0.5)),
])
def test_prices_are_slopes_of_the_convex_curve(seconds: tuple[float | None, ...], prices: tuple[float | None, ...]) -> None:
    """Budgets of 40, 30, 20 and 10 bytes; a plan above the line between its neighbours does not count."""
    assert figures.shadow_prices(_answers(seconds)) == pytest.approx(list(prices))


def _answers(seconds: tuple[float | None, ...]) -> list[Answer]:
    graph = _graph()
    given = Solver(graph).at(1 << 40, seconds=1)
    found = []
    for budget, extra in zip((40, 30, 20, 10), seconds, strict=True):
        status = Status.INFEASIBLE if extra is None else Status.FEASIBLE
        timeline = replace(given.timeline, seconds=graph.base_seconds + (extra or 0.0))
        found.append(replace(given, budget_bytes=budget, status=status, timeline=timeline))
    return found


def _graph() -> Graph:
    from lowtide.planning.graph import Node

    nodes = tuple(Node(id=f"n{i}", bytes=1, seconds=1.0, parents=(i - 1,) if i else ()) for i in range(3))
    return Graph(nodes=nodes, order=(0, 1, 2))


def test_a_false_price_is_refused() -> None:
    graph = _graph()
    answers = _curve(graph)
    told: dict[str, Any] = figures.to_json(answers[0]) | {"curve": figures.curve_json(answers)}
    assert check(graph, told) == []
    told["curve"][-1]["saves_seconds_per_byte"] = 1.0
    assert any("saves_seconds_per_byte" in line for line in check(graph, told))
