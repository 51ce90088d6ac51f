"""Random small units of training, and random decisions on them.

A unit is a chain of forward operators over a parameter (value 0) and an input (value 1), some values saved, some
overwritten in place; then a backward that asks for the saved values in roughly reverse order, with operators between, and
may overwrite the parameter half-way, as an optimizer does whose updates run within the backward.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st

from lowtide.planning.unit.problem import Action, Away, Bandwidth, Key, Problem
from lowtide.base.trace import Buffer, Need, Op, Phase, Save, Site, Trace

MOST_FORWARD_OPS = 6
BASE_BYTES = 1000


@dataclass
class _Draft:
    """A value while its unit is being drawn."""

    bytes: int
    born: int
    slot: int = 0
    held_until: int = 0
    released: int = -1
    counted: bool = True
    movable: bool = True
    overwritten: bool = False
    saved: int = 0


@dataclass
class _Unit:
    """A unit while it is being drawn."""

    draw: st.DrawFn
    values: list[_Draft] = field(default_factory=list)
    events: list[Op | Need] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)

    def new(self, size: int, slot: int) -> int:
        """A value that the operator about to be added makes."""
        born = len(self.events)
        self.values.append(_Draft(size, born, slot, held_until=born))
        return len(self.values) - 1

    def op(self, phase: Phase, reads: list[int], writes: list[int], pair: tuple[int, int] | None = None) -> None:
        """Add an operator; whatever it reads, something holds or autograd has until then."""
        e = len(self.events)
        for r in reads:
            if self.values[r].released < e:
                self.values[r].held_until = max(self.values[r].held_until, e)
        fresh = sum(self.values[w].bytes for w in writes)
        op = Op(
            site=Site("net", f"op{e}", 0),
            phase=phase,
            seconds=float(self.draw(st.integers(1, 8))),
            inside_bytes=fresh + self.draw(st.sampled_from([0, 0, 5, 40])),
            reads=tuple(dict.fromkeys(reads)),
            writes=tuple(writes),
            overwrites=() if pair is None else (pair,),
            replayable=self.draw(st.integers(0, 7)) > 0,
        )
        self.events.append(op)

    def readable(self) -> list[int]:
        """Values whose bits are still there to be read."""
        return [v for v, d in enumerate(self.values) if not d.overwritten]


def _sizes() -> st.SearchStrategy[int]:
    return st.integers(1, 60)


def _forward(unit: _Unit) -> None:
    draw = unit.draw
    for _ in range(draw(st.integers(1, MOST_FORWARD_OPS))):
        readable = unit.readable()
        recent = draw(st.sampled_from(readable[-2:]))
        reads = [recent, *draw(st.lists(st.sampled_from(readable), max_size=2))]
        unsaved = [v for v in readable if v > 1 and not unit.values[v].saved]
        if unsaved and draw(st.integers(0, 3)) == 0:
            _overwrite(unit, draw(st.sampled_from(unsaved)), reads)
        else:
            made = [unit.new(draw(_sizes()), slot) for slot in range(draw(st.sampled_from([1, 1, 1, 2])))]
            unit.op(Phase.FORWARD, reads, made)
        for v in unit.readable()[1:]:
            if unit.values[v].saved < 2 and draw(st.integers(0, 2)) == 0:
                unit.values[v].saved += 1
                unit.saves.append(Save(value=v, event=len(unit.events) - 1))


def _overwrite(unit: _Unit, old: int, reads: list[int], phase: Phase = Phase.FORWARD) -> None:
    new = unit.new(unit.values[old].bytes, 0)
    unit.values[new].counted = unit.values[old].counted
    unit.values[old].overwritten = True
    unit.values[old].held_until = len(unit.events)
    unit.op(phase, [*reads, old], [], (old, new))
    unit.values[old].held_until = len(unit.events) - 1


def _asked(unit: _Unit) -> list[int]:
    """What backward asks for, in order: roughly reversed, some of it never."""
    draw = unit.draw
    order = [s.value for s in reversed(unit.saves)]
    for i in range(len(order) - 1):
        if draw(st.integers(0, 4)) == 0:
            order[i], order[i + 1] = order[i + 1], order[i]
    return [v for v in order if draw(st.integers(0, 7)) > 0]


def _backward(unit: _Unit) -> None:
    draw = unit.draw
    gradient: int | None = None
    needs: list[tuple[int, int, int]] = []
    asked = _asked(unit)
    updated = draw(st.integers(0, 2 * len(asked)))
    for i, v in enumerate(asked):
        if i == updated:
            _overwrite(unit, 0, [] if gradient is None else [gradient], Phase.BACKWARD)
        e = len(unit.events)
        unit.events.append(Need(value=v, pinned_until=e))
        for _ in range(draw(st.integers(0, 2))):
            reads = [v] if gradient is None else [v, gradient]
            unit.values[v].released = max(unit.values[v].released, len(unit.events))
            made = unit.new(draw(_sizes()), 0)
            unit.op(Phase.BACKWARD, reads, [made])
            gradient = made
        needs.append((v, e, len(unit.events) - 1))
    for v, e, last in needs:
        pin = min(len(unit.events), last + draw(st.sampled_from([0, 0, 1])))
        unit.events[e] = Need(value=v, pinned_until=pin)
        unit.values[v].released = max(unit.values[v].released, pin, e)


def _lifetimes(unit: _Unit, backward: int) -> None:
    """What the script holds longer than it must, and what autograd keeps longer than it asks for."""
    draw, end = unit.draw, len(unit.events)
    for d in unit.values[1:]:
        if d.saved and d.released < 0:
            d.released = draw(st.integers(min(backward, end), end))
        elif d.saved and draw(st.integers(0, 3)) == 0:
            d.released = draw(st.integers(d.released, end))
        if not d.overwritten and draw(st.integers(0, 3)) == 0:
            d.held_until = draw(st.integers(d.held_until, end))
        d.movable = d.counted and draw(st.booleans())


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """A unit whose lifetimes agree with its events."""
    unit = _Unit(draw)
    unit.values = [
        _Draft(50, -1, counted=False, movable=False),
        _Draft(draw(_sizes()), -1, held_until=-1, counted=False, movable=False),
    ]
    _forward(unit)
    backward = len(unit.events)
    _backward(unit)
    for v in (0, 1):
        if not unit.values[v].overwritten:
            unit.values[v].held_until = len(unit.events)
    _lifetimes(unit, backward)
    return Trace(
        base_bytes=BASE_BYTES,
        resident_bytes=BASE_BYTES // 2,
        events=tuple(unit.events),
        buffers=tuple(
            Buffer(
                bytes=d.bytes,
                born=d.born,
                slot=d.slot,
                held_until=d.held_until,
                released=d.released,
                counted=d.counted,
                movable=d.movable,
            )
            for d in unit.values
        ),
        saves=tuple(unit.saves),
        other_bytes=(0,) * len(unit.events),
        spike_bytes=(0,) * len(unit.events),
        backward_event=backward,
    )


@st.composite
def problems(draw: st.DrawFn, *, moving: bool = True) -> Problem:
    """A unit, with or without a second board."""
    bandwidth = draw(st.sampled_from([None, Bandwidth(write=4.0, read=8.0, read_fresh=2.0)])) if moving else None
    replay, fetch = draw(st.sampled_from([(0.0, 0.0), (0.5, 3.0), (4.0, 0.5)]))
    return Problem(
        trace=draw(traces()), base_bytes=BASE_BYTES, bandwidth=bandwidth, replay_seconds=replay, fetch_seconds=fetch
    )


def chain(depth: int) -> Problem:
    """The same unit each time: ``depth`` saved values, each made from the one before, all asked for in reverse order."""
    made, needed = range(depth), range(depth, 2 * depth)
    forward = [
        Op(
            site=Site("net", f"op{e}", 0),
            phase=Phase.FORWARD,
            seconds=1.0,
            inside_bytes=10,
            reads=(e - 1,) if e else (),
            writes=(e,),
        )
        for e in made
    ]
    backward = [Need(value=v, pinned_until=e) for e, v in zip(needed, reversed(made), strict=True)]
    buffers = [
        Buffer(bytes=10, born=v, slot=0, held_until=v + 1, released=2 * depth - 1 - v, counted=True, movable=False) for v in made
    ]
    trace = Trace(
        base_bytes=BASE_BYTES,
        resident_bytes=BASE_BYTES // 2,
        events=(*forward, *backward),
        buffers=tuple(buffers),
        saves=tuple(Save(value=v, event=v) for v in made),
        other_bytes=(0,) * (2 * depth),
        spike_bytes=(0,) * (2 * depth),
        backward_event=depth,
    )
    return Problem(trace=trace, base_bytes=BASE_BYTES)


def _choices(problem: Problem) -> list[Key]:
    """Every (value, gap) in which a value may be away and recomputed later."""
    return [
        (v, gap)
        for v, buffer in enumerate(problem.trace.buffers)
        if buffer.released >= 0 and buffer.counted and problem.remakeable[v]
        for gap in range(problem.gap_starts[v], len(problem.needs[v]) + 1)
    ]


@st.composite
def plans(draw: st.DrawFn, *, moving: bool = True) -> tuple[Problem, dict[Key, Away]]:
    """A problem, and decisions on it that keep the rules."""
    problem = draw(problems(moving=moving))
    decisions: dict[Key, Away] = {}
    events = len(problem.trace.events)
    for key in _choices(problem):
        if draw(st.integers(0, 2)):
            decisions[key] = Away(Action.RECOMPUTE, draw(st.integers(0, events)))
    for v in range(len(problem.trace.buffers)):
        saved = problem.trace.buffers[v].released >= 0
        if saved and problem.can_move(v) and draw(st.booleans()):
            for gap in range(problem.gap_starts[v], len(problem.needs[v]) + 1):
                first = gap == problem.gap_starts[v]
                decisions.pop((v, gap), None)
                if first or draw(st.booleans()):
                    decisions[v, gap] = Away(Action.MOVE, draw(st.integers(0, events)))
    return problem, decisions
