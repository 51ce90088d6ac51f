"""Levers and recomputing chosen together: a recorded step is planned with each set of levers, and the fastest is taken."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from lowtide.allowed import LEVERS, SLICES, UPDATE
from lowtide.errors import GraphError
from lowtide.explain import Step
from lowtide.levers import levers_of, with_levers
from lowtide.pebble.graph import Graph
from lowtide.pebble.schedule import Act, Move, Row
from lowtide.pebble.solve import Answer, Solver

_ALL_SETS: Final = 3
"""Levers up to which every set of them is planned; with more, each alone and all together."""
_TELLING: Final = 1e-3
"""Share of the step's seconds that another lever must save: it changes what runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A step with a set of levers, and its plan.

    Attributes:
        names: of the levers, in the order of :data:`lowtide.allowed.LEVERS`.
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
    step: Step,
    plain: Planned,
    *,
    prepared: Callable[[Graph], Graph],
    answered: Callable[[Solver, tuple[str, ...], float, list[Row]], Answer] | None,
) -> list[Planned]:
    """The step with every set of levers that would change it.

    Args:
        step: recorded.
        plain: its plan without levers.
        prepared: what is done to a graph before it is planned (a second board, rounding).
        answered: the plan of a solver, with these levers, in this share of the time, begun from these rows; None where no
            budget is asked. The shares of all sets are 1 together.
    """
    sets = sets_of(levers_of(step))[1:]
    base, order = plain.solver.graph.base_seconds, plain.solver.order
    found = [plain]
    for names in sets:
        solver = Solver(prepared(with_levers(step, names)), order=order)
        fewer = [f.answer for f in found if set(f.names) < set(names) and f.answer is not None and f.answer.status.has_plan]
        rows = [row for answer in fewer if (row := carried(solver, answer)) is not None]
        answer = None if answered is None else answered(solver, names, 1.0 / len(sets), rows)
        found.append(Planned(names=names, solver=solver, answer=answer, own_seconds=solver.graph.base_seconds - base))
    return found[1:]


def carried(solver: Solver, answer: Answer) -> Row | None:
    """A plan for the step with fewer levers, its first runs in the order that they have with these.

    None where that breaks a rule. What comes back before an operator's first run comes back before it still.
    """
    index = {n.id: v for v, n in enumerate(solver.graph.nodes)}
    before: dict[int, list[Move]] = {}
    waiting: list[Move] = []
    for act, node in answer.row:
        v = index.get(answer.graph.nodes[node].id)
        if v is None:  # what the step before left, which these levers do away with
            continue
        waiting.append(Move(act, v))
        if act is Act.COMPUTE and v not in before:
            before[v], waiting = waiting, []
    moved = (*itertools.chain.from_iterable(before.get(move.node, [move]) for move in solver.row), *waiting)
    try:
        solver.follow(moved, None)
    except GraphError:  # an update would come before the last reader of what it overwrites
        return None
    return moved


def best(found: Sequence[Planned], allowed: Collection[str]) -> Planned:
    """The fastest of the sets that are allowed; where another lever saves next to nothing, the smaller set.

    Where none holds the budget, the first, which has no levers.
    """
    chosen = found[0]
    for other in found[1:]:
        if not set(other.names) <= set(allowed) or other.extra_seconds is None:
            continue
        least = _TELLING * found[0].solver.graph.base_seconds
        if chosen.extra_seconds is None or other.extra_seconds < chosen.extra_seconds - least:
            chosen = other
    return chosen
