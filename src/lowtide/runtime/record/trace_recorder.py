"""Records the trace of a unit while it runs.

The dispatch mode reports operators and the values that they make or overwrite, the saved-tensor hooks report packs and
unpacks, and the ledger reports the deaths of storages. The trace has the lifetimes that values would have in the plain run,
whatever the eviction policy dropped in the meantime.
"""

from __future__ import annotations

import operator
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from lowtide.base.trace import Buffer, Need, Op, Save, Trace
from lowtide.runtime.device.memory_meter import Meter
from lowtide.runtime.record.watched_items import OpenNeeds, Polled
from lowtide.runtime.storage.value import Value
from lowtide.runtime.storage.views import sole_owner

_FEW_OF_BASE = 8
"""How many of the values that existed before the unit are polled per operator: most are parameters, which stay."""
_BACKEND_THREADS = 2
"""Threads of a collective backend (gloo's default): each may be late in freeing the buffers of one collective."""


@dataclass(slots=True)
class _Life:
    """A buffer while it is being recorded."""

    bytes: int
    born: int
    slot: int
    counted: bool
    value: weakref.ref[Value]
    held_until: int | None = None
    released: int = -1
    saves: int = 0
    watched: bool = False
    gone_from_base: bool = False
    left: bool = False
    """Autograd has released it for the last time, and at most Lowtide's own references keep its storage alive."""

    def is_held(self) -> bool:
        """Whether something besides autograd and Lowtide holds the storage again, after autograd had been its only owner."""
        value = self.value()
        storage = None if value is None or value.superseded or self.held_until is None else value.storage()
        return value is not None and storage is not None and not sole_owner(storage, value.own_aliases())


@dataclass(slots=True, eq=False)
class _Asked:
    """A need while it is being recorded.

    Attributes:
        value: number of the value asked for.
        pinned_until: last event at whose end the node, or whatever it passed the tensor to, holds it; None while it does.
    """

    value: int
    pinned_until: int | None = None


@dataclass(slots=True)
class _InFlightCollective:
    """The buffers of a collective, which a thread of its backend frees some time after it has reported completion.

    Attributes:
        values: numbers of the values that it read or wrote.
        inside_bytes: bytes that it may have allocated inside, and that belong to no value.
        late: those of the values whose storage has died; in another step they may live longer.
    """

    values: frozenset[int]
    inside_bytes: int
    late: list[_Life] = field(default_factory=list)


