"""The full interception: every operator is recorded, and the budget is held on line.

Used for the first steps, for steps off the plan, and wherever no plan exists. Each operator of the forward pass leaves a
record, so that what it made can be made again; when an operator would lift memory over the budget, or fails for want of
memory, saved values are dropped or moved, the cheapest per byte and time since last use first, and the operator runs again.
"""

from __future__ import annotations

import time
import weakref
from typing import TYPE_CHECKING, Any, final

import torch
from lowtide.base.trace import Op, Site
from lowtide.runtime.intercept.dispatch_mode import Mode, make_way
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
    """Sees every operator below autograd.

    Attributes:
        updating: whether an optimizer writes while no backward is to come that is known of: what was made from its parameters
            is not brought back before. Whoever asks for it even so is told.
    """

    def __init__(self, clock: PhaseTracker, ledger: Ledger, evictor: Evictor) -> None:
        """Share the runtime's parts; operators are noted into the evictor's recorder."""
        super().__init__()
        self.clock = clock
        self.ledger = ledger
        self.evictor = evictor
        self.passive = False
        self.remembers = False
        self.write_listeners: tuple[WriteListener, ...] = ()
        self.updating = False
        self._order = 0
        self._counts: dict[tuple[str, str], int] = {}

    def begin(self, *, remember: bool, write_listeners: tuple[WriteListener, ...] = ()) -> None:
        """Another unit begins, or none does.

        Args:
            remember: whether operators leave records, so that they can run again.
            write_listeners: told of every write beforehand.
        """
        self.remembers = remember
        self.write_listeners = write_listeners
        self._counts = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One operator."""
        if not PLAIN_TYPES.issuperset(types):
            return make_way(func, types, args, kwargs)
        kwargs = kwargs or {}
        if self.passive or _is_fake(args):
            return func(*args, **kwargs)
        self.passive = True
        try:
            func = in_place(func, args)
            return self._observe(func, info_of(func), args, kwargs)
        finally:
            self.passive = False

    def _remembers(self) -> bool:
        """Whether operators leave records: within a unit, in what a plan follows."""
        return self.remembers and self.clock.scripted

    def _site(self, info: OpInfo) -> Site:
        module = self.clock.path()
        key = (module, info.name)
        nth = self._counts.get(key, 0)
        self._counts[key] = nth + 1
        return Site(module, info.name, nth)

    def _passes(self, info: OpInfo) -> bool:
        """Whether an operator is only to fit: nobody notes it, and what it makes is met when somebody reads it."""
        return not (info.mutates or self.evictor.recorder.notes or self._remembers()) and self.evictor.meter.exact

    def _observe(self, func: Any, info: OpInfo, args: Any, kwargs: Any) -> Any:
        if self._passes(info):
            return self.evictor.operators.call(func, info, args, kwargs)
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
        start = time.perf_counter()
        try:
            out = self.evictor.operators.call(func, info, args, kwargs)
        except BaseException:
            recorder.forget_last_look()
            raise
        seconds = time.perf_counter() - start
        if record is not None:
            record.seconds = seconds
        inside = max(0, recorder.meter.op_peak() - self.evictor.operators.attempt_live_bytes) if recorder.active else 0
        self._results(func, info, args, kwargs, out, record, [v for v in inputs if v is not None], seconds, inside)
        return out

    def _value(self, tensor: torch.Tensor) -> Value | None:
        """The value that a tensor shows; None for what has no storage of its own."""
        if not on_storage(tensor) or type(tensor).__torch_dispatch__ is not NO_DISPATCH:
            return None
        storage = tensor.untyped_storage()
        return self.ledger.find(storage) or self.ledger.enter(storage, None)

    def _record(self, func: Any, info: OpInfo, args: Any, kwargs: Any) -> Record | None:
        """What it takes to run the operator again; None if it must not be."""
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
        """Whether every argument written in place is itself made by a record, or is overwritten without being read."""
        seen: set[Value] = set()
        for at in info.writes_at:
            item = args[at] if isinstance(at, int) and at < len(args) else kwargs.get(at) if isinstance(at, str) else None
            if item is None:
                continue
            if not isinstance(item, torch.Tensor):
                return False
            value = self._value(item)
            if value is None or value.tainted or value in seen:  # of two views each would be written on a copy of its own
                return False
            seen.add(value)
            whole = info.overwrites_fully and item.numel() * item.element_size() == value.bytes and value.saves == 0
            if value.record is None and not (whole and value.unit is self.evictor.recorder and value.unit is not None):
                return False
        return True

    def _before_writes(self, info: OpInfo, args: Any, kwargs: Any) -> None:
        """Values that depend on what is about to be overwritten, and could not be made again later, are made now."""
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
    """Stands for a version that is not known yet."""

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
    """Where a tensor stands among the flattened outputs."""
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
    """Whether an operator belongs to some tracer: its tensors have no bytes."""
    return any(isinstance(a, torch.Tensor) and a.is_meta for a in args)
