"""Lean interception of planned units: handles the plan's own operators, and only compares and counts the rest.

A :class:`CompiledPlan` says, for one recorded unit, which operators run in which order, which of them leave a record, and
which saved values are held weakly. A stretch of other operators than the recorded ones is a detour
(:mod:`lowtide.runtime.planned.detour`): nothing of it is dropped, and the plan goes on after it. Where there are too many, or
memory runs out, the full interception takes over: from then on :class:`PlannedMode` passes every operator to it. A backward
runs without any mode, unless it builds a graph of its own (``create_graph``); such a backward is followed like a forward.

One module: comparing an operator with the recording, recording it for replays, and handling later writes all use the same few
tables, on the hottest path of a planned step.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import ChainMap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from lowtide.base.errors import ReplayError
from lowtide.runtime.gate import Gate
from lowtide.runtime.intercept.data_swaps import Origin
from lowtide.runtime.intercept.dispatch_mode import Mode, call_under, leaves_autograd_on, make_way
from lowtide.runtime.intercept.inplace_accumulation import in_place
from lowtide.runtime.online.holders import HeldValue, Holder
from lowtide.runtime.online.lineage import by_storage, held_alone
from lowtide.runtime.online.retry import Refusals
from lowtide.runtime.planned.compiled_plan import CompiledPlan, PlannedStep
from lowtide.runtime.planned.detour import FEW, OTHERWISE, Detour, make_independent
from lowtide.runtime.planned.serving import PlannedRun
from lowtide.runtime.record.saved_tensors import Kept, detached, modified_in_place
from lowtide.runtime.storage.arguments import PLAIN_TYPES, flatten, map_tensors, overwritten_by, written_by
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
from lowtide.runtime.storage.views import Meta, as_bytes, bytes_of, meta_of, sole_owner, version_probe, view_watched
from lowtide.runtime.tensors import on_storage


@final
class PlannedHandle:
    """A saved tensor of a value that the plan evicts."""

    __slots__ = ("__weakref__", "instead", "meta", "origin", "run", "value", "version", "watched")

    def __init__(self, mode: PlannedMode, value: Value, tensor: torch.Tensor) -> None:
        """Refer to the value; of the tensor itself, only the version counter is watched, and no bytes are held."""
        self.run = mode.run
        self.value = value
        self.meta: Meta = meta_of(tensor)
        self.watched = version_probe(tensor)
        self.version = tensor._version
        self.origin = Origin.of(tensor, self)
        self.instead: torch.Tensor | None = None
        value.saves += 1

    def __del__(self) -> None:
        """Autograd has released the saved tensor."""
        if self.instead is None:
            self.value.saves -= 1

    def exchanged(self, tensor: torch.Tensor) -> None:
        """Keep the new data after an assignment to the tensor's ``.data``: backward no longer needs the old value here."""
        value = self.value
        if self.instead is None:
            value.saves -= 1
        if not value.saves and (value.record is not None or value.ticket is not None):
            value.tensor = None
        self.instead = detached(tensor)

    def unpack(self) -> torch.Tensor:
        """The tensor, recomputed or fetched if its value was evicted.

        Raises:
            RuntimeError: if it was changed in place since it was saved.
        """
        if self.watched._version != self.version:
            raise modified_in_place(self.meta, self.watched._version, self.version)
        if self.instead is not None:
            return self.instead
        storage = self.run.serve(self.value)
        return view_watched(self.watched, storage, self.meta)


@dataclass(slots=True)
class _Place:
    """Where a unit is in its plan, if there is no gate that keeps it; see :class:`~lowtide.runtime.gate.Gate`."""

    at: int = 0
    shut: bool = False


