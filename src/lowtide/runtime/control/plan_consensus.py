"""One plan for several ranks: every rank whose unit is the same takes the first rank's decisions."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from lowtide.planning.unit.plan_file import Plan, decisions_of, fingerprint, plan_of
from lowtide.planning.unit.problem import Problem
from lowtide.planning.unit.solve import Solution
from lowtide.planning.unit.state import State


def wanted() -> bool:
    """Whether other ranks take part in this run."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def on_room(mine: int | None) -> int | None:
    """The smallest room, in bytes, that any rank has for a plan; None if no rank has a recording.

    A collective, which every rank must call.
    """
    rooms: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(rooms, mine)
    return min((room for room in rooms if room is not None), default=None)


def on_plan(problem: Problem | None, mine: Solution | None) -> State | None:
    """The first rank's decisions, as they play on this rank's unit; a collective, which every rank must call.

    On a rank whose unit differs, or on which they would not fit, None is returned: it keeps its own decisions.
    """
    plan = plan_of(problem, mine) if problem is not None and mine is not None and mine.state is not None else None
    shared: list[Any] = [plan if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared, src=0)
    theirs: Plan | None = shared[0]
    if theirs is None or problem is None or mine is None or theirs.fingerprint != fingerprint(problem.trace):
        return None
    decisions = decisions_of(problem, theirs)
    state = State.of(problem, decisions)
    return state if state.peak_bytes <= mine.budget_bytes else None
