"""Decisions from the program of what must be on the board at a few instants; its value is a bound on extra time.

The unit is laid out as a graph (operators and needs as nodes, values with the lives that the script gives them), on which any
operator that may run again can run at any time: more than the runtime does, so what the program proves holds for the runtime
too. What the program leaves absent becomes decisions, which the judge of units plays; an event at which they cross the budget
joins the program, and greed mends what is left.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from lowtide.base.trace import Op
from lowtide.planning.bounds import peak_bounds, time_bounds, windows
from lowtide.planning.bounds.precedence import Precedence
from lowtide.planning.bounds.time_bounds import TimeBound
from lowtide.planning.graph import Graph, Node, Offload
from lowtide.planning.graph_arrays import Game, game_of
from lowtide.planning.unit.greedy import State, lowered
from lowtide.planning.unit.problem import Action, Away, Key, Problem
from lowtide.planning.unit.simulate import play

_INSTANTS = 6
"""Instants at most that a program looks at."""
_JOINING = 2
"""Events that join it at once, at most."""
_APART = 40
"""They are this fraction of the unit apart."""
_STEP = 0.6
"""Share of what is left of its time that one program may take."""
_GAP = 2e-3
"""Relative gap at which it may stop."""
_LATEST = 60
"""Moves of greed at most that mend a program's answer."""
_SMALL = 2048
"""Bytes below which a value is not worth a decision."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A unit as a game.

    Attributes:
        graph: nodes are ``event 3``, for an event, and ``value 7``, for a value that counts.
        game: operators are the unit's events, behind those that place what was there before.
        first: operator of event 0.
        values: per value of the unit its value in the game; -1 for what does not count.
    """

    graph: Graph
    game: Game
    first: int
    values: tuple[int, ...]


def layout(problem: Problem) -> Layout:
    """The graph of a unit, in its fixed order."""
    trace, events = problem.trace, problem.trace.events
    count = len(events)
    sources = [v for v, b in enumerate(trace.buffers) if b.counted and b.born < 0]
    plan: list[tuple[str, int]] = [("v", v) for v in sources]
    made: list[list[int]] = [[] for _ in events]
    for v, buffer in enumerate(trace.buffers):
        if buffer.counted and buffer.born >= 0:
            made[buffer.born].append(v)
    for e in range(count):
        plan.append(("e", e))
        plan += [("v", v) for v in made[e]]
    ids: dict[tuple[str, int], int] = {key: i for i, key in enumerate(plan)}
    reads: list[dict[int, None]] = [{} for _ in events]
    for e, event in enumerate(events):
        if isinstance(event, Op):
            for r in event.reads:
                # what else an operator reads came to it from a need, whose pin says so below
                if trace.buffers[r].counted and e <= trace.buffers[r].held_until:
                    reads[e][r] = None
    for v, needs in enumerate(problem.needs):
        if trace.buffers[v].counted:
            for e, pin in needs:
                for at in range(e, min(pin, count - 1) + 1):
                    reads[at][v] = None
    olds = {new: old for event in events if isinstance(event, Op) for old, new in event.overwrites}

    def takes_over(value: int) -> bool:
        """Whether a value is made in the very bytes of the one that it overwrites."""
        old, buffer = olds.get(value), trace.buffers[value]
        return (
            old is not None and buffer.born >= 0 and trace.buffers[old].counted and trace.buffers[old].bytes == buffer.bytes
        )

    other = np.asarray(trace.other_bytes, dtype=np.int64)
    lowest = int(other.min(initial=0))
    nodes: list[Node] = []
    for kind, i in plan:
        if kind == "e":
            event = events[i]
            fresh = sum(trace.buffers[v].bytes for v in made[i] if not takes_over(v))
            own = event if isinstance(event, Op) else None
            nodes.append(
                Node(
                    id=f"event {i}",
                    bytes=0,
                    seconds=own.seconds if own is not None else 0.0,
                    parents=tuple(ids["v", r] for r in reads[i]),
                    workspace_bytes=max(0, int(problem.rise[i]) - fresh) + int(other[i]) - lowest,
                    recompute=bool(made[i]) and any(problem.remakeable[v] for v in made[i]),
                )
            )
            continue
        buffer = trace.buffers[i]
        held = min(buffer.held_until, count - 1)
        nodes.append(
            Node(
                id=f"value {i}",
                bytes=buffer.bytes,
                seconds=0.0,
                made_with=ids["e", buffer.born] if buffer.born >= 0 else None,
                overwrites=ids["v", olds[i]] if takes_over(i) else None,
                recompute=buffer.born >= 0,
                move=problem.can_move(i) and buffer.released >= 0,
                keep=buffer.held_until >= count,
                held_until=ids["e", held] if held > buffer.born and held >= 0 else None,
            )
        )
    offload = None
    if problem.bandwidth is not None:
        offload = Offload(write_bytes_per_second=problem.bandwidth.write, read_bytes_per_second=problem.bandwidth.read)
    base = Node(id="base", bytes=max(0, problem.base_bytes + lowest), seconds=0.0, resident=True)
    nodes.append(base)
    graph = Graph(nodes=tuple(nodes), order=tuple(range(len(nodes))), offload=offload)
    game = game_of(graph)
    of_node = {node: i for i, node in enumerate(game.value_nodes)}
    seconds = game.seconds.copy()
    if problem.bandwidth is not None:
        for i in range(len(game.value_nodes)):
            fetch = int(game.fetcher[i])
            if fetch >= 0:
                seconds[fetch] = problem.bandwidth.read_seconds(int(game.bytes[i]))
    values = tuple(of_node[ids["v", v]] if ("v", v) in ids else -1 for v in range(len(trace.buffers)))
    return Layout(graph=graph, game=replace(game, seconds=seconds), first=len(sources), values=values)