@final
class PlannedMode(Mode):
    """Dispatch mode that follows a planned forward.

    Its many fields are references to the plan's lists: the dispatch of every operator reads them, and another attribute lookup
    would cost time. Its many methods are the parts of that dispatch.

    Attributes:
        packed: number of tensors that autograd has saved.
        lost: whether the unit has left the plan, so that the full interception handles every operator.
        mismatched: whether it has left the plan because other operators ran than the recorded ones.
        unplanned: how many operators the plan did not expect.
        repeated: how many planned operators ran more often than recorded, where detours led back in the plan.
        grown: whether memory may be higher than planned, because something was larger than recorded or could not be evicted.
        changed: whether a value has another size than the recorded one, although the unit's inputs do not show it.
        forced: whether values were rematerialized before backward asked for them, mostly because a write to what they are made
            from was about to happen.
        values: the unit's live tracked values, by id; after a detour that leads back in the plan, those tracked since.
        keeps: weak references to the saved tensors and anchors that stay in memory.

    ``_awaited`` holds, by number, values without a record that records read, until autograd saves them as the plan expects.
    Other operators might run instead, and nothing else would then keep the bytes for replays.
    """

    def __init__(
        self, script: CompiledPlan, run: PlannedRun, fallback: Callable[[], Any],
        pack_fallback: Callable[[torch.Tensor], Any], out_of_memory: Callable[[BaseException], bool],
        before_write: Callable[[Any, Any, Any], None], cap: Callable[[bool], None] | None = None, *,
        room: Callable[[], int] | None = None, refusals: Refusals | None = None, resized: bool = False,
        gate: Gate | None = None, thread: int = 0,
    ) -> None:
        """Start at the beginning of a unit.

        Args:
            script: the plan to follow.
            run: serves the unit's needs.
            fallback: returns the mode that takes over when the unit leaves the plan.
            pack_fallback: the pack hook from then on.
            out_of_memory: whether an error means that memory ran out.
            before_write: called with an operator that writes in place (its schema, ``args`` and ``kwargs``) before it runs.
            cap: caps the allocator at the budget (True) or lifts the cap (False); an operator that would cross the cap leaves
                the plan. None for no cap: then any other operator than the planned one leaves it, too, as what it keeps could
                not be offloaded.
            room: the bytes that are left below the cap; None if there is none.
            refusals: tells whether an operator was refused memory under that cap although it returned.
            resized: whether the unit has other sizes than the recorded one.
            gate: runs the operators that the plan leaves alone; None: this mode does.
            thread: the one that the plan is about; 0: any, as backwards on an accelerator run in threads of their own.
        """
        super().__init__()
        self.gate = gate
        self._thread = thread
        self._place: Gate | _Place = _Place() if gate is None else gate
        self.script = script
        self.run = run
        self.packed = 0
        self.lost = False
        self.mismatched = self.changed = False
        self.grown = False
        self.forced = False
        self.unplanned = self.repeated = 0
        self._detour: Detour | None = None
        self.values: weakref.WeakValueDictionary[int, Value] = weakref.WeakValueDictionary()
        self._former: weakref.WeakValueDictionary[int, Value] = weakref.WeakValueDictionary()
        self._earlier: weakref.WeakSet[Value] = weakref.WeakSet()
        self._strange: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._extra: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        run.values = self._numbered = ChainMap(self.values, self._former)  # type: ignore[arg-type]
        self._pins: dict[int, Value] = {}
        self._elders: dict[int, list[weakref.ref[PlannedHandle]]] = {}
        self._awaited: dict[int, torch.Tensor] = {}
        self._settled = 0
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
        self._resident = script.held | script.elders
        self._fallback = fallback
        self._pack_fallback = pack_fallback
        self._out_of_memory = out_of_memory
        self._before_write = before_write
        self._delegate: Any = None
        self._cap = _uncapped if cap is None else cap
        self._caps = (False,) * len(script.again) if cap is None else script.again
        self._room = _no_room if room is None else room
        self._refusals = refusals
        self._resized = resized
        self._growth = 0.0
        if gate is not None:
            gate.weighs = resized

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator, as planned while it is the one that the plan expects; otherwise leave the plan."""
        if self._thread and self._thread != threading.get_ident():  # it has inherited the mode (`torch.jit.fork`)
            return func(*args, **(kwargs or {}))
        if self._delegate is None:
            at = self.at
            if types and not PLAIN_TYPES.issuperset(types):
                return make_way(func, types, args, kwargs)
            if leaves_autograd_on(func):
                return call_under(self, func, args, kwargs)
            if self._detour is not None:
                func = in_place(func, args)
                at = self._go_back(func)
                if at < 0:
                    return self._run_outside(func, types, args, kwargs or {})
            act = self._acts[at]
            if func is not self._funcs[at]:
                func = in_place(func, args)
                if func is not self._funcs[at] and self._begins_detour():
                    return self._run_outside(func, types, args, kwargs or {})
            follows = func is self._funcs[at] and not (self._writes[at] and self._strays(act, func, args, kwargs or {}))
            if follows and self._exposed and act is not None and act.recorded:
                follows = not self._reads_exposed(args, kwargs or {})
            if not follows and self.unplanned and self._begins_detour():
                return self._run_outside(func, types, args, kwargs or {})
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
                        out = self._call(func, args, kwargs or {}, capped=capped)
                except (RuntimeError, MemoryError) as error:
                    if not self._out_of_memory(error) or info_of(func).mutates or info_of(func).collective:
                        raise
                else:
                    if self._resized:
                        self._weigh(out)
                    self.at = at + 1
                    return out
                finally:
                    if capped:
                        self._cap(False)
            else:
                self.mismatched = True
            self.leave()
        return self._delegate.__torch_dispatch__(func, types, args, kwargs)

    @property
    def at(self) -> int:
        """Number of operators that have passed."""
        return self._place.at

    @at.setter
    def at(self, place: int) -> None:
        self._place.at = place

    @property
    def growth(self) -> float:
        """By which factor operators made more than in the recording, at most; 0 if the unit has the recorded sizes."""
        return self._growth if self.gate is None else max(self._growth, self.gate.growth)

    # --- detours ---------------------------------------------------------------------------------------------------------

    def _begins_detour(self) -> bool:
        """Begin a detour, unless too many operators were others than planned, or nothing could make room after it."""
        if self._cap is _uncapped or self.unplanned >= max(FEW, len(self._funcs)):
            return False
        self._make_independent()
        self._detour = Detour(self._funcs, self.script.places, self.at)
        self._place.shut = True
        return True

    def _make_independent(self) -> None:
        """Make what the unit has dropped independent of the plan: from here on, other operators may run than it counts on."""
        values = [v for v in self.values.values() if v.record is not None and v.record.order > self._settled]
        self.keeps += [weakref.ref(anchor) for anchor in make_independent(values)]
        self._settled = self.at
        self._awaited.clear()

    def _begin_anew(self) -> None:
        """Look up no value of the past any more: its number may be given anew, or its bytes may be other ones."""
        self._make_independent()
        for number, value in self.values.items():
            self._earlier.add(value)
            self._former[number] = value
            if (storage := value.storage()) is not None:
                self._strange[storage._cdata] = weakref.ref(storage)
        self.values.clear()
        self._pins.clear()
        self._elders.clear()
        self._settled = 0

    def _go_back(self, func: Any) -> int:
        """Go on with the plan if an operator and those before it stand in it; return its place, or -1."""
        assert self._detour is not None
        place = self._detour.way_back(func)
        if place is None:
            return -1
        if place < self.at:
            self.repeated += self.at - place
            self._begin_anew()
        self._end_detour(place)
        return place

    def _end_detour(self, place: int) -> None:
        """Go on with the plan at a place; values that were to leave before it leave now."""
        for act in self._acts[self.at : place]:
            for number in () if act is None else act.moves:
                self.move(number)
        self.at, self._detour, self._place.shut = place, None, False
        self.packed = self.script.packs_before[place]

    def _run_outside(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator that the plan does not expect."""
        assert self._detour is not None
        info = info_of(func)
        state = generator = None
        if info.seeded and not info.mutates:
            generator = generator_of(args, kwargs, (t.device for t in _tensors(args, kwargs)))
            state = None if generator is None else generator.get_state()
        again = not (info.mutates or info.collective) and (generator is not None or not info.seeded)
        if not again and self._room() < sum(map(bytes_of, _tensors(args, kwargs))):  # it could not be called again
            self.leave()
            return self._delegate.__torch_dispatch__(func, types, args, kwargs)
        self.unplanned += 1
        if info.mutates:
            self._before_write(info, args, kwargs)
            for tensor, _ in written_by(info, args, kwargs):
                if self.is_needed_by_replays(tensor):
                    self.will_write(tensor)
                    self._begin_anew()
        if again:
            self._cap(True)
        try:
            out = self._call(func, args, kwargs, capped=again)
        except (RuntimeError, MemoryError) as error:
            if not again or not self._out_of_memory(error):
                raise
        else:
            self._detour.ran(func)
            for made in flatten(out):
                if isinstance(made, torch.Tensor) and on_storage(made):
                    self._strange[made.untyped_storage()._cdata] = weakref.ref(made.untyped_storage())
            return out
        finally:
            if again:
                self._cap(False)
        if generator is not None:
            generator.set_state(state)
        self.leave()
        return self._delegate.__torch_dispatch__(func, types, args, kwargs)

    def _holds_more(self, storage: torch.UntypedStorage) -> None:
        """Note that a saved tensor or a record holds a storage against the plan: that of a value, or made on a detour."""
        address = storage._cdata
        for known in (self._strange, self._protected):
            found = known.get(address)
            if found is not None and found() is storage:
                self._extra[address] = found

    def extra_bytes(self) -> int:
        """Bytes that the plan would have evicted or knows nothing of."""
        return sum(storage.nbytes() for ref in self._extra.values() if (storage := ref()) is not None)

    @property
    def varies(self) -> bool:
        """Whether the unit also ran operators that the plan does not expect, but not too many to go on with it."""
        return self.unplanned > 0 and not self.mismatched

    @property
    def varies_much(self) -> bool:
        """Whether so many operators were not expected that the recording does not suit the unit."""
        return self.unplanned > len(self._funcs) // OTHERWISE

    @property
    def is_longer(self) -> bool:
        """Whether the unit ran many of the plan's operators more often than the recorded one, which was shorter."""
        return self.repeated > len(self._funcs) // OTHERWISE

    def arrives(self, place: int) -> bool:
        """Whether the unit is where the plan expects it before a backward; a detour ends there."""
        if self._detour is not None and place >= self.at:
            self._end_detour(place)
        if self.unplanned:
            self._make_independent()
        return self.at == place

    # --- the end -----------------------------------------------------------------------------------------------------

    def let_go(self) -> None:
        """End the unit: from here on, values live only as long as their handles do."""
        self._pins.clear()
        self._awaited.clear()

    def prune(self, *, followed: bool) -> None:
        """Unpin values that no later operator looks up; from here on they live only as long as their handles do.

        Called when a backward begins, and when one that is followed has ended.

        Args:
            followed: whether the backward is followed: autograd may save further values within it.
        """
        if not followed:
            self._awaited.clear()
        last = self.script.last_use
        self._pins = {n: v for n, v in self._pins.items() if last.get(n, -1) >= self.at}

    def owes(self) -> bool:
        """Whether autograd may still ask for values that this unit saved."""
        return any(value.saves for value in self._live())

    def is_awaited(self) -> bool:
        """Whether a graph of this unit is alive: autograd holds saved tensors of it."""
        return self.owes() or any(isinstance(ref(), Kept) for ref in self.keeps)

    def _live(self) -> list[Value]:
        return [*self.values.values(), *self._earlier]

    def offload_before_backward(self) -> None:
        """Offload, once, the values that leave just before the first backward that is not followed."""
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
        """Leave the plan: from here on, the full interception handles every operator."""
        self.lost = self._place.shut = True
        self._make_independent()
        self.let_go()
        self._delegate = self._fallback()

    def open_gate(self, gate: Gate | None) -> None:
        """Let what only has to fit pass by a gate, after the plan was left; None: there is none."""
        if gate is not None and self.gate is None:
            self.gate = gate
            gate.enter(self)

    def _protect(self, storage: torch.UntypedStorage) -> None:
        """Protect a storage that replays read: only the operator that wrote it in the recording may write it."""
        self._protected[storage._cdata] = weakref.ref(storage)

    def is_needed_by_replays(self, tensor: torch.Tensor) -> bool:
        """Whether a replay of this unit may still read a tensor's storage."""
        if not on_storage(tensor):
            return False
        address = tensor.untyped_storage()._cdata
        found = self._protected.get(address)
        return (found is not None and found() is not None) or self._is_read(address)

    def has_served(self, storage: torch.UntypedStorage) -> bool:
        """Whether autograd got a storage for a saved tensor: nothing may be added to it in place."""
        return self.run.has_served(storage)

    def _is_read(self, address: int) -> bool:
        """Whether a later replay may read a storage through an anchor, because no replay can make its bytes again."""
        return any(ref() is not None for ref in self._readers.get(address, ()))

    def spoil(self, tensor: torch.Tensor) -> None:
        """A tensor is about to be written: from here on, replays that read it through an anchor fail.

        If an operator of the unit made it, what depends on it is rematerialized and kept instead, as by :meth:`will_write`.
        """
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
        """The live storages that are exposed to code outside torch."""
        return [storage for ref in self._exposed.values() if (storage := ref()) is not None]

    def _reads_exposed(self, args: Any, kwargs: Any) -> bool:
        """Whether an operator that may be replayed reads a storage that code outside torch may write in the meantime.

        If the storage was already exposed in the recording, the plan does not replay the operator.
        """
        exposed = {storage._cdata for storage in self.exposed()}
        read = (t for t in flatten((*args, *kwargs.values())) if isinstance(t, torch.Tensor) and on_storage(t))
        return any(t.untyped_storage()._cdata in exposed for t in read)

    def will_write(self, tensor: torch.Tensor) -> None:
        """A write outside the plan is about to happen: rematerialize and keep every value whose replay reads the tensor.

        Values that autograd has not saved yet are not made again either: :meth:`pack` keeps them.
        """
        if not self.is_needed_by_replays(tensor):
            return
        address = tensor.untyped_storage()._cdata
        asked = self._asked()
        unsaved = [v for v in self.values.values() if not v.saves and (_lies_at(v, address) or _reads(v, address))]
        written = [v for v in asked if _lies_at(v, address)]
        made_from = [v for v in asked if v.ticket is None and _reads(v, address)]
        held = [value for value in (*written, *made_from) if self._hold(value)]
        for value in (*held, *unsaved):
            value.record = None
        for value in written:
            if value.tensor is not None:
                value.ticket = None

    def _strays(self, act: PlannedStep | None, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether a writing operator touches storages that the plan depends on, other than those it wrote in the recording."""
        overwrites = () if act is None else act.overwrites
        info = info_of(func)
        self._before_write(info, args, kwargs)
        for i, (_, tensor, secret) in enumerate(overwritten_by(info, args, kwargs)):
            old = overwrites[i][0] if i < len(overwrites) else -1
            if secret:
                continue
            if old < 0:
                # In the recording, a recorded write to an untracked value covered it whole: no replay makes the old bytes.
                covered = act is not None and act.recorded
                if self.is_needed_by_replays(tensor) or (covered and not covers(info, tensor)):
                    return True
                continue
            value = self.values.get(old)
            storage = None if value is None else value.storage()
            if storage is None or storage._cdata != tensor.untyped_storage()._cdata:
                return True
        return False

    def hold_all(self) -> None:
        """Rematerialize and keep everything that autograd may still ask for, because later writes are not observed."""
        for value in self._asked():
            self._hold(value)

    def _asked(self) -> list[Value]:
        """Values that autograd may still ask for."""
        return [v for v in self._live() if v.saves and not v.superseded]

    def _hold(self, value: Value) -> bool:
        """Hold a value from here on, rematerialized if it is away.

        Returns:
            False if it cannot be rematerialized; unpacking it later raises :class:`ReplayError`.
        """
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
        start = time.perf_counter()
        info = info_of(func)
        record = self._record(act, func, info, args, kwargs) if act.recorded else None
        out = self._call(func, args, kwargs, capped=self._caps[self.at])
        self._note_outputs(act, record, args, kwargs, out)
        self._note_writes(act, record, info, args, kwargs)
        if self.run.stopwatch is not None:
            besides = time.perf_counter() - start - self.run.stopwatch.forward[-1]
            (self.run.stopwatch.recording if act.recorded else self.run.stopwatch.noting).append(besides)
        return out

    def _weigh(self, out: Any) -> None:
        """Compare the bytes that an operator made with those that it made in the recording; small ones do not count."""
        if recorded := self.script.weighed[self.at]:
            made = sum(bytes_of(t) for t in flatten(out) if isinstance(t, torch.Tensor))
            self._growth = max(self._growth, made / recorded)

    def _call(self, func: Any, args: Any, kwargs: Any, *, capped: bool) -> Any:
        refusals = self._refusals if capped else None
        if refusals is not None:
            refusals.begin()
        start = time.perf_counter()
        out = func(*args, **kwargs)
        seconds = time.perf_counter() - start
        if refusals is not None:
            refusals.check()
        if self._clocked is not None:  # operators that failed are not timed
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
                if value is not None and value.record is None and value.ticket is None and value.tensor is None:
                    self._awaited.setdefault(value.number, as_bytes(storage))
            elif argument.anchor is not None and not (writes or secret):
                argument.witness = self._witness(tensor)
                if self.unplanned:
                    self._holds_more(storage)
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
        """An anchor that already holds a storage's current bytes for replays, if there is one."""
        anchors = (ref() for ref in self._readers.get(address, ()))
        return next((a for a in anchors if a is not None and a.held is not None and not a.stale), None)

    def _witness(self, tensor: torch.Tensor) -> int | None:
        """Checksum by which unseen writes to a tensor that replays read are detected: a loader may refill a batch's memory.

        None for parameters and their views, for tensors that require grad, and where there is no plain storage.
        """
        if tensor.requires_grad or isinstance(tensor if tensor._base is None else tensor._base, torch.nn.Parameter):
            return None
        if not on_storage(tensor):
            return None
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor._version, *meta_of(tensor))
        known, found = self._witnessed.get(key, (_gone, None))
        if known() is not storage:  # another storage may have taken a dead one's address
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
            if (made := storage.nbytes()) != size and not self._resized:
                self.changed = True
                if size >= self.script.significant_bytes:
                    self._growth = max(self._growth, made / size)
            value = Value(storage.nbytes(), record)
            self._enter(number, value, storage)
            if record is not None:
                record.outs.append((position, weakref.ref(value)))

    def _note_writes(self, act: PlannedStep, record: Record | None, info: Any, args: Any, kwargs: Any) -> None:
        if not act.overwrites:
            return
        written = overwritten_by(info, args, kwargs)
        for (old, new), (place, tensor, _) in zip(act.overwrites, written, strict=False):
            self._awaited.pop(old, None)
            before = self.values.get(old)
            held = None if before is None else before.tensor
            if before is not None:
                before.superseded, before.weak, before.tensor = True, None, None
            if new < 0:
                if before is not None:
                    before.record = None if before.saves else before.record  # backward must not get the old bits
                    self._protected.pop(tensor.untyped_storage()._cdata, None)
                continue
            storage = tensor.untyped_storage()
            value = Value(storage.nbytes(), record)
            self._enter(new, value, storage)
            if before is not None and old in self._elders:
                before.saves = 0
                self._inherit(value, held, storage, self._elders.pop(old))
            if record is not None and place < len(record.overs):
                argument, _, matters = record.overs[place]
                record.overs[place] = (argument, weakref.ref(value), matters)

    def _inherit(
        self, value: Value, held: torch.Tensor | None, storage: torch.UntypedStorage, handles: list[weakref.ref[PlannedHandle]]
    ) -> None:
        """Give a new version its predecessor's saved tensors; unpacking raises for those whose bytes the write touched."""
        alive = [handle for ref in handles if (handle := ref()) is not None and handle.instead is None]
        value.saves = len(alive)
        value.tensor = as_bytes(storage) if alive and held is None and value.number in self.script.held else held
        for handle in alive:
            handle.value = value
        if value.number in self.script.elders:
            self._elders[value.number] = handles

    def move(self, number: int) -> None:
        """Offload a value, unless something else holds its storage."""
        value = self._numbered.get(number)
        if value is None or value.tensor is None:
            return
        if not sole_owner(value.tensor.untyped_storage(), value.own_aliases()):
            self.grown = True
            return
        try:
            start = time.perf_counter()
            moved = value.move(self.run.tier)
            seconds = time.perf_counter() - start
            self.run.tally.offload_seconds += seconds
            if moved:
                self.run.tally.offloaded_bytes += value.bytes
            if moved and self.run.stopwatch is not None:
                self.run.stopwatch.written.append((value.bytes, seconds))
        except OSError:  # the offload tier is full; the check before the backward notices
            self.grown = True

    def holders(self) -> dict[int, list[Holder]]:
        """By address, what holds a storage for autograd and replays and can leave it to the offload tier."""
        holders: list[Holder] = [kept for ref in self.keeps if (kept := ref()) is not None]
        holders += [HeldValue(v) for v in self._live() if v.tensor is not None and not v.busy]
        return by_storage(holders)

    def left_bytes(self) -> int:
        """Bytes held only by autograd's graph of this unit."""
        saved = sum(v.bytes for v in self._live() if v.saves and v.tensor is not None)
        kept = (k for ref in self.keeps if isinstance(k := ref(), Kept))
        return saved + sum(storage.nbytes() for storage, _ in held_alone(kept))

    def pack(self, tensor: torch.Tensor) -> Any:
        """The object that autograd keeps in the tensor's place (pack hook)."""
        if self._thread and self._thread != threading.get_ident():
            return Kept(tensor)
        if self.gate is not None:
            self.gate.rearm()
        if self._delegate is not None:
            return self._pack_fallback(tensor)
        at = self.packed if self._detour is None else len(self._packs)
        self.packed = at + 1
        number = self._packs[at] if at < len(self._packs) else -1
        if number >= 0:
            value = self.values.get(number)
            if value is not None and (value.record is not None or number in self._resident):
                storage = tensor.untyped_storage()
                if value.weak is not None and value.weak() is storage:
                    self._awaited.pop(number, None)
                    if not value.saves and number in self.script.held:
                        value.tensor = as_bytes(storage)
                    handle = PlannedHandle(self, value, tensor)
                    if number in self.script.elders:
                        self._elders.setdefault(number, []).append(weakref.ref(handle))
                    return handle
            self.grown = True
        if self.unplanned and on_storage(tensor):
            self._holds_more(tensor.untyped_storage())
        kept = Kept(tensor)
        self.keeps.append(weakref.ref(kept))
        return kept


