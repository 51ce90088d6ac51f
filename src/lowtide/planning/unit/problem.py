"""The question: a recorded unit, where its base stands now, and what moving bytes costs."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lowtide.base.trace import Need, Op, Trace


class Action(StrEnum):
    """How an absent value comes back."""

    RECOMPUTE = "recompute"
    MOVE = "move"


@dataclass(frozen=True, slots=True)
class Away:
    """A value is let go at the start of one of its gaps.

    Attributes:
        action: how it comes back.
        until: if it is made again, by another value's chain, before this event, it is not held; from this event on it is.
    """

    action: Action
    until: int


FRESH_BYTES = 32 << 20
"""glibc's largest threshold for mapping a block (DEFAULT_MMAP_THRESHOLD_MAX): its pages are faulted in each time."""

FOREVER = 1 << 60
"""An event that never comes."""

Key = tuple[int, int]
"""(value, gap): gap ``k`` of a value is the time before its need ``k``; the last gap follows its last need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """The second board's speed, bytes per second each way.

    Attributes:
        write: from the device.
        read: to a block of the device that was in use before.
        read_fresh: to a block that the system maps anew, as glibc does for every block of ``FRESH_BYTES`` or more.
    """

    write: float
    read: float
    read_fresh: float

    def read_seconds(self, size: int) -> float:
        """Seconds to bring so many bytes back."""
        return size / (self.read if size < FRESH_BYTES else self.read_fresh)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A unit to be run within a budget.

    Attributes:
        trace: the recorded unit.
        base_bytes: live bytes when the unit begins (it may differ from the recording's).
        bandwidth: of the second board; None where nothing may be moved.
        pinned: values that foreign code may write to (ids): they are not made again, nor is anything made again from them.
    """

    trace: Trace
    base_bytes: int
    bandwidth: Bandwidth | None = None
    pinned: frozenset[int] = field(default_factory=frozenset)

    @cached_property
    def seconds(self) -> float:
        """Of the unit without any plan: the sum of its operators'."""
        return sum(e.seconds for e in self.trace.events if isinstance(e, Op))

    @cached_property
    def needs(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Per value its needs in order, as pairs (event, last event of the pin)."""
        found: list[list[tuple[int, int]]] = [[] for _ in self.trace.buffers]
        for e, event in enumerate(self.trace.events):
            if isinstance(event, Need):
                found[event.value].append((e, max(e, min(event.pinned_until, self.end(event.value)))))
        return tuple(tuple(n) for n in found)

    @cached_property
    def overwritten(self) -> dict[int, int]:
        """The event at which a value is overwritten in place, for those that are."""
        return {
            old: e
            for e, event in enumerate(self.trace.events)
            if isinstance(event, Op)
            for old, _ in event.overwrites
        }

    @cached_property
    def heirs(self) -> dict[int, int]:
        """Per value that was overwritten in place after autograd had saved it, the next version: it has the saved tensors."""
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
        """Per value, the index of the first gap in which it may be away (script code holds it through earlier ones)."""
        return tuple(
            sum(1 for event, _ in needs if event <= buffer.held_until)
            for buffer, needs in zip(self.trace.buffers, self.needs, strict=True)
        )

    @cached_property
    def _deadlines(self) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """Per value the event from which on no chain makes it again (-1: it never can), and whether all needs come before."""
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
        """The event from which on a chain that reads a value cannot run."""
        if known[value]:
            return until[value]
        if value in self.pinned:
            return -1
        if self.capturable(value):
            return FOREVER
        return self.overwritten[value] if self.trace.buffers[value].born < 0 else until[value]

    @property
    def remakeable(self) -> tuple[bool, ...]:
        """Per value, whether a chain of replays makes it again at each of its needs, from what is there or can be captured."""
        return self._deadlines[1]

    def maker(self, value: int) -> Op:
        """The operator that made a value; only for values with ``born >= 0``."""
        op = self.trace.events[self.trace.buffers[value].born]
        assert isinstance(op, Op)
        return op

    def capturable(self, value: int) -> bool:
        """Whether holding the value by reference keeps its bits to the end: not so if it is overwritten in place."""
        return value not in self.overwritten

    def can_move(self, value: int) -> bool:
        """Whether a value can go to the second board: it must be unheld before the first backward begins."""
        buffer = self.trace.buffers[value]
        return buffer.movable and self.bandwidth is not None and buffer.held_until < self.trace.backward_event

    def move_seconds(self, value: int, *, written: bool = False) -> float:
        """Seconds to bring a value back from the second board, and (unless it was written before) there."""
        assert self.bandwidth is not None
        size = self.trace.buffers[value].bytes
        return self.bandwidth.read_seconds(size) + (0.0 if written else size / self.bandwidth.write)

    def end(self, value: int) -> int:
        """Last event at whose end the plain run still has the value."""
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
        """Per event, how far memory rises above what is live just before it."""
        inside = [e.inside_bytes if isinstance(e, Op) else 0 for e in self.trace.events]
        return np.maximum(np.asarray(inside, dtype=np.int64), np.asarray(self.trace.spike_bytes, dtype=np.int64))

    @cached_property
    def plain_peak(self) -> int:
        """Peak bytes of the plain run on this base."""
        return int((self.plain_live + self.rise).max(initial=self.base_bytes))
