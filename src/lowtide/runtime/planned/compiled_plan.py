"""Compiles a plan for one recorded unit: its operators in order, which leave records, and which values leave when."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final

from lowtide.base.trace import Op, Trace
from lowtide.planning.unit.prefetch import fetches_ahead
from lowtide.planning.unit.problem import Action, Problem
from lowtide.planning.unit.state import State
from lowtide.runtime import gate
from lowtide.runtime.planned.detour import Places, places_of
from lowtide.runtime.storage.op_schema import info_of

SIGNIFICANT: Final = 32
"""An operator is significant if it makes at least this part of what the largest one makes."""


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """What to do at one operator of a planned unit. Values are ids in the unit's trace.

    Attributes:
        recorded: whether it leaves a :class:`Record` for replay.
        outs: tracked values that it makes, as (slot among its fresh storages, value, bytes).
        overwrites: (old value, new value) per argument that it writes in place, in order; -1 for a value that is not tracked.
        weak: input values that its record refers to without holding their bytes.
        moves: values to offload before it runs.
    """

    recorded: bool
    outs: tuple[tuple[int, int, int], ...]
    overwrites: tuple[tuple[int, int], ...]
    weak: frozenset[int]
    moves: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CompiledPlan:
    """A plan compiled for one recorded unit. Values are ids in its trace, operators are indices into ``funcs``.

    Attributes:
        funcs: operators of the forward parts (and of backwards that build a graph) in order; the last item is None.
        seconds: per operator, its recorded seconds.
        acts: per operator, what to do there; None for nothing.
        packs: per saved tensor, the value, if the plan evicts it at some time; otherwise -1.
        packs_before: per operator, how often the pack hook was called before it ran.
        places: where the plan's operators stand (:func:`~lowtide.runtime.planned.detour.places_of`).
        held: values to hold once autograd saves them, because they are evicted later or offloaded.
        elders: values that are overwritten in place after autograd saved them, and whose last version the plan evicts.
        holds: per (value, need), the values remade along the way that stay resident.
        stays: (value, need) after which the value itself stays resident.
        ahead: per (value, need), the values whose fetches start after it.
        backwards: per backward, the number of operators before it, and the live bytes above the base at its start.
        rises: per backward, how far memory rises from there to the highest point of the rest of the unit.
        last_moves: values to offload just before the first backward that is not followed.
        last_use: per tracked value, the last operator at which it is looked up.
        writes: per operator, whether its schema says that it writes in place.
        weighed: per operator, the bytes of its fresh storages; 0 for one that makes too few to matter.
        significant_bytes: what an operator makes below that matters little for the unit's peak.
        again: per operator, whether it can be retried: it writes nothing in place, draws no random numbers, and no other rank
            waits for it.
        gate_script: what a gate must know of all this; None where there is no gate.
    """

    funcs: tuple[Any, ...]
    seconds: tuple[float, ...]
    acts: tuple[PlannedStep | None, ...]
    packs: tuple[int, ...]
    packs_before: tuple[int, ...]
    places: Places
    held: frozenset[int]
    elders: frozenset[int]
    holds: Mapping[tuple[int, int], frozenset[int]]
    stays: frozenset[tuple[int, int]]
    ahead: Mapping[tuple[int, int], tuple[int, ...]]
    backwards: tuple[tuple[int, int], ...]
    rises: tuple[int, ...]
    last_moves: tuple[int, ...]
    last_use: Mapping[int, int]
    writes: tuple[bool, ...]
    weighed: tuple[int, ...]
    significant_bytes: int
    again: tuple[bool, ...]
    gate_script: Any


def compile_script(
    problem: Problem, state: State, funcs: list[tuple[int, Any]], packs: list[tuple[int, int]], backward_starts: list[int],
    *, overlaps: bool,
) -> CompiledPlan:
    """Compile a solution for the unit that was solved.

    Args:
        problem: the problem that was solved.
        state: its solution.
        funcs: recorded operators that a plan follows, as (event, operator).
        packs: per call of the pack hook, the event before which it was called, and the saved value, or -1.
        backward_starts: events at which a backward began.
        overlaps: whether the offload tier copies while the device computes.
    """
    trace, timeline = problem.trace, state.timeline
    away = {v for v, _ in state.decisions}
    made_again = {v for e in timeline.recorded for v in _made(trace.events[e])}
    elders = {v for v in problem.heirs if _last_heir(problem, v) in away}
    ours = away | elders | (made_again - timeline.captured)
    moves: dict[int, list[int]] = {}
    ordinal_of: dict[int, int] = {}
    forward: list[tuple[int, Any]] = []
    seconds: list[float] = []
    for e, func in funcs:
        op = trace.events[e]
        assert isinstance(op, Op)
        ordinal_of[e] = len(forward)
        forward.append((e, func))
        seconds.append(op.seconds)
    last_moves = []
    for (v, gap), a in state.decisions.items():
        if a.action is Action.MOVE and gap == problem.gap_starts[v]:
            leaves = trace.buffers[v].held_until + 1
            at = next((ordinal_of[e] for e in range(leaves, trace.backward_event) if e in ordinal_of), None)
            if at is None:
                last_moves.append(v)
            else:
                moves.setdefault(at, []).append(v)
    acts = [_act(problem, state, e, i, ours, moves) for i, (e, _) in enumerate(forward)]
    counts = [sum(1 for e, _ in forward if e < start) for start in backward_starts]
    lives = [int(timeline.live_bytes[start]) - problem.base_bytes if start < len(trace.events) else 0
             for start in backward_starts]
    rises = [int(timeline.peak_bytes_at[start:].max() - timeline.live_bytes[start]) if start < len(trace.events) else 0
             for start in backward_starts]
    held = frozenset(v for v in away if (v, problem.gap_starts[v]) not in state.decisions
                     or state.decisions[v, problem.gap_starts[v]].action is Action.MOVE)
    writes = [bool(info_of(f).writes_at) for _, f in forward]
    again = [not (info.mutates or info.collective or info.seeded) for info in (info_of(f) for _, f in forward)]
    alone = [act is None and not written for act, written in zip(acts, writes, strict=True)]
    made = [_bytes_made(trace, e) for e, _ in forward]
    significant = max(made, default=0) // SIGNIFICANT + 1
    weighed = [size if size >= significant else 0 for size in made]
    return CompiledPlan(
        funcs=(*(f for _, f in forward), None),
        seconds=tuple(seconds),
        acts=(*acts, None),
        packs=tuple(v if v in away or v in elders else -1 for _, v in packs),
        packs_before=(*(bisect_right(packs, e, key=itemgetter(0)) for e, _ in forward), len(packs)),
        places=places_of([func for _, func in forward]),
        held=held | {v for v in elders if _last_heir(problem, v) in held},
        elders=frozenset(elders),
        holds={(r.value, r.need): r.held for r in timeline.remakes},
        stays=timeline.stays,
        ahead=fetches_ahead(problem, timeline) if overlaps else {},
        backwards=tuple(zip(counts, lives, strict=True)),
        rises=tuple(rises),
        last_moves=tuple(last_moves),
        last_use=_last_uses(acts, [(s.value, bisect_right(forward, s.event, key=itemgetter(0))) for s in trace.saves]),
        writes=(*writes, False),
        weighed=(*weighed, 0),
        significant_bytes=significant,
        again=(*again, False),
        gate_script=gate.script_of([func for _, func in forward], alone, again, weighed),
    )


def _last_heir(problem: Problem, value: int) -> int:
    while value in problem.heirs:
        value = problem.heirs[value]
    return value


def _bytes_made(trace: Trace, event: int) -> int:
    op = trace.events[event]
    assert isinstance(op, Op)
    return sum(trace.buffers[v].bytes for v in op.writes)


def _last_uses(acts: Sequence[PlannedStep | None], saves: Iterable[tuple[int, int]]) -> dict[int, int]:
    found = dict(saves)
    for i, act in enumerate(acts):
        for v in () if act is None else (*(v for _, v, _ in act.outs), *(v for pair in act.overwrites for v in pair),
                                         *act.weak, *act.moves):
            found[v] = max(found.get(v, 0), i)
    return found


def _made(op: Any) -> tuple[int, ...]:
    return (*op.writes, *(new for _, new in op.overwrites))


def _act(
    problem: Problem, state: State, event: int, ordinal: int, ours: set[int], moves: Mapping[int, list[int]]
) -> PlannedStep | None:
    op = problem.trace.events[event]
    assert isinstance(op, Op)
    recorded = event in state.timeline.recorded
    outs = tuple((s, v, problem.trace.buffers[v].bytes) for s, v in enumerate(op.writes) if v in ours)
    overwrites = tuple((old if old in ours else -1, new if new in ours else -1) for old, new in op.overwrites)
    if not recorded and not outs and all(o == n == -1 for o, n in overwrites) and ordinal not in moves:
        return None
    weak = frozenset(r for r in op.reads if r in ours) if recorded else frozenset()
    weak |= frozenset(o for o, _ in overwrites if o >= 0)
    return PlannedStep(recorded, outs, overwrites, weak, tuple(moves.get(ordinal, ())))
