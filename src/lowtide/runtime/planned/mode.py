"""The lean interception of planned steps: only the plan's own operators are looked at, the rest pass by a counter.

A :class:`CompiledPlan` is a plan compiled for one recorded unit: which operator comes when, which leave a record, which saved
values are held weakly. The forward must follow the recording operator by operator; at the first one that does not, the full
interception takes over (:class:`PlannedMode` hands everything on to it). A backward runs without any mode, but for one that
builds a graph of its own (``create_graph``): that is followed like a forward.

One module: what an operator is compared with, what it leaves for replays and what a later write makes of that are told from
the same few tables, in the hottest path of a planned step.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any, final

import torch
from lowtide.base.errors import ReplayError
from lowtide.runtime.intercept.data_swaps import Origin
from lowtide.runtime.intercept.dispatch_mode import Mode, make_way
from lowtide.runtime.intercept.inplace_accumulation import in_place
from lowtide.runtime.online.lineage import held_alone
from lowtide.runtime.online.retry import Refusals
from lowtide.runtime.planned.compiled_plan import CompiledPlan, PlannedStep
from lowtide.runtime.planned.serving import PlannedRun
from lowtide.runtime.record.saved_tensors import Kept, detached, modified_in_place
from lowtide.runtime.storage.arguments import PLAIN_TYPES, flatten, map_tensors, overwritten_by
from lowtide.runtime.storage.checksum import digest
from lowtide.runtime.storage.op_schema import info_of
from lowtide.runtime.storage.value import (
    Anchor,
    Argument,
    Record,
    Value,
    covers,
    covers_blindly,
    generator_of,
    records_behind,
    state_bytes,
)
from lowtide.runtime.storage.views import Meta, as_bytes, bytes_of, meta_of, sole_owner, version_probe, view_on
from lowtide.runtime.tensors import on_storage


@final
class PlannedHandle:
    """A saved tensor of a value that the plan lets go."""

    __slots__ = ("__weakref__", "instead", "meta", "origin", "run", "value", "version", "watched")

    def __init__(self, mode: PlannedMode, value: Value, tensor: torch.Tensor) -> None:
        """Refer to the value; the tensor itself is watched, not held."""
        self.run = mode.run
        self.value = value
        self.meta: Meta = meta_of(tensor)
        self.watched = version_probe(tensor)
        self.version = tensor._version
        self.origin = Origin.of(tensor, self)
        self.instead: torch.Tensor | None = None
        value.saves += 1

    def exchanged(self, tensor: torch.Tensor) -> None:
        """The tensor shows other data from now on: nobody asks for the former any more."""
        value = self.value
        if self.instead is None:
            value.saves -= 1
        if not value.saves and (value.record is not None or value.ticket is not None):
            value.tensor = None
        self.instead = detached(tensor)

    def unpack(self) -> torch.Tensor:
        """The tensor, made again if its value was let go.

        Raises:
            RuntimeError: if it was changed in place since it was saved.
        """
        if self.watched._version != self.version:
            raise modified_in_place(self.meta, self.watched._version, self.version)
        if self.instead is not None:
            return self.instead
        storage = self.run.serve(self.value)
        return view_on(storage, self.meta)


@final
class PlannedMode(Mode):
    """Follows a planned forward.

    Its many fields are the plan's lists, copied: the dispatch of every operator reads them, and another hop would cost. Its
    many methods are that dispatch in parts.

    Attributes:
        at: how many operators have passed.
        lost: whether the forward left the recording.
        forced: whether values were made again before anybody asked for them, since what they are made from was to be written.
        delegate: takes every operator once lost.
    """

    def __init__(
        self, script: CompiledPlan, run: PlannedRun, fallback: Callable[[], Any],
        pack_fallback: Callable[[torch.Tensor], Any], out_of_memory: Callable[[BaseException], bool],
        before_write: Callable[[Any, Any, Any], None], cap: Callable[[bool], None] | None = None, *,
        refusals: Refusals | None = None, smaller: bool = False,
    ) -> None:
        """Stand at the beginning of a unit.

        Args:
            script: what is followed.
            run: serves the unit's needs.
            fallback: takes over where the unit leaves its recording.
            pack_fallback: packs then.
            out_of_memory: whether an error means that memory ran out.
            before_write: told an operator that writes in place (what is known of it, and its arguments) before it runs.
            cap: caps the allocator at the budget, or lifts the cap: an operator that would cross it leaves the plan.
            refusals: tells whether an operator that returned was refused memory, under that cap.
            smaller: whether the unit is only smaller than the recorded one, and must not make anything larger.
        """
        super().__init__()
        self.script = script
        self.run = run
        self.at = 0
        self.packed = 0
        self.lost = False
        self.grown = False
        self.forced = False
        self.values: weakref.WeakValueDictionary[int, Value] = weakref.WeakValueDictionary()
        run.values = self.values
        self._pins: dict[int, Value] = {}
        self._elders: dict[int, list[weakref.ref[PlannedHandle]]] = {}
        self._left = False
        self.keeps: list[weakref.ref[Kept | Anchor]] = []
        self._protected: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._readers: dict[int, list[weakref.ref[Anchor]]] = {}
        self._exposed: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._witnessed: dict[tuple[Any, ...], tuple[Callable[[], Any], int | None]] = {}
        self._writes = script.writes
        self._clocked = None if run.stopwatch is None else run.stopwatch.forward
        self._funcs = script.funcs
        self._acts = script.acts
        self._packs = script.packs
        self._fallback = fallback
        self._pack_fallback = pack_fallback
        self._out_of_memory = out_of_memory
        self._before_write = before_write
        self._delegate: Any = None
        self._cap = _uncapped if cap is None else cap
        self._caps = (False,) * len(script.again) if cap is None else script.again
        self._refusals = refusals
        self._smaller = smaller

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One operator."""
        if self._delegate is None:
            at = self.at
            if types and not PLAIN_TYPES.issuperset(types):
                return make_way(func, types, args, kwargs)
            act = self._acts[at]
            if func is not self._funcs[at]:
                func = in_place(func, args)
            follows = func is self._funcs[at] and not (self._writes[at] and self._strays(act, func, args, kwargs or {}))
            if follows and self._exposed and act is not None and act.recorded:
                follows = not self._reads_exposed(args, kwargs or {})
            if follows:
                capped = self._caps[at]
                if capped:
                    self._cap(True)
                try:
                    if act is not None:
                        out = self._act(act, func, args, kwargs or {})
                    elif self._clocked is None and not capped:
                        out = func(*args, **kwargs) if kwargs else func(*args)
                    else:
                        out = self._call(func, args, kwargs or {})
                except (RuntimeError, MemoryError) as error:
                    if not self._out_of_memory(error) or info_of(func).mutates or info_of(func).collective:
                        raise
                else:
                    larger = self._smaller and self._is_larger(out)
                    self.at = at + 1
                    if larger:  # of what it rises to nothing is known any more
                        self.leave()
                    return out
                finally:
                    if capped:
                        self._cap(False)
            self.leave()
        return self._delegate.__torch_dispatch__(func, types, args, kwargs)

    def let_go(self) -> None:
        """The unit is over: values live as long as their handles do, and no longer."""
        self._pins.clear()

    def prune(self) -> None:
        """A backward begins, or one that is followed ended: what is not looked up again lives as long as its handles."""
        last = self.script.last_use
        self._pins = {n: v for n, v in self._pins.items() if last.get(n, -1) >= self.at}

    def owes(self) -> bool:
        """Whether autograd may still ask for what this unit saved."""
        return any(value.saves for value in self.values.values())

    def last_moves(self) -> None:
        """The first backward that is not followed begins: what is to leave before it leaves."""
        if not self._left:
            self._left = True
            for number in self.script.last_moves:
                self.move(number)

    def _enter(self, number: int, value: Value, storage: torch.UntypedStorage) -> None:
        value.number = number
        value.weak = weakref.ref(storage)  # type: ignore[assignment]
        self.values[number] = self._pins[number] = value
        self._protect(storage)

    def leave(self) -> None:
        """The forward is off the plan: the full interception takes over."""
        self.lost = True
        self.let_go()
        self._delegate = self._fallback()

    def _protect(self, storage: torch.UntypedStorage) -> None:
        """Protect a storage that replays read: only the operator that wrote it in the recording may write it."""
        self._protected[storage._cdata] = weakref.ref(storage)

    def is_needed_by_replays(self, tensor: torch.Tensor) -> bool:
        """Whether a replay of this unit may still read what a tensor shows."""
        if not on_storage(tensor):
            return False
        address = tensor.untyped_storage()._cdata
        found = self._protected.get(address)
        return (found is not None and found() is not None) or self._is_read(address)

    def _is_read(self, address: int) -> bool:
        """Whether a replay that may still come reads a storage that it cannot make again."""
        return any(ref() is not None for ref in self._readers.get(address, ()))

    def spoil(self, tensor: torch.Tensor) -> None:
        """A tensor is written: replays that would read it fail from here on; what operators of the unit made is kept."""
        if not on_storage(tensor):
            return
        address = tensor.untyped_storage()._cdata
        if not self._is_read(address):
            self.will_write(tensor)
            return
        for ref in self._readers[address]:
            if (anchor := ref()) is not None:
                anchor.stale = True

    def expose(self, tensor: torch.Tensor) -> None:
        """Mark a tensor's storage as exposed to code outside torch: no further operator that reads it may be replayed."""
        if on_storage(tensor):
            storage = tensor.untyped_storage()
            self._exposed[storage._cdata] = weakref.ref(storage)

    def exposed(self) -> list[torch.UntypedStorage]:
        """What somebody has the memory of."""
        return [storage for ref in self._exposed.values() if (storage := ref()) is not None]

    def _reads_exposed(self, args: Any, kwargs: Any) -> bool:
        """Whether an operator that may have to run again reads what somebody may write meanwhile.

        If that was so when it was recorded, the plan does not let it run again.
        """
        exposed = {storage._cdata for storage in self.exposed()}
        read = (t for t in flatten((*args, *kwargs.values())) if isinstance(t, torch.Tensor) and on_storage(t))
        return any(t.untyped_storage()._cdata in exposed for t in read)

    def will_write(self, tensor: torch.Tensor) -> None:
        """A write outside the plan is about to happen: recompute now, and keep, every value whose replay reads the tensor."""
        if not self.is_needed_by_replays(tensor):
            return
        address = tensor.untyped_storage()._cdata
        asked = self._asked()
        written = [v for v in asked if _lies_at(v, address)]
        made_from = [v for v in asked if v.ticket is None and _reads(v, address)]
        held = [value for value in (*written, *made_from) if self._hold(value)]
        for value in held:
            value.record = None
        for value in written:
            if value.tensor is not None:
                value.ticket = None

    def _strays(self, act: PlannedStep | None, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether an operator writes to other bytes of ours than it did when it was recorded."""
        overwrites = () if act is None else act.overwrites
        info = info_of(func)
        self._before_write(info, args, kwargs)
        for i, (_, tensor, secret) in enumerate(overwritten_by(info, args, kwargs)):
            old = overwrites[i][0] if i < len(overwrites) else -1
            if secret:
                continue
            if old < 0:
                covered = act is not None and act.recorded  # all of it, when it was recorded: nothing makes what was there
                if self.is_needed_by_replays(tensor) or (covered and not covers(info, tensor)):
                    return True
                continue
            value = self.values.get(old)
            storage = None if value is None else value.storage()
            if storage is None or storage._cdata != tensor.untyped_storage()._cdata:
                return True
        return False

    def hold_all(self) -> None:
        """Nobody looks on any more: what may still be asked for is made now."""
        for value in self._asked():
            self._hold(value)

    def _asked(self) -> list[Value]:
        """Values that autograd may still ask for."""
        return [v for v in self.values.values() if v.saves and not v.superseded]

    def _hold(self, value: Value) -> bool:
        """Keep a value from here on, made again if need be; False where it cannot be: whoever asks for it is told."""
        if value.tensor is None:
            storage = value.storage()
            if storage is None:
                try:
                    storage = self.run.make_again(value)
                except ReplayError:
                    return False
                self.forced = True
            value.tensor = as_bytes(storage)
        return True

    def _act(self, act: PlannedStep, func: Any, args: Any, kwargs: Any) -> Any:
        for number in act.moves:
            self.move(number)
        info = info_of(func)
        record = self._record(act, func, info, args, kwargs) if act.recorded else None
        out = self._call(func, args, kwargs)
        self._note_outputs(act, record, args, kwargs, out)
        self._note_writes(act, record, info, args, kwargs)
        return out

    def _is_larger(self, out: Any) -> bool:
        """Whether an operator made anything larger than it did when it was recorded."""
        sizes = self.script.sizes[self.at]
        if sizes:
            made = [bytes_of(t) for t in flatten(out) if isinstance(t, torch.Tensor)]
            limits = sizes if len(made) == len(sizes) else (max(sizes),) * len(made)
            self.grown |= any(size > limit for size, limit in zip(made, limits, strict=True))
        return self.grown

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        refusals = self._refusals if self._caps[self.at] else None
        if refusals is not None:
            refusals.begin()
        start = time.perf_counter()
        out = func(*args, **kwargs)
        seconds = time.perf_counter() - start
        if refusals is not None:
            refusals.check()
        if self._clocked is not None:  # of operators that failed nothing is noted
            self._clocked.append(seconds)
        return out

    def _record(self, act: PlannedStep, func: Any, info: Any, args: Any, kwargs: Any) -> Record:
        inputs: list[Argument] = []
        weak = {}
        for number in act.weak:
            value = self.values.get(number)
            storage = None if value is None else value.storage()
            if storage is not None:
                weak[storage._cdata] = value
        overs: list[tuple[Argument, Any, bool]] = []

        def note(tensor: torch.Tensor, at: int | str | None) -> Argument:
            storage = tensor.untyped_storage()
            value = weak.get(storage._cdata)
            writes, secret = at in info.writes_at, at in info.secret_at
            if writes and value is None:
                value = Value(storage.nbytes(), None)
            anchored = secret or value is None
            shared = self._anchor_of(storage._cdata) if anchored and not secret else None
            argument = Argument(None if secret else value, tensor, anchored=anchored, anchor=shared)
            inputs.append(argument)
            if argument.anchor is None and not (writes or secret):
                self._protect(storage)
            elif argument.anchor is not None and not (writes or secret):
                argument.witness = self._witness(tensor)
                if argument.anchor is not shared:
                    self.keeps.append(weakref.ref(argument.anchor))
                    self._readers.setdefault(storage._cdata, []).append(weakref.ref(argument.anchor))
            if writes or secret:
                overs.append((argument, _gone, writes and not covers_blindly(info, argument)))
            return argument

        noted = tuple(map_tensors(a, i, note) for i, a in enumerate(args))
        named = {k: map_tensors(v, k, note) for k, v in kwargs.items()}
        record = Record(func, info, noted, named, inputs, self.at + 1)
        record.overs = overs
        record.seconds = self.script.seconds[self.at]
        if info.seeded:
            generator = generator_of(args, kwargs, (a.device for a in inputs))
            record.state = (generator, state_bytes(generator))
        return record

    def _anchor_of(self, address: int) -> Anchor | None:
        """What holds a storage's bytes for replays already, as they are now."""
        anchors = (ref() for ref in self._readers.get(address, ()))
        return next((a for a in anchors if a is not None and a.held is not None and not a.stale), None)

    def _witness(self, tensor: torch.Tensor) -> int | None:
        """What tells whether a tensor that replays read was written unseen: a batch, which a loader may fill again."""
        if tensor.requires_grad or isinstance(tensor if tensor._base is None else tensor._base, torch.nn.Parameter):
            return None
        if not on_storage(tensor):
            return None
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor._version, *meta_of(tensor))
        known, found = self._witnessed.get(key, (_gone, None))
        if known() is not storage:  # another tensor may come to lie where one has died
            found = digest(tensor)
            self._witnessed[key] = weakref.ref(storage), found
        return found

    def _note_outputs(self, act: PlannedStep, record: Record | None, args: Any, kwargs: Any, out: Any) -> None:
        if not act.outs:
            return
        read = flatten((*args, *kwargs.values()))
        fresh = _fresh(out, {t.untyped_storage()._cdata for t in read if isinstance(t, torch.Tensor) and on_storage(t)})
        for slot, number, size in act.outs:
            position, tensor = fresh[slot] if slot < len(fresh) else (0, None)
            if tensor is None:
                self.grown = True
                continue
            storage = tensor.untyped_storage()
            if storage.nbytes() != size and not self._smaller:
                self.grown = True
            value = Value(storage.nbytes(), record)
            self._enter(number, value, storage)
            if record is not None:
                record.outs.append((position, weakref.ref(value)))

    def _note_writes(self, act: PlannedStep, record: Record | None, info: Any, args: Any, kwargs: Any) -> None:
        if not act.overwrites:
            return
        written = overwritten_by(info, args, kwargs)
        for (old, new), (place, tensor, _) in zip(act.overwrites, written, strict=False):
            before = self.values.get(old)
            held = None if before is None else before.tensor
            if before is not None:
                before.superseded, before.weak, before.tensor = True, None, None
            if new < 0:
                if before is not None:
                    before.record = None if before.saves else before.record  # nobody gets the bits from before the write
                    self._protected.pop(tensor.untyped_storage()._cdata, None)
                continue
            storage = tensor.untyped_storage()
            value = Value(storage.nbytes(), record)
            self._enter(new, value, storage)
            if old in self._elders:
                self._inherit(value, held, storage, self._elders.pop(old))
            if record is not None and place < len(record.overs):
                argument, _, matters = record.overs[place]
                record.overs[place] = (argument, weakref.ref(value), matters)

    def _inherit(
        self, value: Value, held: torch.Tensor | None, storage: torch.UntypedStorage, handles: list[weakref.ref[PlannedHandle]]
    ) -> None:
        """Give a new version its predecessor's saved tensors; if the write touched their bytes, autograd raises."""
        alive = [handle for ref in handles if (handle := ref()) is not None and handle.instead is None]
        value.saves = len(alive)
        value.tensor = as_bytes(storage) if alive and held is None and value.number in self.script.held else held
        for handle in alive:
            handle.value = value
        if value.number in self.script.elders:
            self._elders[value.number] = handles

    def move(self, number: int) -> None:
        """A value leaves for the second board, if nothing else holds it."""
        value = self.values.get(number)
        if value is None or value.tensor is None:
            return
        if not sole_owner(value.tensor.untyped_storage(), 1):
            self.grown = True
            return
        try:
            start = time.perf_counter()
            moved = value.move(self.run.board)
            seconds = time.perf_counter() - start
            self.run.tally.offload_seconds += seconds
            if moved:
                self.run.tally.offloaded_bytes += value.bytes
            if moved and self.run.stopwatch is not None:
                self.run.stopwatch.written.append((value.bytes, seconds))
        except OSError:  # the second board is full: what stays is seen before the backward
            self.grown = True

    def left_bytes(self) -> int:
        """Bytes that nothing but autograd's graph of this unit holds."""
        saved = sum(v.bytes for v in self.values.values() if v.saves and v.tensor is not None)
        kept = (k for ref in self.keeps if isinstance(k := ref(), Kept))
        return saved + sum(storage.nbytes() for storage, _ in held_alone(kept))

    def pack(self, tensor: torch.Tensor) -> Any:
        """What autograd keeps."""
        if self._delegate is not None:
            return self._pack_fallback(tensor)
        at = self.packed
        self.packed = at + 1
        number = self._packs[at] if at < len(self._packs) else -1
        if number >= 0:
            value = self.values.get(number)
            if value is not None:
                storage = tensor.untyped_storage()
                if value.weak is not None and value.weak() is storage:
                    if not value.saves and number in self.script.held:
                        value.tensor = as_bytes(storage)
                    handle = PlannedHandle(self, value, tensor)
                    if number in self.script.elders:
                        self._elders.setdefault(number, []).append(weakref.ref(handle))
                    return handle
            self.grown = True
        kept = Kept(tensor)
        self.keeps.append(weakref.ref(kept))
        return kept


def _lies_at(value: Value, address: int) -> bool:
    storage = value.storage()
    return storage is not None and storage._cdata == address


def _reads(value: Value, address: int) -> bool:
    """Whether making a value again would read a storage, at whatever remove."""

    def lies_at(argument: Argument) -> bool:
        if argument.anchor is None:
            return argument.value is not None and _lies_at(argument.value, address)
        held = argument.anchor.held
        return held is not None and held.untyped_storage()._cdata == address

    behind = records_behind(value, lambda a: a.anchor is None and a.value is not None and a.value.ticket is None)
    return any(lies_at(a) for record in behind for a in record.inputs)


def _gone() -> None:
    return None


def _uncapped(on: bool) -> None:
    """Nothing is capped."""


def _fresh(out: Any, seen: set[int]) -> list[tuple[int, torch.Tensor]]:
    """(position, tensor) of the first output on each storage that is not among those seen, in order."""
    found = []
    for i, tensor in enumerate(flatten(out)):
        if isinstance(tensor, torch.Tensor) and on_storage(tensor):
            address = tensor.untyped_storage()._cdata
            if address not in seen:
                seen.add(address)
                found.append((i, tensor))
    return found
