"""Greedy planning of a unit: repeatedly lowers the peak by recomputing or moving the cheapest bytes.

The walk goes down toward the floor and does not depend on the budget: each of its states is an offer (peak, extra seconds),
and a budget takes the cheapest offer that fits. A smaller budget therefore never gets a faster plan than a larger one. The
state taken for a budget is then made lighter, by undoing decisions that this budget does not need.

The walk considers only seconds, but the inputs of a chain may be larger than its output. If it ends above the budget, it goes
back to its lowest state and takes another way.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from lowtide.base.trace import Op
from lowtide.planning.unit.native import NativeOutcome, PlayError
from lowtide.planning.unit.problem import Action, Away, Key, Problem
from lowtide.planning.unit.state import State

_STEP_SHARE = 0.01
"""Share of (plain peak - base) that one move of the walk frees at its peak at least, if possible."""
_MEND = 0.3
"""Size of the steps that mend an almost fitting plan, as a share of the walk's steps."""
_TRIES = 400
"""The walk ends after this many moves without a new lowest peak."""
_DETOUR = 40
"""Backtracking goes back after this many moves without a new lowest peak."""
_LIGHTENED = 3
"""Number of the cheapest states within a budget whose decisions are tentatively undone."""
_PRUNED = 24
"""Number of decisions that are tried per state; of the best state, all are tried afterwards."""


@dataclass(frozen=True, slots=True)
class _Offer:
    key: Key
    away: Away
    freed: int
    seconds: float


def walk(problem: Problem, *, seconds: float, progress: Callable[[float], None] | None = None) -> tuple[State, ...]:
    """States from the plain run down to the lowest peak found: a Pareto front, highest peak first.

    Args:
        problem: the unit.
        seconds: time limit.
        progress: called with the share of (plain peak - base) by which the peak has been lowered so far.
    """
    deadline = time.perf_counter() + seconds
    state = State.of(problem, {})
    states = [state]
    lowest, idle = state.peak_bytes, 0
    step = _step(problem)
    while idle < _TRIES and time.perf_counter() < deadline:
        following = _move(problem, state, step)
        if following is None:
            break
        state = following
        states.append(state)
        peak = state.peak_bytes
        idle = 0 if peak < lowest else idle + 1
        lowest = min(lowest, peak)
        if progress is not None:
            progress(1 - (lowest - problem.base_bytes) / max(1, problem.plain_peak - problem.base_bytes))
    return pareto(states)


def backtracked(problem: Problem, front: Sequence[State], budget_bytes: int, *, seconds: float) -> list[State]:
    """States of lower peaks than a walk that ended above a budget, found by backtracking.

    The decisions that began a detour without a lower peak are barred from then on.

    Args:
        problem: the unit.
        front: states of the walk, the highest peak first. Once no way is left from a state, the one before it is continued.
        budget_bytes: the search ends at a peak of at most this.
        seconds: time limit.
    """
    deadline = time.perf_counter() + seconds
    stands = list(front)
    found: list[State] = []
    barred: set[Key] = set()
    lowest = stands[-1].peak_bytes
    while stands and lowest > budget_bytes and time.perf_counter() < deadline:
        state, began = stands[-1], frozenset[Key]()
        for _ in range(_DETOUR):
            following = _move(problem, state, _step(problem), barred)
            if following is None or time.perf_counter() > deadline:
                break
            began = began or _decided(state, following)
            state = following
            if state.peak_bytes < lowest:
                lowest = state.peak_bytes
                found.append(state)
                stands.append(state)
                break
        else:
            following = None
        if following is None:
            barred |= began
            if not began:
                stands.pop()
    return found


def _decided(before: State, after: State) -> frozenset[Key]:
    return frozenset(key for key, away in after.decisions.items() if before.decisions.get(key) != away)


def _step(problem: Problem) -> int:
    return int(_STEP_SHARE * max(0, problem.plain_peak - problem.base_bytes)) + 1


def lowered(problem: Problem, state: State, budget_bytes: int, *, moves: int, deadline: float) -> list[State]:
    """States on the way from one above a budget down to one that fits, or as far as ``moves`` greedy moves lead."""
    found: list[State] = []
    step = max(1, int(_STEP_SHARE * _MEND * max(0, problem.plain_peak - problem.base_bytes)))
    while state.peak_bytes > budget_bytes and len(found) < moves and time.perf_counter() < deadline:
        following = _move(problem, state, step)
        if following is None:
            break
        state = following
        found.append(state)
    return found


def pareto(states: list[State] | tuple[State, ...]) -> tuple[State, ...]:
    """The states that no other state beats in both peak and extra seconds, highest peak first."""
    best: list[State] = []
    for state in sorted(states, key=lambda s: (s.peak_bytes, s.extra_seconds)):
        if not best or state.extra_seconds < best[-1].extra_seconds:
            best.append(state)
    return tuple(reversed(best))


def _move(problem: Problem, state: State, step: int, barred: AbstractSet[Key] = frozenset()) -> State | None:
    """The next state: the cheapest bytes leave the peak event until ``step`` bytes are freed; None if none can."""
    if isinstance(state.outcome, NativeOutcome) and state.outcome.unit is problem.native:
        with contextlib.suppress(PlayError):
            outcome = state.outcome.unit.move(state.outcome, step, barred)
            return None if outcome is None else State(problem, outcome)
    event = state.timeline.peak_event
    decisions = dict(state.decisions)
    freed = 0
    offers = (offer for offer in _offers(problem, state, event) if offer.key not in barred)
    for offer in sorted(offers, key=lambda o: o.seconds / o.freed):
        decisions[offer.key] = offer.away
        freed += offer.freed
        if freed >= step:
            break
    if not freed:
        return None
    return State.of(problem, decisions)


