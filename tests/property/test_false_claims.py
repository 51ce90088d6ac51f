"""Laws of the checker: a false claim in a solution is refused, whoever wrote it; a true one is accepted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from patience import PATIENCE
import pytest

from lowtide.planning.solver import caching_allocator, figures
from lowtide.planning.check.check import check
from lowtide.planning.graph import Graph
from lowtide.planning.graph_json import from_json
from lowtide.planning.solver.solve import Order, Solver


def there_and_back(*, offload: bool = False, seconds: float = 1.0) -> Graph:
    """Seven operators forward and seven backward, each of which reads its own forward operator."""
    nodes = [{"id": f"f{i}", "bytes": 50, "seconds": seconds} for i in range(7)]
    nodes += [{"id": f"b{i}", "bytes": 20, "seconds": 2 * seconds} for i in reversed(range(7))]
    links = [{"source": f"f{i}", "target": f"f{i + 1}"} for i in range(6)]
    links += [{"source": f"f{i}", "target": f"b{i}"} for i in range(7)]
    links += [{"source": f"b{i + 1}", "target": f"b{i}"} for i in range(6)]
    about = {"offload": {"write_bytes_per_second": 9.0, "read_bytes_per_second": 9.0, "overlap": True}} if offload else {}
    return from_json({"graph": about, "nodes": nodes, "links": links})


def told(graph: Graph, *, order: Order = Order.FIXED) -> dict[str, Any]:
    """A true solution for a budget half-way between the floor and the given order's peak."""
    solver = Solver(graph, order=order)
    answer = solver.searched((solver.floor.bytes + solver.given.peak_bytes) // 2, seconds=600)
    found = figures.to_json(answer)
    assert found["bound"]["extra_seconds"] > 0 or graph.offload is not None
    assert check(solver.graph, found) == []
    return found


@pytest.mark.parametrize("instants", [["b3", "f6", "b3"], ["b5", "b4", "f6"], ["f6", "f6"]])
def test_a_chain_of_instants_out_of_order_is_refused(instants: list[str]) -> None:
    """Instants that go back or repeat prove no bound."""
    graph = there_and_back()
    lie = told(graph)
    lie["bound"] |= {"extra_method": "chain", "instants": instants, "windows": []}
    assert check(graph, lie)


def test_an_exhaustive_proof_is_refused_where_transfers_overlap() -> None:
    """With overlapping transfers no search covers all schedules, so "search" proves 0 extra seconds and nothing more."""
    graph = there_and_back(offload=True)
    lie = told(graph)
    lie["bound"] |= {"extra_method": "search", "extra_seconds": 0.0}
    assert check(graph, lie) == []
    lie["bound"] |= {"extra_seconds": lie["seconds"] - lie["base_seconds"] or 0.1}
    assert check(graph, lie)


def test_operators_of_microseconds_keep_their_exact_price() -> None:
    """Beside an operator of 1000 s, rerunning the one of 10 µs is enough, and a claimed bound of 90 µs is false."""
    nodes = [
        {"id": "cheap", "bytes": 3, "seconds": 1e-5}, {"id": "dear", "bytes": 3, "seconds": 9e-5},
        {"id": "long", "bytes": 0, "seconds": 1000.0, "workspace_bytes": 6, "recompute": False},
        {"id": "end", "bytes": 0, "seconds": 0.0},
    ]
    graph = from_json({"nodes": nodes, "links": [{"source": p, "target": "end"} for p in ("cheap", "dear", "long")]})
    solver = Solver(graph)
    answer = solver.searched(9, seconds=600)
    found = figures.to_json(answer)
    assert answer.extra_seconds == pytest.approx(1e-5)
    assert check(graph, found) == []
    found["bound"] |= {"extra_method": "instant", "instants": ["long"], "windows": [], "extra_seconds": 9e-5}
    found["status"], found["seconds"] = "optimal", 1000.00019
    found["extra_fraction"] = found["seconds"] / found["base_seconds"] - 1
    found["schedule"] = [["compute", "cheap"], ["compute", "dear"], ["free", "dear"], ["compute", "long"], ["compute", "dear"],
                         ["compute", "end"]]
    wrong = check(graph, found)
    assert any("instant proves 1" in text for text in wrong), wrong


def test_an_optimal_plan_without_budget_never_exceeds_the_given_order() -> None:
    graph = there_and_back()
    lie = figures.to_json(Solver(graph).lowest(seconds=PATIENCE))
    assert check(graph, lie) == []
    lie["schedule"] = [move for move in lie["schedule"] if move[0] != "free"]
    high = sum(n.bytes for n in graph.nodes)
    lie |= {"peak_bytes": high, "lowest_peak_bytes": high}
    assert check(graph, lie)


def _ordered_of_its_own(lie: dict[str, Any]) -> None:
    lie["curve"][0]["order"] = "free"


def _with_a_peak(lie: dict[str, Any]) -> None:
    lie["curve"][-1] |= {"status": "infeasible", "peak_bytes": 1}


def _with_words_for_seconds(lie: dict[str, Any]) -> None:
    lie["curve"][-1] |= {"status": "infeasible", "seconds": "x"}


@pytest.mark.parametrize("harm", [_ordered_of_its_own, _with_a_peak, _with_words_for_seconds])
def test_a_curve_point_with_foreign_claims_is_refused(harm: Callable[[dict[str, Any]], None]) -> None:
    """A point with an order of its own, or an infeasible one with a peak or seconds that are not a number, is refused."""
    graph = there_and_back()
    solver = Solver(graph)
    true = told(graph) | {"curve": figures.curve_json(solver.curve(4, seconds=600))}
    assert check(graph, true) == []
    lie = copy.deepcopy(true)
    harm(lie)
    assert check(graph, lie)


def test_an_infeasible_solution_with_figures_of_a_plan_is_refused() -> None:
    graph = there_and_back()
    solver = Solver(graph)
    true = figures.to_json(solver.at(solver.floor.bytes - 1))
    assert true["status"] == "infeasible"
    assert check(graph, true) == []
    for key, value in (("seconds", 0.5), ("moved_bytes", -3), ("schedule", [["compute", "f0"]])):
        assert check(graph, true | {key: value})


def test_an_inexact_share_is_refused_however_long_the_step() -> None:
    graph = there_and_back(seconds=1e9)
    true = told(graph)
    assert check(graph, true | {"extra_fraction": true["extra_fraction"] + 1e-3})


def test_reserved_bytes_are_checked_also_without_a_budget() -> None:
    graph = there_and_back().rounded(caching_allocator.BLOCK_BYTES)
    answer = Solver(graph).lowest(seconds=PATIENCE)
    held = caching_allocator.reserved(answer.graph, answer.schedule).peak_bytes
    true = figures.to_json(answer, rounding_bytes=caching_allocator.BLOCK_BYTES) | {"allocator": "cuda", "reserved_bytes": held}
    assert check(graph, true) == []
    assert check(graph, true | {"reserved_bytes": held + 1})


def test_curves_of_graphs_with_zero_seconds_are_accepted() -> None:
    graph = there_and_back(offload=True, seconds=0.0)
    solver = Solver(graph)
    curve = solver.curve(4, seconds=600)
    assert check(graph, figures.to_json(curve[0]) | {"curve": figures.curve_json(curve)}) == []
