"""Chooses levers and recompute together: plans a step with each set of levers, and takes the fastest."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from lowtide.base.errors import GraphError, StructureError
from lowtide.base.lever_catalogue import LEVERS, SLICES, UPDATE
from lowtide.planning.graph import Graph
from lowtide.planning.schedule import Act, Move, Row, plain_row
from lowtide.planning.solver.solve import Answer, Order, Solver
from lowtide.planning.status import Status
from lowtide.recording.recorded_step import RecordedStep
from lowtide.recording.rewrites.levers import each_lever, with_levers

_ALL_SETS: Final = 3
"""Number of levers up to which every set of them is planned; with more, only each one alone and all together."""
_TOLD_ONLY: Final = 0.25
"""Search time of a set that is only reported, as a share of the time of a set that may be chosen."""
_TELLING: Final = 1e-3
"""Share of the step's seconds that an additional lever must save to be used, because a lever changes what runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A step with a set of levers, and its plan.

    Attributes:
        names: the levers' names, in the order of :data:`lowtide.base.lever_catalogue.LEVERS`.
        solver: for the step's graph with these levers.
        answer: the plan; None if no budget was given.
        own_seconds: seconds that the levers themselves add, whatever the plan.
    """

    names: tuple[str, ...]
    solver: Solver
    answer: Answer | None
    own_seconds: float

    @property
    def peak_bytes(self) -> int:
        """Peak without a plan."""
        return self.solver.given.peak_bytes

    @property
    def exact(self) -> bool:
        """Whether losses, gradients and weights stay bit-equal to the plain run."""
        return all(LEVERS[name].exact for name in self.names)

    @property
    def floor_bytes(self) -> int:
        """Proven lower bound on the peak of every plan with these levers."""
        return self.solver.told_floor.bytes

    @property
    def extra_seconds(self) -> float | None:
        """Seconds above the recorded step, including the levers' own; None if the budget is not held."""
        if self.answer is None or not self.answer.status.has_plan:
            return None
        return self.answer.extra_seconds + self.own_seconds


def sets_of(names: Sequence[str]) -> list[tuple[str, ...]]:
    """The sets of levers to plan: the empty one first, small ones before large ones.

    An update in the backward covers one parameter at a time, so slicing it would change nothing: no set has both levers.
    """
    together = [name for name in names if name != SLICES or UPDATE not in names]
    if len(together) <= _ALL_SETS:
        several = [s for n in range(2, len(together) + 1) for s in itertools.combinations(together, n)]
        several += [(a, SLICES) for a in together if SLICES in names and SLICES not in together and a != UPDATE]
    else:
        several = [tuple(together)]
    return [(), *((name,) for name in names), *several]


def others(
    step: RecordedStep,
    plain: Planned,
    *,
    prepared: Callable[[Graph], Graph],
    answered: Callable[[Solver, tuple[str, ...], float, list[Row]], Answer] | None,
    allowed: Collection[str] = (),
) -> list[Planned]:
    """Plans the step with every non-empty set of the levers that would change it.

    Args:
        step: the recorded step.
        plain: its plan without levers.
        prepared: prepares a graph for planning (an offload tier, rounding).
        answered: finds a plan, given a solver, the names of its levers, its share of the search time, and rows to start from;
            None if no budget is given. The shares of all sets add up to 1.
        allowed: levers that may be chosen. If there are any, sets of only these get most of the search time.
    """
    alone = each_lever(step)
    sets = sets_of(tuple(alone))[1:]
    weights = [1.0 if set(names) <= set(allowed) else _TOLD_ONLY for names in sets] if allowed else [1.0] * len(sets)
    base, order = plain.solver.graph.base_seconds, plain.solver.order
    found = [plain]
    for names, weight in zip(sets, weights, strict=True):
        graph = with_levers(step, names) if len(names) > 1 else alone[names[0]]
        solver = Solver(prepared(graph), order=order)
        fewer = [f.answer for f in found if set(f.names) < set(names) and f.answer is not None and f.answer.status.has_plan]
        rows = [row for answer in fewer if (row := carried(solver, answer)) is not None]
        answer = None if answered is None else answered(solver, names, weight / sum(weights), rows)
        found.append(Planned(names=names, solver=solver, answer=answer, own_seconds=solver.graph.base_seconds - base))
    return found[1:]


def carried(solver: Solver, answer: Answer) -> Row | None:
    """Carries a plan for the step with fewer levers over to the step with more; None if it then breaks a rule.

    In free order, the plan's own order is tried first. Otherwise its first runs are put into the solver's order, and what the
    plan brings back before an operator's first run still comes back before that run.
    """
    index = {n.id: v for v, n in enumerate(solver.graph.nodes)}
    row = [Move(act, index[name]) for act, v in answer.row if (name := answer.graph.nodes[v].id) in index]
    orders = [_with_parts(solver, row)] if solver.order is Order.FREE else []
    for moved in (*orders, _in_order(solver, row)):
        first = list(dict.fromkeys(v for act, v in moved if act is Act.COMPUTE))
        if solver.order is Order.FIXED and first != [v for _, v in solver.row]:
            continue
        try:
            solver.follow(moved, None)
        except (GraphError, StructureError):  # updates before the last reader of what it overwrites, or drops a held value
            continue
        return moved
    return None


def _in_order(solver: Solver, row: Sequence[Move]) -> Row:
    before: dict[int, list[Move]] = {}
    waiting: list[Move] = []
    for move in row:
        waiting.append(move)
        if move.act is Act.COMPUTE and move.node not in before:
            before[move.node], waiting = waiting, []
    return (*itertools.chain.from_iterable(before.get(move.node, [move]) for move in solver.row), *waiting)


def _with_parts(solver: Solver, row: Sequence[Move]) -> Row:
    """Adds the parts of operators that the plan runs whole, right after the first run of their first part."""
    known = {v for _, v in row}
    later: dict[int, list[Move]] = {}
    last = -1
    for v in (move.node for move in plain_row(solver.graph, sorted(range(len(solver.graph.nodes))))):
        if v in known:
            last = v
        else:
            later.setdefault(last, []).append(Move(Act.COMPUTE, v))
    out: list[Move] = list(later.get(-1, ()))
    for move in row:
        out.append(move)
        if move.act is Act.COMPUTE:
            out += later.pop(move.node, ())
    return tuple(out)


def best(found: Sequence[Planned], allowed: Collection[str]) -> Planned:
    """The fastest of the allowed sets; if an additional lever saves next to nothing, the smaller set.

    If none holds the budget: of the allowed sets that are not proven infeasible, the one with the lowest floor; else the first
    of ``found``.
    """
    least = _TELLING * found[0].solver.graph.base_seconds
    permitted = [f for f in found if set(f.names) <= set(allowed)]
    timed = [(f.extra_seconds, f) for f in permitted if f.extra_seconds is not None]
    if timed:
        fastest = min(seconds for seconds, _ in timed)
        return next(f for seconds, f in timed if seconds <= fastest + least)
    open_ = [f for f in permitted if f.answer is not None and f.answer.status is Status.UNKNOWN]
    return min(open_, key=lambda f: f.floor_bytes) if open_ else found[0]
