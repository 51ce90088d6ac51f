"""Levers and recomputing chosen together: a recorded step is planned with each set of levers, and the fastest is taken."""

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
"""Levers up to which every set of them is planned; with more, each alone and all together."""
_TOLD_ONLY: Final = 0.25
"""Share of the time of a set that may be chosen which one has that is only told of."""
_TELLING: Final = 1e-3
"""Share of the step's seconds that another lever must save: it changes what runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A step with a set of levers, and its plan.

    Attributes:
        names: of the levers, in the order of :data:`lowtide.base.lever_catalogue.LEVERS`.
        solver: of its graph.
        answer: its plan; None where no budget was asked.
        own_seconds: that the levers add themselves, whatever the plan.
    """

    names: tuple[str, ...]
    solver: Solver
    answer: Answer | None
    own_seconds: float

    @property
    def peak_bytes(self) -> int:
        """Without a plan."""
        return self.solver.given.peak_bytes

    @property
    def exact(self) -> bool:
        """Whether the bits stay those of the plain run."""
        return all(LEVERS[name].exact for name in self.names)

    @property
    def floor_bytes(self) -> int:
        """No plan with these levers goes below, as far as is proven."""
        return self.solver.told_floor.bytes

    @property
    def extra_seconds(self) -> float | None:
        """Above the recorded step, the levers' own among them; None where the budget is not held."""
        if self.answer is None or not self.answer.status.has_plan:
            return None
        return self.answer.extra_seconds + self.own_seconds


def sets_of(names: Sequence[str]) -> list[tuple[str, ...]]:
    """The sets of levers to be planned, the empty one first, small ones before large ones.

    An update in the backward is of one parameter: slices of it would change nothing.
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
    """The step with every set of levers that would change it.

    Args:
        step: recorded.
        plain: its plan without levers.
        prepared: what is done to a graph before it is planned (a second board, rounding).
        answered: the plan of a solver, with these levers, in this share of the time, begun from these rows; None where no
            budget is asked. The shares of all sets are 1 together.
        allowed: levers of sets that get the greater part of the time, where there are any.
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
    """A plan for the step with fewer levers, for the step with more of them; None where that breaks a rule.

    In free order as it was, or else its first runs in the solver's order: what comes back before an operator's first run comes
    back before it still.
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
        except (GraphError, StructureError):  # an update before the last reader of what it overwrites, a value that is held
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
    """With the parts of operators that the plan has whole right behind the first part's first run."""
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
    """The fastest of the sets that are allowed; where another lever saves next to nothing, the smaller set.

    Where none holds the budget, the one of which it is not proven that it cannot, with the lowest floor; else the first.
    """
    least = _TELLING * found[0].solver.graph.base_seconds
    permitted = [f for f in found if set(f.names) <= set(allowed)]
    timed = [(f.extra_seconds, f) for f in permitted if f.extra_seconds is not None]
    if timed:
        fastest = min(seconds for seconds, _ in timed)
        return next(f for seconds, f in timed if seconds <= fastest + least)
    open_ = [f for f in permitted if f.answer is not None and f.answer.status is Status.UNKNOWN]
    return min(open_, key=lambda f: f.floor_bytes) if open_ else found[0]