def _offers(problem: Problem, state: State, event: int) -> list[_Offer]:
    """All single decisions that free bytes at an event."""
    found = []
    chains = _Chains(problem, state)
    for v, buffer in enumerate(problem.trace.buffers):
        if buffer.released < event or buffer.born >= event or buffer.held_until >= event or not buffer.bytes:
            continue
        if v in problem.pinned or not buffer.counted:
            continue
        needs = problem.needs[v]
        gap = sum(1 for e, _ in needs if e < event)
        if gap and needs[gap - 1][1] >= event:
            continue
        if gap < len(needs) and needs[gap][0] == event:
            continue
        if gap < problem.gap_starts[v] or state.timeline.absent(v, event):
            continue
        offer = _offer(problem, state, chains, v, gap, event)
        if offer is not None:
            found.append(offer)
    return found


def _offer(problem: Problem, state: State, chains: _Chains, v: int, gap: int, event: int) -> _Offer | None:
    buffer, needs = problem.trace.buffers[v], problem.needs[v]
    before = state.decisions.get((v, gap))
    if before is not None and before.until > event:
        return None
    need = needs[gap][0] if gap < len(needs) else None
    prices: list[tuple[float, Action]] = []
    if problem.can_move(v):
        first = state.decisions.get((v, problem.gap_starts[v]))
        out = first is not None and first.action is Action.MOVE
        if out or gap == problem.gap_starts[v]:
            prices.append((0.0 if need is None else problem.move_seconds(v, written=out), Action.MOVE))
    if problem.remakeable[v]:
        limit = prices[0][0] if prices else float("inf")
        prices.append((0.0 if need is None else chains.seconds(v, need, limit), Action.RECOMPUTE))
    if not prices:
        return None
    price, action = min(prices)
    return _Offer((v, gap), Away(action, event + 1), buffer.bytes, price + 1e-9)


class _Chains:
    """Prices the recomputation of values, given what is present in a state."""

    def __init__(self, problem: Problem, state: State) -> None:
        self.problem = problem
        self.state = state

    def seconds(self, v: int, need: int, limit: float) -> float:
        """Seconds of the chain that recomputes a value for a need, without values that are recomputed and held anyway.

        Where they exceed ``limit``, the rest of the chain is left out.
        """
        buffers, events = self.problem.trace.buffers, self.problem.trace.events
        total = 0.0
        ops: set[int] = set()
        stack, seen = [v], {v}
        while stack and total <= limit:
            born = buffers[stack.pop()].born
            if born < 0 or born in ops:
                continue
            ops.add(born)
            op = events[born]
            assert isinstance(op, Op)
            total += self.problem.again_seconds(op)
            for r in op.reads:
                if r not in seen and not self._free(r, need):
                    seen.add(r)
                    stack.append(r)
        return total

    def _free(self, r: int, need: int) -> bool:
        """Whether an input costs the chain nothing: it is present, can be captured, or is recomputed anyway."""
        buffer = self.problem.trace.buffers[r]
        if self.state.timeline.absent(r, need):
            needs = self.problem.needs[r]
            gap = sum(1 for e, _ in needs if e < need)
            away = self.state.decisions.get((r, gap))
            return gap < len(needs) and away is not None and away.until <= need
        if not self.problem.capturable(r):
            return need <= self.problem.overwritten[r]
        return buffer.released >= 0 or not self.problem.remakeable[r] or buffer.held_until >= need


def lightened(problem: Problem, front: Sequence[State], budget_bytes: int, *, seconds: float) -> list[State]:
    """Cheaper states within a budget: undoes decisions that it does not need, the most expensive first.

    Args:
        problem: the unit.
        front: states, of which the cheapest within the budget are tried.
        budget_bytes: the highest peak allowed.
        seconds: time limit.
    """
    deadline = time.perf_counter() + seconds
    fitting = sorted((s for s in front if s.peak_bytes <= budget_bytes), key=lambda s: s.cost)[:_LIGHTENED]
    found = [_lighter(problem, s, budget_bytes, _PRUNED, deadline) for s in fitting]
    if found:
        best = min(found, key=lambda s: s.cost)
        found.append(_lighter(problem, best, budget_bytes, len(best.decisions), deadline))
    return found


def _lighter(problem: Problem, state: State, budget_bytes: int, tries: int, deadline: float) -> State:
    for key in _dearest(state)[:tries]:
        if time.perf_counter() > deadline:
            break
        if key not in state.decisions:
            continue
        decisions = _without(state.decisions, key)
        lighter = State.of(problem, decisions)
        if lighter.peak_bytes <= budget_bytes and lighter.extra_seconds < state.extra_seconds:
            state = lighter
    return state


def _without(decisions: dict[Key, Away], key: Key) -> dict[Key, Away]:
    """The decisions without ``key``. Undoing a move undoes all moves of the value, which must be written in its first gap."""
    moved = key in decisions and decisions[key].action is Action.MOVE
    return {k: a for k, a in decisions.items() if k != key and not (moved and k[0] == key[0] and a.action is Action.MOVE)}


def _dearest(state: State) -> list[Key]:
    """Keys of a state's decisions by the cost of recomputing their values, most expensive first."""
    return sorted(state.decisions, key=lambda key: (-state.spent_seconds(key[0]), key))
