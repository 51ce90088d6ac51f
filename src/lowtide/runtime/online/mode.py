"""The full interception: records every operator and holds the budget online, that is, without a plan.

It is used for the first steps, for steps that diverge from their plan, and wherever no plan exists. Each operator of the
forward leaves a record, so that its results can be recomputed. When an operator would exceed the budget or runs out of memory,
saved values are dropped or offloaded, the cheapest per byte and time since last use first, and the operator runs again.
"""

from __future__ import annotations

import time
import weakref
from typing import TYPE_CHECKING, Any, final

import torch
from lowtide.base.trace import Op, Site
from lowtide.runtime.device.accelerator import HOST
from lowtide.runtime.gate import let_pass
from lowtide.runtime.intercept.dispatch_mode import Mode, call_under, leaves_autograd_on, make_way
from lowtide.runtime.intercept.inplace_accumulation import in_place
from lowtide.runtime.storage.arguments import NO_DISPATCH, PLAIN_TYPES, map_tensors, overwritten_by, written_by
from lowtide.runtime.storage.op_schema import OpInfo, info_of
from lowtide.runtime.storage.value import Argument, Record, Value, covers_blindly, generator_of, state_bytes
from lowtide.runtime.tensors import on_storage

if TYPE_CHECKING:
    from lowtide.runtime.intercept.phases import PhaseTracker
    from lowtide.runtime.online.eviction import Evictor
    from lowtide.runtime.planned.retained_graphs import WriteListener
    from lowtide.runtime.storage.ledger import Ledger