@dataclass(eq=False)
class TraceRecorder:
    """Records one unit while it runs; :meth:`finish` returns the trace.

    Its many fields are the trace's growing columns, and the entries in them that are still open.
    """

    notes: ClassVar[bool] = True
    """Whether events are recorded; if False, only each value's owning unit is tracked."""
    active: ClassVar[bool] = True
    """Whether there is a unit; False only for the recorder between units."""

    meter: Meter
    base_bytes: int
    events: list[Op | _Asked] = field(default_factory=list)
    funcs: list[tuple[int, Any]] = field(default_factory=list)
    lives: list[_Life] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    other: list[int] = field(default_factory=list)
    late_bytes: list[int] = field(default_factory=list)
    spikes: list[int] = field(default_factory=list)
    packs: list[tuple[int, int]] = field(default_factory=list)
    """For each tensor that autograd saved, the number of events before it, and the number of its value, or -1."""
    tainted: set[int] = field(default_factory=set)
    kept: set[int] = field(default_factory=set)
    pending: Polled[Value] = field(default_factory=Polled)
    """Values made in the unit that something besides autograd and Lowtide still holds."""
    pending_of_base: Polled[Value] = field(default_factory=lambda: Polled(most=_FEW_OF_BASE))
    """The same for values that existed before the unit."""
    leaving: list[_Life] = field(default_factory=list)
    """Values that autograd has released while something else, such as a node that is still running, holds the storage."""
    away: set[Value] = field(default_factory=set)
    backward_event: int | None = None
    flights: deque[_InFlightCollective] = field(default_factory=deque)
    tracked: int = 0
    closed: bool = False
    _window_bytes: int = 0

    def __post_init__(self) -> None:
        """Watch the needs of nodes that are still running; weakly, so that the recorder is freed without a collector."""
        me = weakref.ref(self)

        def is_held(asked: _Asked) -> bool:
            recorder = me()
            return recorder is not None and recorder.lives[asked.value].is_held()

        def unpinned(asked: _Asked) -> None:
            recorder = me()
            if recorder is not None:
                asked.pinned_until = len(recorder.events) - 1

        self._needs: OpenNeeds[_Asked] = OpenNeeds(is_held, unpinned)

    def number(self, value: Value) -> int:
        """The number of a value in this unit; a value that is seen for the first time existed before the unit."""
        if value.unit is not self:
            self._add(value, born=-1, slot=0, counted=False)
            if value.tainted:
                self.tainted.add(value.number)
        return value.number

    def _add(self, value: Value, *, born: int, slot: int, counted: bool) -> None:
        value.unit, value.number = self, len(self.lives)
        self.lives.append(_Life(value.bytes, born, slot, counted, weakref.ref(value)))
        if counted:
            self.tracked += value.bytes

    def born(self, value: Value, slot: int) -> None:
        """Record a value made by the operator about to be recorded; ``slot`` is its place among that operator's values."""
        self._add(value, born=len(self.events), slot=slot, counted=True)

    def version(self, old: Value, new: Value, slot: int) -> None:
        """Record that the operator about to be recorded overwrote a value in place; ``new`` is its next version."""
        life = self.lives[self.number(old)]
        self._add(new, born=len(self.events), slot=slot, counted=life.counted)
        if life.counted:
            self.tracked -= old.bytes
        if life.saves:
            heir = self.lives[new.number]
            heir.saves, life.saves = life.saves, 0
            # The saved tensors pass to the new version, so an earlier release was not the last one. If only autograd held the
            # old version, it held it until now.
            life.released = -1 if life.held_until is None else len(self.events)
            if life.counted:
                self._watch(new, heir)
        if life.held_until is None:
            life.held_until = len(self.events)

    def back(self, value: Value) -> None:
        """Count a dropped value's bytes, which are resident again."""
        if value.unit is self and self.lives[value.number].counted:
            self.tracked += value.bytes
        self._no_more_away(value)

    def _away(self, value: Value) -> None:
        self.away.add(value)
        self.tracked -= value.bytes

    def _no_more_away(self, value: Value) -> None:
        if value in self.away:
            self.away.discard(value)
            self.tracked += value.bytes

    def gone(self, value: Value) -> None:
        """Record that a value's storage died."""
        if self.closed:
            return
        if value.unit is not self:
            if value.saves:  # a retained graph has it saved: in the plain run its bytes would be there
                self._away(value)
            return
        life = self.lives[value.number]
        if value.saves and not life.counted and not life.gone_from_base:  # evicted: still in the plain run's base
            self._away(value)
        elif life.counted or life.gone_from_base:
            self.tracked -= value.bytes
        if life.held_until is None and (flight := next((f for f in self.flights if value.number in f.values), None)):
            flight.late.append(life)
        elif life.held_until is None:
            life.held_until = len(self.events) - 1
        if life.released >= 0 and life.saves == 0 and not life.left:
            self._leaves(life)

    def unheld(self, value: Value) -> None:
        """Record that only autograd holds a value from here on."""
        if value.unit is self and self.lives[value.number].held_until is None:
            self.lives[value.number].held_until = len(self.events) - 1

    def saved(self, value: Value) -> None:
        """Record that autograd saves a tensor of a value."""
        number = self.number(value)
        self.packed(number)
        self.saves.append(Save(value=number, event=len(self.events) - 1))
        life = self.lives[number]
        life.saves += 1
        life.left = False
        if life.saves == 1 and life.counted:  # what was there before the unit is watched once autograd has released it
            self._watch(value, life)

    def packed(self, number: int) -> None:
        """Record that autograd saves a tensor of a value; -1 for one whose value is not tracked."""
        self.packs.append((len(self.events), number))

    def anchored(self, value: Value) -> None:
        """Watch a value that Lowtide holds for replays: the plain run may free it in the meantime."""
        number = self.number(value)
        self._watch(value, self.lives[number])

    def _watch(self, value: Value, life: _Life) -> None:
        if self.notes and life.held_until is None and not life.watched:
            life.watched = True
            (self.pending if life.counted else self.pending_of_base).items.append(value)

    def released(self, value: Value) -> None:
        """Record that autograd releases a saved tensor of a value."""
        if self.closed:
            return
        if value.unit is not self:
            if not value.saves:
                self._no_more_away(value)
            return
        life = self.lives[value.number]
        life.saves -= 1
        if not value.saves:
            self._no_more_away(value)
        life.released = max(life.released, len(self.events) - 1, 0)
        if not (life.saves or life.counted):
            self._watch(value, life)
        if self.notes and not life.saves and life.held_until is not None:
            if life.is_held():
                self.leaving.append(life)
            else:
                life.left = True

    def _leaves(self, life: _Life) -> None:
        """Record that the plain run would have freed a released value at the last event."""
        life.released, life.left = len(self.events) - 1, True

    def taint(self, value: Value) -> None:
        """Record that foreign code has a pointer to a value's bytes."""
        self.tainted.add(self.number(value))

    def need(self, value: Value) -> None:
        """Record that backward asks for a value."""
        self._look()
        asked = _Asked(self.number(value))
        self._needs.add(asked)
        self.events.append(asked)

    def before_op(self) -> None:
        """Measure memory before an operator, and close the needs of nodes that have ended."""
        self._look()
        self._needs.look()

    def collective(self, values: Iterable[int], inside_bytes: int) -> None:
        """Record that the operator about to be recorded is a collective.

        Its buffers count as live until N later collectives have started (N = backend threads), even if they were seen to die
        earlier, and so does a copy of the largest one, as gloo makes it. When a buffer dies differs from rank to rank; plans
        must not.
        """
        if len(self.flights) == _BACKEND_THREADS:
            for life in self.flights.popleft().late:
                life.held_until = len(self.events)
        self.flights.append(_InFlightCollective(frozenset(values), inside_bytes))

    def after_op(self, func: Any, op: Op, *, scripted: bool) -> None:
        """Record an operator that ended; if it is ``scripted``, a plan compares later units with it."""
        if scripted:
            self.funcs.append((len(self.events), func))
        self.events.append(op)
        self.begin_window()

    def _look(self) -> None:
        self._poll()
        live, peak = self.meter.live(), self.meter.op_peak()
        self.other.append(live - self.tracked - self.base_bytes)
        self.late_bytes.append(sum(flight.inside_bytes for flight in self.flights))
        self.spikes.append(peak - live if self.events and peak > self._window_bytes else 0)
        self.begin_window()

    def begin_window(self) -> None:
        """Start a new window: a rise from here on lies outside the previous event.

        The bytes that are live now were counted in that event, and may still be freed.
        """
        self.meter.reset_op_peak()
        self._window_bytes = self.meter.live()

    def forget_last_look(self) -> None:
        """Discard the measurements made before an operator that failed."""
        self.other.pop()
        self.late_bytes.pop()
        self.spikes.pop()

    def _poll(self) -> None:
        """Find the values whose storage only autograd or Lowtide still references."""
        for life in self.leaving:
            if not (life.left or life.saves or life.is_held()):
                self._leaves(life)
        self.leaving = [life for life in self.leaving if not (life.left or life.saves)]
        self.pending.look(self._is_unheld)
        self.pending_of_base.look(self._is_unheld)

    def _is_unheld(self, value: Value) -> bool:
        """Whether a value need not be watched: only autograd and Lowtide refer to its storage, and it is recorded since when.

        What existed before the unit is in the base as long as autograd has it saved; :meth:`released` watches it again.
        """
        life = self.lives[value.number]
        if life.held_until is not None or (life.saves and not life.counted):
            life.watched = False
            return True
        storage, aliases = value.storage(), value.own_aliases()
        if storage is None or not aliases or not sole_owner(storage, aliases):
            return False
        life.held_until = len(self.events) - 1
        if not life.counted and self.meter.counts(storage):
            life.gone_from_base = True  # without Lowtide, its bytes would have left the base by now
            self.tracked += value.bytes
        return True

    def begin_backward(self, *, followed: bool) -> None:
        """Begin a backward that is not nested in a node; ``followed``: plans follow its operators (``create_graph``)."""
        self._needs.look()
        if self.backward_event is None and not followed:
            self.backward_event = len(self.events)

    @property
    def leaving_bytes(self) -> int:
        """Bytes that existed before the unit and were freed within it."""
        return max(0, -min(self.other, default=0))

    def close(self) -> None:
        """Stop recording, and drop all references, because values refer to their recorder."""
        self.closed = True
        self.pending.items, self.pending_of_base.items, self.leaving = [], [], []
        self.away = set()

    def finish(self, resident_bytes: int, *, movable: bool) -> Trace:
        """Close the recorder and return the trace; ``movable``: whether values made in the unit may be offloaded."""
        self.close()
        end = len(self.events)
        events = tuple(
            Need(value=e.value, pinned_until=end if e.pinned_until is None else e.pinned_until) if isinstance(e, _Asked) else e
            for e in self.events
        )
        buffers = tuple(
            Buffer(
                bytes=life.bytes,
                born=life.born,
                slot=life.slot,
                held_until=_held_until(life, end, kept=number in self.kept),
                released=end if life.saves > 0 or (life.released >= 0 and life.is_held()) else life.released,
                counted=life.counted,
                movable=movable and life.counted,
            )
            for number, life in enumerate(self.lives)
        )
        return Trace(
            base_bytes=self.base_bytes,
            resident_bytes=resident_bytes,
            events=events,
            buffers=buffers,
            saves=tuple(self.saves),
            other_bytes=tuple(map(operator.add, self.other, self.late_bytes)),
            spike_bytes=tuple(self.spikes),
            backward_event=end if self.backward_event is None else self.backward_event,
        )


def _held_until(life: _Life, end: int, *, kept: bool) -> int:
    """Last event at whose end something besides autograd holds a buffer.

    A ``kept`` buffer (``--keep``) counts as held while autograd has it saved; ``end`` is the number of the unit's events.
    """
    held = end if life.held_until is None else life.held_until
    if not kept:
        return held
    return end if life.saves > 0 else max(held, life.released)
