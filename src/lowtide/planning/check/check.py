"""Verifies a solution file by a second implementation of the rules and bounds that shares only the graph.

This module checks the form of the file; ``claims`` checks its statements.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lowtide.planning.check.claims import SECONDS, Claims
from lowtide.planning.check.points import UnknownNode
from lowtide.planning.graph import Graph
from lowtide.planning.status import Status

_PEAK_METHODS = ("stuck", "instant", "order", "forced", "cut")
_TIME_METHODS = ("none", "search", "instant", "instants", "order", "chain")
_OF_THE_PLAN = ("curve", "decides", "modules", "levers")
"""Fields of a whole solution that the points of its curve do not have."""
_OF_A_POINT = frozenset((
    "status", "budget_bytes", "peak_bytes", "host_peak_bytes", "moved_bytes", "seconds", "wait_seconds", "extra_fraction",
    "extra_seconds", "saves_seconds_per_byte", "bound", "lowest_peak_bytes", "schedule",
))
"""Fields that a point of a curve states itself; all others are taken from the whole file."""


def check(graph: Graph, solution: object, *, progress: Callable[[int, int], object] | None = None) -> list[str]:
    """Check the content of a solution file; the points of its curve are checked as solutions, too.

    ``saves_seconds`` of ``decides`` is an estimate and is not checked.

    Args:
        graph: the graph that was solved.
        solution: the file's content.
        progress: called with the number of solutions checked so far and their total.

    Returns:
        What is wrong, one sentence per error; empty if everything holds.
    """
    if not is_solution(solution):
        return ["it is not a solution written by `lowtide plan --json`"]
    assert isinstance(solution, Mapping)
    curve = solution.get("curve", [])
    if not isinstance(curve, list) or not all(is_solution(p) and type(p.get("budget_bytes")) is int for p in curve):
        return ["its curve is not a list of solutions for budgets"]
    wrong = _wrong(graph, solution)
    for done, point in enumerate(curve, 1):
        if progress is not None:
            progress(done, len(curve) + 1)
        whole = {k: v for k, v in solution.items() if k not in _OF_THE_PLAN} | {"strategy": "search"} | point
        foreign = sorted(set(point) - _OF_A_POINT)
        texts = [f"a point of a curve may not have {', '.join(foreign)}"] if foreign else _wrong(graph, whole)
        wrong += [f"curve at {point.get('budget_bytes')}: {text}" for text in texts]
    return wrong or [*_rises(curve), *_mispriced(curve)]


def is_solution(found: object) -> bool:
    """Whether a file's content has the form that ``lowtide plan --json`` writes, whether it is true or not."""
    return isinstance(found, Mapping) and "status" in found and isinstance(found.get("bound"), Mapping)


def _rises(curve: Sequence[Mapping[str, Any]]) -> list[str]:
    """Errors where a curve's plans or bounds take more time with more memory, which never happens."""
    by_budget = sorted(curve, key=lambda point: -point["budget_bytes"])
    wrong = []
    for name, values in (
        ("seconds", [p["seconds"] for p in by_budget if p.get("seconds") is not None]),
        ("bound.extra_seconds", [p["bound"]["extra_seconds"] for p in by_budget]),
    ):
        if any(b < a * (1 - SECONDS) for a, b in itertools.pairwise(values)):
            wrong.append(f"the curve's {name} fall with the budget")
    return wrong


def _mispriced(curve: Sequence[Mapping[str, Any]]) -> list[str]:
    """Errors where a point says that one more byte saves other seconds than the curve's plans say together.

    The highest convex curve below the plans passes, at a budget, the lowest line between a plan for no more and one for no
    less; its slope there is the steepest way down from it to a plan for more.
    """
    plans = [(p["budget_bytes"], p["extra_seconds"]) for p in curve if p.get("extra_seconds") is not None]
    wrong = []
    for point in curve:
        at, told = point["budget_bytes"], point.get("saves_seconds_per_byte")
        if point.get("extra_seconds") is None or told is None:
            if told is not None:
                wrong.append(f"curve at {at}: a price without a plan")
            continue
        below = min(_between(a, b, at) for a in plans for b in plans if a[0] <= at <= b[0])
        price = max((max(0.0, below - y) / (x - at) for x, y in plans if x > at), default=0.0)
        if abs(told - price) * max(1, at) > SECONDS * max(1.0, below):
            wrong.append(f"curve at {at}: saves_seconds_per_byte is {told}, but its plans say {price}")
    return wrong


def _between(a: tuple[int, float], b: tuple[int, float], x: int) -> float:
    """The height at ``x`` of the line from ``a`` to ``b``."""
    return a[1] if a[0] == b[0] else a[1] + (b[1] - a[1]) * (x - a[0]) / (b[0] - a[0])


def _wrong(graph: Graph, solution: Mapping[str, Any]) -> list[str]:
    try:
        strange = _strange(solution)
        return strange or Claims(graph, solution).run()
    except UnknownNode as unknown:
        return [f"it names an unknown node: {unknown.args[0]!r}"]
    except (KeyError, TypeError, ValueError, IndexError, ArithmeticError) as error:
        return [f"it is damaged: {type(error).__name__}: {error}"]


def _strange(solution: Mapping[str, Any]) -> list[str]:
    """Errors for fields whose values have no meaning that could be verified."""
    bound = solution["bound"]
    words = (
        ("status", solution["status"], [s.value for s in Status]), ("order", solution.get("order"), ["fixed", "free"]),
        ("bound.method", bound.get("method"), _PEAK_METHODS), ("bound.extra_method", bound.get("extra_method"), _TIME_METHODS),
    )
    wrong = [f"{name} is {found!r}, not one of {', '.join(known)}" for name, found, known in words if found not in known]
    unit, budget = solution.get("rounding_bytes"), solution.get("budget_bytes")
    if type(unit) is not int or unit < 1:
        wrong.append(f"rounding_bytes is {unit!r}, but must be a number of bytes, 1 or more")
    if budget is not None and (type(budget) is not int or budget < 0):
        wrong.append(f"budget_bytes is {budget!r}, but must be a number of bytes or null")
    if budget is None and solution["status"] in (Status.INFEASIBLE, Status.UNKNOWN):
        wrong.append(f"{solution['status']} is claimed, but there is no budget")
    if type(bound.get("extra_seconds")) not in (int, float) or bound["extra_seconds"] < 0:
        wrong.append(f"bound.extra_seconds is {bound.get('extra_seconds')!r}, but must be a number of seconds, 0 or more")
    return wrong