@final
class OnlineMode(Mode):
    """Dispatch mode that sees every operator below autograd.

    Attributes:
        updating: whether an optimizer is writing and no known backward is still to come. Dropped values made from its
            parameters are then not brought back before the write; unpacking one afterwards raises.
        opens_gate: whether an open gate is on, which runs operators that only have to fit without this mode.
    """

    def __init__(self, clock: PhaseTracker, ledger: Ledger, evictor: Evictor) -> None:
        """Use the runtime's shared parts; operators go into the evictor's recorder."""
        super().__init__()
        self.clock = clock
        self.ledger = ledger
        self.evictor = evictor
        self.passive = False
        self.remembers = False
        self.opens_gate = False
        self.write_listeners: tuple[WriteListener, ...] = ()
        self.updating = False
        self._order = 0
        self._counts: dict[tuple[str, str], int] = {}

    def begin(self, *, remember: bool, write_listeners: tuple[WriteListener, ...] = ()) -> None:
        """Begin another unit, or operators outside any unit.

        Args:
            remember: whether operators leave records, so that they can run again.
            write_listeners: notified before every write.
        """
        self.remembers = remember
        self.write_listeners = write_listeners
        self._counts = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Intercept one operator."""
        if not PLAIN_TYPES.issuperset(types):
            return make_way(func, types, args, kwargs)
        if leaves_autograd_on(func):
            return call_under(self, func, args, kwargs)
        kwargs = kwargs or {}
        if self.passive or _is_fake(args) or self._is_elsewhere():
            return func(*args, **kwargs)
        self.passive = True
        try:
            if not self.opens_gate:  # the gate stands in for the mode: autograd does all as in a run without one
                func = in_place(func, args)
            return self._observe(func, info_of(func), args, kwargs)
        finally:
            self.passive = False

    def _is_elsewhere(self) -> bool:
        """Whether another thread runs the operator, one that has inherited the mode (``torch.jit.fork``).

        It is neither recorded nor capped: the cap would be that of the thread that is followed. On an accelerator, backwards
        run in other threads, one at a time.
        """
        return not self.clock.ours and self.evictor.meter.device == HOST

    def _remembers(self) -> bool:
        """Whether operators leave records: inside a unit, in the phases that a plan follows."""
        return self.remembers and self.clock.scripted

    def _site(self, info: OpInfo) -> Site:
        module = self.clock.path()
        key = (module, info.name)
        nth = self._counts.get(key, 0)
        self._counts[key] = nth + 1
        return Site(module, info.name, nth)

    def _passes(self, info: OpInfo) -> bool:
        """Whether an operator only has to fit: nothing records it, and its results enter the ledger when they are read."""
        return not (info.mutates or self.evictor.recorder.notes or self._remembers()) and self.evictor.meter.exact

    def _observe(self, func: Any, info: OpInfo, args: Any, kwargs: Any) -> Any:
        if self._passes(info):
            out = self.evictor.operators.call(func, info, args, kwargs)
            if self.opens_gate and self.evictor.operators.may_pass(func, info):
                let_pass(func)
            return out
        tensors: list[torch.Tensor] = []
        _collect(args, tensors)
        if kwargs:
            _collect(tuple(kwargs.values()), tensors)
        inputs = [self._value(t) for t in tensors]
        if info.mutates:
            self._before_writes(info, args, kwargs)
        recorder = self.evictor.recorder
        record = self._record(func, info, args, kwargs) if self._remembers() else None
        recorder.before_op()
        evictions = self.evictor.times
        start = time.perf_counter()
        try:
            out = self.evictor.operators.call(func, info, args, kwargs)
        except BaseException:
            recorder.forget_last_look()
            raise
        seconds = time.perf_counter() - start
        if record is not None:
            record.seconds = seconds
            if self.evictor.times != evictions:
                self._hold_forgotten(record)
        inside = max(0, recorder.meter.op_peak() - self.evictor.operators.attempt_live_bytes) if recorder.active else 0
        self._results(func, info, args, kwargs, out, record, [v for v in inputs if v is not None], seconds, inside)
        return out

    def _value(self, tensor: torch.Tensor) -> Value | None:
        """The value in a tensor's storage; None if the tensor is not on a storage, or its type intercepts operators itself."""
        if not on_storage(tensor) or type(tensor).__torch_dispatch__ is not NO_DISPATCH:
            return None
        storage = tensor.untyped_storage()
        return self.ledger.find(storage) or self.ledger.enter(storage, None)

    def _record(self, func: Any, info: OpInfo, args: Any, kwargs: Any) -> Record | None:
        """The record to run an operator again; None if it must not run again."""
        if not info.replayable:
            return None
        inputs: list[Argument] = []
        written: dict[int, Argument] = {}
        if info.mutates and not self._writes_can_be_replayed(info, args, kwargs):
            return None

        def note(tensor: torch.Tensor, at: int | str | None) -> Argument:
            writes = at in info.writes_at
            secret = at in info.secret_at
            argument = self._argument(tensor, owned=writes, loose=secret)
            inputs.append(argument)
            if writes or secret:
                written[id(argument)] = argument
            return argument

        tensors: list[torch.Tensor] = []
        _collect((*args, *kwargs.values()), tensors)
        if not all(on_storage(t) for t in tensors):
            return None
        generator = generator_of(args, kwargs, (t.device for t in tensors)) if info.seeded else None
        if info.seeded and generator is None:
            return None
        noted = tuple(map_tensors(a, i, note) for i, a in enumerate(args))
        named = {k: map_tensors(v, k, note) for k, v in kwargs.items()}
        self._order += 1
        record = Record(func, info, noted, named, inputs, self._order)
        record.doubtful = any(a.value is not None and a.value.is_doubtful() for a in inputs)
        if generator is not None:
            record.state = (generator, state_bytes(generator))
        for argument in written.values():
            matters = argument.anchor is None and not covers_blindly(info, argument)
            record.overs.append((argument, _NOBODY, matters))
        return record

    def _hold_forgotten(self, record: Record) -> None:
        """Anchor the inputs that can no longer be recomputed: making room for the operator may have released their anchors."""
        for argument, value in record.reads():
            if value.record is None:
                self.evictor.anchors.add(argument.hold())
                self.evictor.recorder.anchored(value)

    def _argument(self, tensor: torch.Tensor, *, owned: bool, loose: bool) -> Argument:
        value = self._value(tensor)
        known = value is not None and value.record is not None and not value.tainted
        anchored = loose or value is None or not (known or owned)
        argument = Argument(None if loose else value, tensor, anchored=anchored)
        if argument.anchor is not None and value is not None and not _is_parameter(tensor):
            self.evictor.anchors.add(argument.anchor)
            self.evictor.recorder.anchored(value)
        return argument

    def _writes_can_be_replayed(self, info: OpInfo, args: Any, kwargs: Any) -> bool:
        """Whether every argument written in place has a record of its own, or is overwritten without being read."""
        seen: set[Value] = set()
        for at in info.writes_at:
            item = args[at] if isinstance(at, int) and at < len(args) else kwargs.get(at) if isinstance(at, str) else None
            if item is None:
                continue
            if not isinstance(item, torch.Tensor):
                return False
            value = self._value(item)
            if value is None or value.tainted or value in seen:  # each of two views would get its own copy
                return False
            seen.add(value)
            whole = info.overwrites_fully and item.numel() * item.element_size() == value.bytes and value.saves == 0
            if value.record is None and not (whole and value.unit is self.evictor.recorder and value.unit is not None):
                return False
        return True

    def _before_writes(self, info: OpInfo, args: Any, kwargs: Any) -> None:
        """Notify the listeners, and bring back values that could not be recomputed after the write."""
        for item, _ in written_by(info, args, kwargs):
            value = self._value(item)
            for listener in self.write_listeners:
                listener.will_write(item)
            if value is None or (self.updating and value.record is None):
                continue
            if value.record is None or value.tensor is not None:
                self.evictor.before_write(value)

    def _results(
        self, func: Any, info: OpInfo, args: Any, kwargs: Any, out: Any, record: Record | None, inputs: list[Value],
        seconds: float, inside: int,
    ) -> None:
        recorder = self.evictor.recorder
        site = self._site(info)
        made: list[Value] = []
        overwrites: list[tuple[Value, Value]] = []
        written = overwritten_by(info, args, kwargs) if info.mutates else []
        blind: list[Value] = []
        for i, item, _ in written:
            old = self._value(item)
            if old is None:
                continue
            new = Value(old.bytes, record)
            if record is not None and i < len(record.overs):
                argument, _, matters = record.overs[i]
                record.overs[i] = (argument, weakref.ref(new), matters)
                if argument.anchor is not None:
                    new.record = None
                if not matters:
                    blind.append(old)
            overwrites.append((old, new))
        flat: list[Any] = []
        _collect(out if isinstance(out, (tuple, list)) else (out,), flat)
        for i, tensor in enumerate(flat):
            if not on_storage(tensor) or type(tensor).__torch_dispatch__ is not NO_DISPATCH:
                continue
            storage = tensor.untyped_storage()
            if self.ledger.find(storage) is None:
                value = self.ledger.enter(storage, record)
                value.scratch = info.opaque and tensor.dtype is torch.uint8
                made.append(value)
                if record is not None:
                    record.outs.append((_position(out, tensor, i), weakref.ref(value)))
        if recorder.active:
            for slot, value in enumerate(made):
                recorder.born(value, slot)
            for slot, (old, new) in enumerate(overwrites):
                recorder.version(old, new, len(made) + slot)
            reads = dict.fromkeys(recorder.number(v) for v in inputs if not (blind and any(v is b for b in blind)))
            if recorder.notes:
                if info.collective:
                    taken = {recorder.number(v): v.bytes for v in (*inputs, *made, *(new for _, new in overwrites))}
                    recorder.collective(taken, max(taken.values(), default=0))
                recorder.after_op(
                    func,
                    Op(
                        site=site,
                        phase=self.clock.phase,
                        seconds=seconds,
                        inside_bytes=inside,
                        reads=tuple(reads),
                        writes=tuple(v.number for v in made),
                        overwrites=tuple((old.number, new.number) for old, new in overwrites),
                        replayable=record is not None,
                    ),
                    scripted=self.clock.scripted,
                )
        for old, new in overwrites:
            self.ledger.succeed(old, new)
            self.evictor.inherited(old, new)
        self.evictor.made(site, made, [new for _, new in overwrites])
        if recorder.active and self.evictor.barred:
            recorder.kept.update(v.number for v in (*made, *(new for _, new in overwrites)) if v in self.evictor.barred)


class _Nobody:
    """Stands for the weak reference to a version that does not exist yet."""

    def __call__(self) -> None:
        return None


_NOBODY: Any = _Nobody()


def _collect(items: Any, found: list[torch.Tensor]) -> None:
    for item in items:
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif type(item) is list or type(item) is tuple:
            _collect(item, found)


def _position(out: Any, tensor: torch.Tensor, fallback: int) -> int:
    """A tensor's position among the flattened outputs."""
    if isinstance(out, (tuple, list)):
        at = 0
        for item in out:
            if item is tensor:
                return at
            at += len(item) if isinstance(item, (tuple, list)) else 1
    return fallback


def _is_parameter(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a parameter or a view of one: the script holds those all the time."""
    leaf = tensor if tensor._base is None else tensor._base
    return isinstance(leaf, torch.nn.Parameter)


def _is_fake(args: Any) -> bool:
    """Whether an operator runs on meta tensors, as tracers do: they have no bytes."""
    return any(isinstance(a, torch.Tensor) and a.is_meta for a in args)
