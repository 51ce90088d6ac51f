"""Figures of a plan: its JSON, what its peak and cost depend on, and what it does per module."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtide.planning import schedule
from lowtide.planning.bounds import time_bounds
from lowtide.planning.graph import Graph
from lowtide.planning.schedule import Act
from lowtide.planning.solver.solve import Answer, Solver

_MORE = 0.02
"""Share of the budget by which it is raised to estimate the value of memory."""
_NAMED = 8
"""Largest number of values listed in ``Decides.dear``."""
_OF_A_POINT = ("status", "budget_bytes", "peak_bytes", "host_peak_bytes", "moved_bytes", "seconds", "wait_seconds",
               "extra_fraction", "bound", "lowest_peak_bytes", "schedule")
"""Keys that each point of a curve has itself; the others are those of the plan that the curve belongs to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleFigures:
    """Bytes of the values of one module, by what the plan does with them.

    Attributes:
        module: path of the module; ``""`` if the graph names none.
        kept_bytes: bytes of values that are computed once and never fetched.
        recomputed_bytes: bytes of values that are computed more than once and never fetched.
        moved_bytes: bytes of values that are fetched.
        seconds: seconds of running the module's operators again.
    """

    module: str
    kept_bytes: int
    recomputed_bytes: int
    moved_bytes: int
    seconds: float


def by_module(answer: Answer) -> list[ModuleFigures]:
    """What is kept, recomputed and moved per module, the costliest module first."""
    graph, runs = answer.graph, answer.timeline.runs
    fetched = {m.node for m in answer.schedule if m.act is Act.FETCH}
    sums: dict[str, list[float]] = {}
    for v, node in enumerate(graph.nodes):
        if node.resident:
            continue
        leader = graph.leader(v)
        row = sums.setdefault(node.module or graph.nodes[leader].module, [0, 0, 0, 0.0])
        row[2 if v in fetched else 1 if runs[leader] > 1 else 0] += node.bytes
        row[3] += node.seconds * max(0, runs[v] - 1)
    shares = [
        ModuleFigures(module=m, kept_bytes=int(a), recomputed_bytes=int(b), moved_bytes=int(c), seconds=s)
        for m, (a, b, c, s) in sums.items()
    ]
    return sorted(shares, key=lambda s: (-s.seconds, -s.moved_bytes, -s.kept_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Decides:
    """What a plan's peak and cost depend on.

    Attributes:
        tight_node: the node that is played when the plan peaks.
        more_bytes, saves_seconds: the bound falls by ``saves_seconds`` if the budget grows by ``more_bytes``; an estimate.
        dear: values whose recomputation costs most seconds per byte: (node, bytes, seconds).
    """

    tight_node: int
    more_bytes: int
    saves_seconds: float
    dear: tuple[tuple[int, int, float], ...]


def decides(solver: Solver, answer: Answer) -> Decides:
    """Estimate the value of memory from the bound, and list what the plan pays for; the plan must not be empty."""
    graph = answer.graph
    tight = answer.schedule[answer.timeline.peak_move].node
    more = int(_MORE * (answer.budget_bytes or 0))
    saved = 0.0
    if answer.budget_bytes is not None and answer.time_bound.seconds > 0:
        saved = time_bounds.price(solver.bound_game, solver.precedence, answer.time_bound, answer.budget_bytes, more)
    again = []
    for v, runs in enumerate(answer.timeline.runs):
        size = sum(graph.nodes[u].bytes for u in (v, *graph.members[v]))
        if runs > 1 and size:
            again.append((v, size, graph.nodes[v].seconds * (runs - 1)))
    dear = tuple(sorted(again, key=lambda x: -x[2] / x[1])[:_NAMED])
    return Decides(tight_node=tight, more_bytes=more, saves_seconds=saved, dear=dear)


def to_json(answer: Answer, *, strategy: str = "search", rounding_bytes: int = 1) -> dict[str, Any]:
    """The keys of ``lowtide plan --json``, except those of the curve."""
    graph, timeline = answer.graph, answer.timeline
    nodes = graph.nodes
    shown = answer.status.has_plan
    return {
        "graph": graph.name,
        "order": answer.order.value,
        "strategy": strategy,
        "status": answer.status.value,
        "budget_bytes": answer.budget_bytes,
        "rounding_bytes": rounding_bytes,
        "given_peak_bytes": answer.given_peak_bytes,
        "peak_bytes": timeline.peak_bytes if shown else None,
        "host_peak_bytes": timeline.host_peak_bytes if shown else None,
        "moved_bytes": timeline.moved_bytes if shown else None,
        "seconds": timeline.seconds if shown else None,
        "wait_seconds": timeline.wait_seconds if shown else None,
        "base_seconds": graph.base_seconds,
        "extra_fraction": answer.extra_fraction if shown else None,
        "bound": {
            "peak_bytes": answer.peak_bound.bytes,
            "method": answer.peak_bound.method,
            "node": nodes[answer.peak_bound.node].id if answer.peak_bound.node >= 0 else None,
            "extra_seconds": answer.time_bound.seconds,
            "extra_method": answer.time_bound.method,
            "solved": answer.time_bound.solved,
            "instants": [nodes[v].id for v in answer.time_bound.nodes],
            "windows": [[start, end, nodes[v].id] for start, end, v in answer.time_bound.windows],
        },
        "solve_seconds": answer.solve_seconds,
        "lowest_peak_bytes": timeline.peak_bytes,
        "schedule": schedule.to_json(graph, answer.schedule) if shown else [],
    }


def shadow_prices(answers: Sequence[Answer]) -> list[float | None]:
    """What one more byte would save at each budget of a curve, in seconds; None where there is no plan.

    The slope, to the right of each budget, of the highest convex curve below the plans: a plan that happens to be good or bad
    does not make its neighbours' bytes look cheap or dear. 0 at the highest budget.
    """
    hull: list[tuple[int, float]] = []
    for x, y in sorted((a.budget_bytes or 0, a.extra_seconds) for a in answers if a.status.has_plan):
        if hull and x == hull[-1][0]:
            continue  # the cheaper of two plans for one budget came first
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-2], (x, y)):
            hull.pop()
        hull.append((x, y))
    slopes = [(b[0], max(0.0, -_slope(a, b))) for a, b in itertools.pairwise(hull)]
    return [
        next((s for end, s in slopes if (a.budget_bytes or 0) < end), 0.0) if a.status.has_plan else None for a in answers
    ]