class Relaxed:
    """One unit, asked for several budgets."""

    def __init__(self, problem: Problem) -> None:
        """Lay the unit out."""
        self.problem = problem
        self.layout = layout(problem)
        self.precedence = Precedence(self.layout.game, fixed=True)
        self.instants = peak_bounds.looked_at(self.layout.game, self.precedence)
        self.back = {i: v for v, i in enumerate(self.layout.values) if i >= 0}

    def at(self, budget_bytes: int, *, seconds: float) -> tuple[list[State], TimeBound]:
        """Decisions that hold a budget, or come near, and the bound; the states are played by the judge of units."""
        deadline = time.perf_counter() + seconds
        best = time_bounds.NOTHING
        states: list[State] = []
        for found in self._programs(budget_bytes, deadline, states):
            if found.seconds > best.seconds:
                best = found
        near = min(states, key=lambda s: (max(budget_bytes, s.timeline.peak_bytes), s.timeline.extra_seconds), default=None)
        if near is not None and near.timeline.peak_bytes > budget_bytes:
            states += lowered(self.problem, near, budget_bytes, moves=_LATEST, deadline=deadline)
        return states, best

    def _programs(self, budget: int, deadline: float, states: list[State]) -> Iterator[TimeBound]:
        game = self.layout.game
        left = deadline - time.perf_counter()
        found = time_bounds.one_instant(game, self.precedence, self.instants, budget, seconds=_STEP * left)
        yield found
        ops = {game.nodes.index(v) for v in found.nodes}
        while found.absent:
            state = self._state(found)
            states.append(state)
            crossed = self._crossed(state, budget, ops)
            left = deadline - time.perf_counter()
            if not crossed or left <= 0 or len(ops) >= _INSTANTS:
                return
            ops.update(crossed)
            at = [self.precedence.instant(o) for o in sorted(ops)]
            found = windows.chain_seconds(game, self.precedence, at, budget, seconds=_STEP * left, gap=_GAP)
            yield found

    def _state(self, found: TimeBound) -> State:
        """What a program leaves absent, as decisions."""
        problem, first = self.problem, self.layout.first
        decisions: dict[Key, Away] = {}
        for o in sorted(found.absent):
            event = o - first
            for i in found.absent[o]:
                v = self.back.get(i)
                if v is None or problem.trace.buffers[v].bytes < _SMALL:
                    continue
                away = self._away(v, event, moved=i in found.fetched)
                if away is not None:
                    decisions[away[0]] = away[1]
        lone = [k for k, a in decisions.items() if a.action is Action.MOVE and k[1] > problem.gap_starts[k[0]]]
        for key in lone:
            first_key = (key[0], problem.gap_starts[key[0]])
            if first_key not in decisions or decisions[first_key].action is not Action.MOVE:
                del decisions[key]
        return State(decisions, play(problem, decisions))

    def _away(self, v: int, event: int, *, moved: bool) -> tuple[Key, Away] | None:
        """The decision that has a value away at an event, where one can."""
        problem, buffer = self.problem, self.problem.trace.buffers[v]
        needs = problem.needs[v]
        gap = sum(1 for e, _ in needs if e < event)
        pinned = bool(gap) and needs[gap - 1][1] >= event
        there = buffer.released >= event and buffer.born < event and buffer.held_until < event
        if buffer.released < 0 or v in problem.pinned or pinned or not there or gap < problem.gap_starts[v]:
            return None
        if moved and problem.can_move(v):
            return (v, gap), Away(Action.MOVE, event + 1)
        if problem.remakeable[v]:
            return (v, gap), Away(Action.RECOMPUTE, event + 1)
        return None

    def _crossed(self, state: State, budget: int, known: set[int]) -> list[int]:
        """Operators of the events at which a state stands highest above the budget, apart from each other."""
        high = state.timeline.peak_bytes_at
        apart = len(high) // _APART
        found: list[int] = []
        for event in np.argsort(-high)[: int((high > budget).sum())]:
            o = int(event) + self.layout.first
            if o not in known and not any(abs(o - other) <= apart for other in found):
                found.append(o)
            if len(found) == _JOINING:
                break
        return found
