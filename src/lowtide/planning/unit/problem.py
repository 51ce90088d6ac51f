"""The planning problem of one unit: its recording, the bytes live at its start, and the cost of moving bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lowtide.base.trace import Need, Op, Trace

if TYPE_CHECKING:
    from lowtide.planning.unit.native import NativeUnit


class Action(StrEnum):
    """How an absent value comes back."""

    RECOMPUTE = "recompute"
    MOVE = "move"


@dataclass(frozen=True, slots=True)
class Away:
    """The decision to drop or offload a value during one of its gaps.

    Attributes:
        action: how the value comes back.
        until: event from which on the value is held if another value's chain rematerializes it; before, it is dropped again.
    """

    action: Action
    until: int


FRESH_BYTES = 32 << 20
"""glibc's largest mmap threshold (DEFAULT_MMAP_THRESHOLD_MAX): blocks of this size or more are always mapped anew, so their
pages fault in each time."""

FOREVER = 1 << 60
"""An event that never comes."""

Key = tuple[int, int]
"""(value, gap): gap ``k`` of a value is the time before its need ``k``; the last gap is the time after its last need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """Speed of the second board in bytes per second.

    Attributes:
        write: copying from the device.
        read: copying to a block of the device that was in use before.
        read_fresh: copying to a newly mapped block, as glibc returns for every size of ``FRESH_BYTES`` or more.
    """

    write: float
    read: float
    read_fresh: float

    def read_seconds(self, size: int) -> float:
        """Seconds to bring ``size`` bytes back."""
        return size / (self.read if size < FRESH_BYTES else self.read_fresh)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A unit to be run within a budget.

    Attributes:
        trace: the recorded unit.
        base_bytes: live bytes when the unit begins (may differ from the recording's).
        bandwidth: speed of the second board; None if nothing may be moved.
        pinned: ids of values that foreign code may write to. Neither they nor values computed from them are recomputed.
        replay_seconds: seconds that the interception adds to each operator that is run again, as it records it in the forward
            and calls it for backward.
        fetch_seconds: seconds that the interception adds to each value that is moved, counted when it comes back.
    """

    trace: Trace
    base_bytes: int
    bandwidth: Bandwidth | None = None
    pinned: frozenset[int] = field(default_factory=frozenset)
    replay_seconds: float = 0.0
    fetch_seconds: float = 0.0

    def __getstate__(self) -> dict[str, Any]:
        """What a copy takes along: all but what is laid out in C++."""
        return {name: value for name, value in vars(self).items() if name != "native"}

    @cached_property
    def native(self) -> NativeUnit | None:
        """The problem, laid out for the compiled player; None where that was not built, or there is no memory for it."""
        from lowtide.planning.unit.native import NativeUnit, library  # which imports this module

        loaded = library()
        try:
            return None if loaded is None else NativeUnit(self, loaded)
        except MemoryError:
            return None

    @cached_property
    def seconds(self) -> float:
        """Seconds of the unit without a plan: the sum over its operators."""
        return sum(e.seconds for e in self.trace.events if isinstance(e, Op))

    @cached_property
    def needs(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Per value, its needs in order as pairs (event, last event of the pin)."""
        found: list[list[tuple[int, int]]] = [[] for _ in self.trace.buffers]
        for e, event in enumerate(self.trace.events):
            if isinstance(event, Need):
                found[event.value].append((e, max(e, min(event.pinned_until, self.end(event.value)))))
        return tuple(tuple(n) for n in found)

    @cached_property
    def overwritten(self) -> dict[int, int]:
        """Per value that is overwritten in place, the event at which that happens."""
        return {
            old: e
            for e, event in enumerate(self.trace.events)
            if isinstance(event, Op)
            for old, _ in event.overwrites
        }

    @cached_property
    def heirs(self) -> dict[int, int]:
        """Per saved value that is overwritten in place, its next version, in which its saved tensors then are."""
        saved = {save.value for save in self.trace.saves}
        found: dict[int, int] = {}
        for event in self.trace.events:
            for old, new in event.overwrites if isinstance(event, Op) else ():
                if old in saved:
                    found[old] = new
                    saved.add(new)
        return found

    @cached_property
    def gap_starts(self) -> tuple[int, ...]:
        """Per value, the index of the first gap in which it may be away (the script holds it through earlier ones)."""
        return tuple(
            sum(1 for event, _ in needs if event <= buffer.held_until)
            for buffer, needs in zip(self.trace.buffers, self.needs, strict=True)
        )

    @cached_property
    def _deadlines(self) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """Per value, the event from which on no chain can recompute it (-1: none ever can); whether all needs come before."""
        until = [-1] * len(self.trace.buffers)
        known = [False] * len(self.trace.buffers)
        for e, event in enumerate(self.trace.events):
            if not isinstance(event, Op) or not event.replayable:
                continue
            end = min((self._source(r, until, known) for r in event.reads), default=FOREVER)
            for v in (*event.writes, *(new for _, new in event.overwrites)):
                if v not in self.pinned and end > e:
                    until[v] = end
                    known[v] = not self.needs[v] or self.needs[v][-1][0] < end
        return tuple(until), tuple(known)

    def _source(self, value: int, until: list[int], known: list[bool]) -> int:
        """The event from which on a chain that reads ``value`` cannot run."""
        if known[value]:
            return until[value]
        if value in self.pinned:
            return -1
        if self.capturable(value):
            return FOREVER
        return self.overwritten[value] if self.trace.buffers[value].born < 0 else until[value]

    @property
    def remakeable(self) -> tuple[bool, ...]:
        """Per value, whether a chain of replays can recompute it at each of its needs, from values present or captured."""
        return self._deadlines[1]

    def maker(self, value: int) -> Op:
        """The operator that computed a value; only for values with ``born >= 0``."""
        op = self.trace.events[self.trace.buffers[value].born]
        assert isinstance(op, Op)
        return op

    def again_seconds(self, op: Op) -> float:
        """Seconds to run an operator again."""
        return op.seconds + self.replay_seconds

    def capturable(self, value: int) -> bool:
        """Whether holding a reference to the value preserves its bits to the end: it is never overwritten in place."""
        return value not in self.overwritten

    def can_move(self, value: int) -> bool:
        """Whether a value can be offloaded; the script must stop holding it before the first backward begins."""
        buffer = self.trace.buffers[value]
        return buffer.movable and self.bandwidth is not None and buffer.held_until < self.trace.backward_event

    def move_seconds(self, value: int, *, written: bool = False) -> float:
        """Seconds to fetch a value from the second board, plus those to write it there unless it was ``written`` before."""
        assert self.bandwidth is not None
        size = self.trace.buffers[value].bytes
        return self.back_seconds(size) + (0.0 if written else size / self.bandwidth.write)

    def back_seconds(self, size: int) -> float:
        """Seconds to fetch ``size`` bytes from the second board."""
        assert self.bandwidth is not None
        return self.fetch_seconds + self.bandwidth.read_seconds(size)

    def end(self, value: int) -> int:
        """Last event at whose end the value is still live in the plain run."""
        buffer = self.trace.buffers[value]
        return max(buffer.held_until, buffer.released)

    @cached_property
    def plain_live(self) -> NDArray[np.int64]:
        """Per event, live bytes just before it in the plain run."""
        trace = self.trace
        delta = np.zeros(len(trace.events) + 2, dtype=np.int64)
        for v, buffer in enumerate(trace.buffers):
            if buffer.counted and self.end(v) > buffer.born:
                delta[buffer.born + 1] += buffer.bytes
                delta[self.end(v) + 1] -= buffer.bytes
        live = np.cumsum(delta)[: len(trace.events)]
        return live + self.base_bytes + np.asarray(trace.other_bytes, dtype=np.int64)

    @cached_property
    def rise(self) -> NDArray[np.int64]:
        """Per event, bytes by which memory rises above what is live just before it."""
        inside = [e.inside_bytes if isinstance(e, Op) else 0 for e in self.trace.events]
        return np.maximum(np.asarray(inside, dtype=np.int64), np.asarray(self.trace.spike_bytes, dtype=np.int64))

    @cached_property
    def plain_peak(self) -> int:
        """Peak bytes of the plain run with these base bytes."""
        return int((self.plain_live + self.rise).max(initial=self.base_bytes))
