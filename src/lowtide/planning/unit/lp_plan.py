"""Plans a unit with the integer program of a few instants, whose value is also a lower bound on extra time.

The unit is laid out as a graph: operators and needs are nodes, and values have the lives that the script gives them. On this
graph any operator that may run again can run at any time. The runtime does less, so the program's bound holds for the runtime,
too. Values that the program leaves absent become decisions, which ``simulate`` plays. Events at which they exceed the budget
are added to the program, and greedy moves mend the rest.
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
from lowtide.planning.unit.greedy import lowered
from lowtide.planning.unit.problem import Action, Away, Key, Problem
from lowtide.planning.unit.state import State

_INSTANTS = 6
"""No instants are added to a program that has this many."""
_JOINING = 2
"""Largest number of events added to a program at once."""
_APART = 40
"""Events that are added together are more than 1/40 of the unit's events apart."""
_STEP = 0.6
"""Share of the time left that one program may take."""
_GAP = 2e-3
"""Relative gap within which a program's solver may stop."""
_LATEST = 60
"""Largest number of greedy moves that mend a program's answer."""
_SMALL = 2048
"""Values of fewer bytes are not worth a decision."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A unit as a game.

    Attributes:
        graph: its nodes are events (``event 3``), counted values (``value 7``) and the resident ``base``.
        game: its operators are the unit's events, preceded by those that place values from before the unit.
        first: the operator of event 0.
        values: per value of the unit, its value in the game; -1 for values that are not counted.
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
                # an operator gets its other inputs from needs, whose pins are added below
                if trace.buffers[r].counted and e <= trace.buffers[r].held_until:
                    reads[e][r] = None
    for v, needs in enumerate(problem.needs):
        if trace.buffers[v].counted:
            for e, pin in needs:
                for at in range(e, min(pin, count - 1) + 1):
                    reads[at][v] = None
    olds = {new: old for event in events if isinstance(event, Op) for old, new in event.overwrites}

    def takes_over(value: int) -> bool:
        """Whether a value takes over the bytes of the value that it overwrites."""
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
                    seconds=problem.again_seconds(own) if own is not None else 0.0,
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
                seconds[fetch] = problem.back_seconds(int(game.bytes[i]))
    values = tuple(of_node[ids["v", v]] if ("v", v) in ids else -1 for v in range(len(trace.buffers)))
    return Layout(graph=graph, game=replace(game, seconds=seconds), first=len(sources), values=values)


class Relaxed:
    """Solves the programs of one unit for several budgets."""

    def __init__(self, problem: Problem) -> None:
        """Lay out the unit as a game."""
        self.problem = problem
        self.layout = layout(problem)
        self.precedence = Precedence(self.layout.game, fixed=True)
        self.instants = peak_bounds.looked_at(self.layout.game, self.precedence)
        self.back = {i: v for v, i in enumerate(self.layout.values) if i >= 0}

    def at(self, budget_bytes: int, *, seconds: float) -> tuple[list[State], TimeBound]:
        """States that hold a budget or come close to it, and the lower bound on extra seconds."""
        deadline = time.perf_counter() + seconds
        best = time_bounds.NOTHING
        states: list[State] = []
        for found in self._programs(budget_bytes, deadline, states):
            if found.seconds > best.seconds:
                best = found
        near = min(states, key=lambda s: (max(budget_bytes, s.peak_bytes), s.extra_seconds), default=None)
        if near is not None and near.peak_bytes > budget_bytes:
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
        """The state of the decisions that follow from the values that a program leaves absent."""
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
        return State.of(problem, decisions)

    def _away(self, v: int, event: int, *, moved: bool) -> tuple[Key, Away] | None:
        """The decision that has a value away at an event; None if it cannot be."""
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
        """Operators of the events at which a state is highest above the budget, spread apart; those in ``known`` left out."""
        high = state.peak_bytes_at
        apart = len(high) // _APART
        found: list[int] = []
        for event in np.argsort(-high)[: int((high > budget).sum())]:
            o = int(event) + self.layout.first
            if o not in known and not any(abs(o - other) <= apart for other in found):
                found.append(o)
            if len(found) == _JOINING:
                break
        return found
