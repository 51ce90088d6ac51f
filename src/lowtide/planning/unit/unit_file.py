"""Unit files: converts a recorded unit and the plans found for it to bytes and back, so that a later run can follow them."""

from __future__ import annotations

import hashlib
from typing import Final, TypeVar

import msgspec

from lowtide.base.trace import Buffer, Need, Op, Phase, Save, Site, Trace
from lowtide.planning.unit.problem import Action, Away, Bandwidth, Problem
from lowtide.planning.unit.solve import Front

_CHECKSUM_BYTES: Final = hashlib.sha256().digest_size
_PHASES: Final = tuple(Phase)
_T = TypeVar("_T")


class OpRow(msgspec.Struct, frozen=True, array_like=True, tag="op"):
    """An operator of the unit; module and operator are indices into :attr:`SolvedUnit.words`, the phase one into ``Phase``."""

    module: int
    op: int
    nth: int
    phase: int
    seconds: float
    inside_bytes: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    overwrites: tuple[tuple[int, int], ...]
    replayable: bool


class NeedRow(msgspec.Struct, frozen=True, array_like=True, tag="need"):
    """A need of the unit."""

    value: int
    pinned_until: int


class BufferRow(msgspec.Struct, frozen=True, array_like=True):
    """A value of the unit."""

    bytes: int
    born: int
    slot: int
    held_until: int
    released: int
    counted: bool
    movable: bool


class SolvedUnit(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded unit and the plans found for it.

    Attributes:
        words: names of modules and operators.
        base_bytes, resident_bytes, backward_event, other_bytes, spike_bytes: as in the trace.
        saves: pairs (value, event).
        bandwidth: writing, reading, and reading to fresh memory, in bytes per second; None if nothing may be moved.
        pinned, replay_seconds, fetch_seconds: as in the problem.
        plans: per plan, its decisions as (value, gap, whether the value is moved, until).
        proven: pairs (budget that was searched, lower bound on the extra seconds of its plans).
    """

    words: tuple[str, ...]
    base_bytes: int
    resident_bytes: int
    backward_event: int
    events: tuple[OpRow | NeedRow, ...]
    buffers: tuple[BufferRow, ...]
    saves: tuple[tuple[int, int], ...]
    other_bytes: tuple[int, ...]
    spike_bytes: tuple[int, ...]
    bandwidth: tuple[float, float, float] | None
    pinned: tuple[int, ...]
    replay_seconds: float
    fetch_seconds: float
    plans: tuple[tuple[tuple[int, int, bool, int], ...], ...]
    proven: tuple[tuple[int, float], ...]


def solved_unit(front: Front) -> SolvedUnit:
    """The unit of a front, with a choice of its plans."""
    problem, words = front.problem, _Words()
    trace, speed = problem.trace, problem.bandwidth
    events: list[OpRow | NeedRow] = []
    for e in trace.events:
        if isinstance(e, Need):
            events.append(NeedRow(e.value, e.pinned_until))
            continue
        site = e.site
        events.append(OpRow(
            words.index(site.module), words.index(site.op), site.nth, _PHASES.index(e.phase), e.seconds, e.inside_bytes,
            e.reads, e.writes, e.overwrites, e.replayable,
        ))  # fmt: skip
    kept = front.kept()
    return SolvedUnit(
        words=tuple(words.known),
        base_bytes=problem.base_bytes,
        resident_bytes=trace.resident_bytes,
        backward_event=trace.backward_event,
        events=tuple(events),
        buffers=tuple(
            BufferRow(b.bytes, b.born, b.slot, b.held_until, b.released, b.counted, b.movable) for b in trace.buffers
        ),
        saves=tuple((s.value, s.event) for s in trace.saves),
        other_bytes=trace.other_bytes,
        spike_bytes=trace.spike_bytes,
        bandwidth=None if speed is None else (speed.write, speed.read, speed.read_fresh),
        pinned=tuple(sorted(problem.pinned)),
        replay_seconds=problem.replay_seconds,
        fetch_seconds=problem.fetch_seconds,
        plans=tuple(
            tuple((v, gap, away.action is Action.MOVE, away.until) for (v, gap), away in state.decisions.items())
            for state in kept.states
        ),
        proven=tuple(kept.proven.items()),
    )


def front_of(unit: SolvedUnit) -> Front:
    """The front of a kept unit: its plans are played again, and its bound on the peak is computed again.

    Raises:
        StructureError: if the runtime cannot carry out one of the plans.
    """
    events: list[Op | Need] = []
    for row in unit.events:
        if isinstance(row, NeedRow):
            events.append(Need(value=row.value, pinned_until=row.pinned_until))
            continue
        events.append(Op(
            site=Site(unit.words[row.module], unit.words[row.op], row.nth), phase=_PHASES[row.phase], seconds=row.seconds,
            inside_bytes=row.inside_bytes, reads=row.reads, writes=row.writes, overwrites=row.overwrites,
            replayable=row.replayable,
        ))  # fmt: skip
    trace = Trace(
        base_bytes=unit.base_bytes,
        resident_bytes=unit.resident_bytes,
        events=tuple(events),
        buffers=tuple(
            Buffer(bytes=b.bytes, born=b.born, slot=b.slot, held_until=b.held_until, released=b.released, counted=b.counted,
                   movable=b.movable)
            for b in unit.buffers
        ),
        saves=tuple(Save(value=value, event=event) for value, event in unit.saves),
        other_bytes=unit.other_bytes,
        spike_bytes=unit.spike_bytes,
        backward_event=unit.backward_event,
    )
    speed = unit.bandwidth
    problem = Problem(
        trace=trace,
        base_bytes=unit.base_bytes,
        bandwidth=None if speed is None else Bandwidth(write=speed[0], read=speed[1], read_fresh=speed[2]),
        pinned=frozenset(unit.pinned),
        replay_seconds=unit.replay_seconds,
        fetch_seconds=unit.fetch_seconds,
    )
    decisions = (
        {(v, gap): Away(Action.MOVE if moves else Action.RECOMPUTE, until) for v, gap, moves, until in plan}
        for plan in unit.plans
    )
    return Front.restored(problem, decisions, dict(unit.proven))


def sealed(unit: msgspec.Struct) -> bytes:
    """A value as bytes that begin with their checksum."""
    text = msgspec.msgpack.encode(unit)
    return hashlib.sha256(text).digest() + text


def unsealed(sealed: bytes, kind: type[_T]) -> _T | None:
    """The value whose bytes these are; None if they were cut off or changed, or are those of another kind of value."""
    checksum, text = sealed[:_CHECKSUM_BYTES], sealed[_CHECKSUM_BYTES:]
    if hashlib.sha256(text).digest() != checksum:
        return None
    try:
        return msgspec.msgpack.decode(text, type=kind)
    except msgspec.DecodeError:
        return None


class _Words:
    """Strings by index."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def index(self, word: str) -> int:
        return self.known.setdefault(word, len(self.known))