def _slope(a: tuple[int, float], b: tuple[int, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])


def curve_json(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """The ``curve`` key: the full plan for each budget, so that it can be verified, and what one more byte would save."""
    return [_point(answer, price) for answer, price in zip(answers, shadow_prices(answers), strict=True)]


def _point(answer: Answer, price: float | None) -> dict[str, Any]:
    told = to_json(answer)
    extra = answer.extra_seconds if answer.status.has_plan else None
    return {key: told[key] for key in _OF_A_POINT} | {"extra_seconds": extra, "saves_seconds_per_byte": price}


def decides_json(graph: Graph, why: Decides) -> dict[str, Any]:
    """The ``decides`` key."""
    nodes = graph.nodes
    return {
        "tight_node": nodes[why.tight_node].id,
        "more_bytes": why.more_bytes,
        "saves_seconds": why.saves_seconds,
        "dear": [{"node": nodes[v].id, "bytes": b, "seconds": s} for v, b, s in why.dear],
    }


def profile(answer: Answer) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Seconds and bytes along a plan, one point per operator run (waits for transfers are left out)."""
    runs = [(t, m) for t, m in enumerate(answer.schedule) if m.act in (Act.COMPUTE, Act.UPDATE)]
    seconds = np.cumsum([answer.graph.nodes[m.node].seconds for _, m in runs])
    return seconds, answer.timeline.bytes_at[[t for t, _ in runs]]


def modules_json(shares: Sequence[ModuleFigures]) -> list[dict[str, Any]]:
    """The ``modules`` key."""
    return [{k: getattr(s, k) for k in ModuleFigures.__slots__} for s in shares]