def _tensors(args: Any, kwargs: Any) -> list[torch.Tensor]:
    return [t for t in flatten((*args, *kwargs.values())) if isinstance(t, torch.Tensor)]


def _lies_at(value: Value, address: int) -> bool:
    storage = value.storage()
    return storage is not None and storage._cdata == address


def _reads(value: Value, address: int) -> bool:
    """Whether remaking a value would read a storage, directly or through other replays."""

    def lies_at(argument: Argument) -> bool:
        if argument.anchor is None:
            return argument.value is not None and _lies_at(argument.value, address)
        held = argument.anchor.held
        return held is not None and held.untyped_storage()._cdata == address

    behind = records_behind(value, lambda a: a.anchor is None and a.value is not None and a.value.ticket is None)
    return any(lies_at(a) for record in behind for a in record.inputs)


def _gone() -> None:
    return None


def _no_room() -> int:
    return 0


def _uncapped(on: bool) -> None:
    """Stand in for ``cap`` where there is no cap."""


def _fresh(out: Any, seen: set[int]) -> list[tuple[int, torch.Tensor]]:
    """(position, tensor) of the first output on each storage that is not in ``seen``, in order."""
    found = []
    for i, tensor in enumerate(flatten(out)):
        if isinstance(tensor, torch.Tensor) and on_storage(tensor):
            address = tensor.untyped_storage()._cdata
            if address not in seen:
                seen.add(address)
                found.append((i, tensor))
    return found
