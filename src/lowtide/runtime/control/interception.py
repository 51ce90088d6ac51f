"""The interception of a run: the dispatch mode that is on, the recorder of operators, and the memory meter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any, Final, final

import torch
from lowtide.planning.unit.plan_file import Plan, dropped_sites
from lowtide.runtime.budget import SLACK_BYTES, Budget
from lowtide.runtime.device.accelerator import HOST, is_accelerator
from lowtide.runtime.device.accelerator_meter import AcceleratorMeter
from lowtide.runtime.device.file_tier import FileTier
from lowtide.runtime.device.find_meter import find_meter
from lowtide.runtime.device.heap_meter import HeapMeter
from lowtide.runtime.device.memory_meter import Meter
from lowtide.runtime.device.pinned_tier import PinnedTier
from lowtide.runtime.gate import Gate, gate_of, script_of
from lowtide.runtime.intercept.mode_stack import ModeStack
from lowtide.runtime.intercept.phases import PhaseTracker
from lowtide.runtime.online.eviction import Evictor
from lowtide.runtime.online.mode import OnlineMode
from lowtide.runtime.planned.mode import PlannedMode
from lowtide.runtime.planned.retained_graphs import RetainedGraphs, WriteMode
from lowtide.runtime.record.quiet_recorders import NO_UNIT
from lowtide.runtime.record.saved_tensors import SavedTensors
from lowtide.runtime.record.trace_recorder import TraceRecorder
from lowtide.runtime.storage.arguments import written_by
from lowtide.runtime.storage.ledger import Ledger
from lowtide.runtime.storage.op_schema import OpInfo
from lowtide.runtime.units.recorded_unit import RetainedBytes

FAST: Final = 1e9
"""Bytes per second at which offloading is so cheap that recomputing need not be weighed against it."""


@final
class Interception:
    """Installs and removes dispatch modes and hooks, and ties recorder, meter and evictor together; one per runtime.

    Its many methods are the states that interception can be in (full, by the queue, by a plan, watching writes, none), and
    what the runtime asks about them.

    Attributes:
        clock: reports phases, module calls and optimizer steps.
        budget: the budget to hold.
        ledger: maps each live storage to its value.
        meter: counts the device's bytes.
        tier: where the device's values may be offloaded.
        evictor: drops and offloads saved values.
        saver: packs the tensors that autograd saves.
        online: the mode that intercepts every operator.
        stack: the mode and the saved-tensor hooks that are on.
        retained: graphs of earlier planned units.
    """

    def __init__(self, clock: PhaseTracker, budget: Budget) -> None:
        """Install nothing yet."""
        self.clock = clock
        self.budget = budget
        self.ledger = Ledger(self._counts)
        self.meter = find_meter(lambda: self.ledger.live_bytes)
        self.tier = _tier_of(self.meter)
        self.evictor = Evictor(self.meter, self.ledger, self.tier, budget, NO_UNIT)
        self.saver = SavedTensors(self.ledger, self.evictor)
        self.online = OnlineMode(clock, self.ledger, self.evictor)
        self.stack = ModeStack()
        self.retained = RetainedGraphs()

    @property
    def recorder(self) -> TraceRecorder:
        """The recorder of the running unit; ``NO_UNIT`` between units."""
        return self.evictor.recorder

    def sees_what_is_saved(self) -> bool:
        """Whether the calling thread is the one that is followed, and the script has no saved-tensor hooks of its own on."""
        return self.clock.ours and not self.stack.hooks_covered()

    def events_so_far(self) -> int:
        """The number of events that the running unit's recorder has noted."""
        return len(self.recorder.events) if self.recorder.active else 0

    def _counts(self, storage: torch.UntypedStorage) -> bool:
        return self.meter.counts(storage)

    def count_on(self, device: torch.device) -> None:
        """The model turned out to live on an accelerator: count memory there."""
        self.meter = AcceleratorMeter(device)
        self.tier = _tier_of(self.meter)
        self.evictor.use(self.meter, self.tier)
        self.measure_tier()

    def measure_tier(self) -> None:
        """Time copies to and from an accelerator before the first step, while it has the most room."""
        if isinstance(self.meter, AcceleratorMeter):
            with self.meter.hidden():
                _ = self.evictor.bandwidth

    # --- every operator ----------------------------------------------------------------------------------------------

    def watch_fully(self, recorder: TraceRecorder, *, remember: bool) -> None:
        """Intercept every operator to hold the budget online.

        Args:
            recorder: the recorder of the unit that begins; ``NO_UNIT`` if none does.
            remember: whether operators leave records, from which their outputs can be made again.
        """
        self.clock.detailed = True
        self._note_into(recorder, remember=remember, write_listeners=(self.retained,))
        self.evictor.left_plan = None
        self._put_online(None)

    def can_hold_by_queue(self) -> bool:
        """Whether the budget can be held by offloading what autograd saves, without looking at operators."""
        evictor = self.evictor
        if not (self.budget.bytes and self.meter.capped and self.meter.device == HOST) or evictor.exempt.names:
            return False
        speed = evictor.known_bandwidth
        return speed is not None and min(speed.write, speed.read) >= FAST

    def watch_what_is_saved(self, recorder: TraceRecorder) -> None:
        """Hold the budget online by offloading what autograd saves; operators only have to fit.

        Args:
            recorder: the recorder of the unit that begins.
        """
        self.clock.detailed = False
        self._note_into(recorder, remember=False, write_listeners=(self.retained,))
        self.evictor.left_plan = None
        gate = self._open_gate(None)
        self._queue_only(gate)
        self._put_online(gate)

    def _put_online(self, gate: Gate | None) -> None:
        if self.stack.mode is self.online and gate is self.online.gate:
            return
        if self.stack.mode is self.online:
            self.stack.take()
        if self.online.gate is not None:
            self.online.gate.leave()  # a mode of the script may cover the online mode, which then stays on
        self.online.gate = gate
        if self.stack.mode is not self.online:
            self.stack.put(self.online, self.saver.pack, self.saver.unpack)

    def _queue_only(self, gate: Gate | None) -> None:
        self.saver.queue_only, self.online.opens_gate = True, gate is not None

    def _open_gate(self, gate: Gate | None) -> Gate | None:
        """A gate, or the given one, through which pass all operators that only have to fit."""
        limit = self.budget.limit_bytes - SLACK_BYTES
        opened = self.gate_under(limit, script_of([], [], [], [])) if gate is None else self._capped(gate, limit)
        if opened is not None:
            opened.open = True
        return opened

    def gate_under(self, limit_bytes: int | None, script: Any) -> Gate | None:
        """A gate for what :func:`~lowtide.runtime.gate.script_of` returned, under a cap; None where there is none.

        Args:
            limit_bytes: live bytes that operators may not cross; None for no cap.
            script: what the gate must know of a plan; None where there is no gate.
        """
        if script is None or not (limit_bytes is None or isinstance(self.meter, HeapMeter)):
            return None
        return self._capped(gate_of(script), limit_bytes)

    def _capped(self, gate: Gate, limit_bytes: int | None) -> Gate:
        if limit_bytes is not None and isinstance(self.meter, HeapMeter):
            gate.cap(*self.meter.cells(), max(limit_bytes, 1))
        return gate

    def take_over(self, plan: PlannedMode, recorder: TraceRecorder) -> OnlineMode:
        """A planned forward left its recording: hold the budget online for the rest of the unit."""
        self.evictor.left_plan = plan
        plan.run.evictor = self.evictor
        lightly = self.can_hold_by_queue()
        self.clock.detailed = not lightly
        self._note_into(recorder, remember=not lightly, write_listeners=(plan, self.retained))
        if lightly:
            plan.open_gate(self._open_gate(plan.gate))
            self._queue_only(plan.gate)
        for storage in plan.exposed():
            (self.ledger.find(storage) or self.ledger.enter(storage, None)).tainted = True
        return self.online

    def note_nothing(self) -> None:
        """A unit ended: values that are made or saved from now on belong to no unit."""
        recorder = self.recorder
        self._note_into(NO_UNIT, remember=False)
        recorder.close()
        self.evictor.queue.forget_the_dead()
        if recorder.active and self.saver.outstanding <= 0:
            self.ledger.forget()

    def _note_into(self, recorder: TraceRecorder, *, remember: bool, write_listeners: tuple[Any, ...] = ()) -> None:
        self.evictor.recorder = recorder
        self.saver.queue_only = self.online.opens_gate = False
        self.ledger.on_death = recorder.gone if recorder.active else None
        self.online.begin(remember=remember, write_listeners=write_listeners)

    def drop_first(self, plan: Plan | None) -> bool:
        """Make the online policy drop at once what a plan for another base drops; returns whether the plan drops anything."""
        sites = dropped_sites(plan) if plan is not None else frozenset()
        self.evictor.planned = (lambda site, slot: (site.module, site.op, site.nth, slot) in sites) if sites else None
        return bool(sites)

    def holds_on_line(self) -> bool:
        """Whether every operator is intercepted to hold the budget online."""
        return bool(self.budget.bytes) and self.stack.mode is self.online and not self.online.passive

    # --- a plan ------------------------------------------------------------------------------------------------------

    def follow(self, plan: PlannedMode) -> bool:
        """Put a plan's mode on; False if the script has a mode of its own on."""
        return self.stack.put(plan, plan.pack, self.saver.unpack)

    def follow_again(self, plan: PlannedMode) -> None:
        """Continue a planned unit after something that was none of its operators (a backward, an update).

        If the script has a mode of its own on, everything that the plan dropped is made resident now.
        """
        if self.stack.mode is not plan and not self.follow(plan):
            plan.hold_all()

    def cap(self, limit_bytes: int, on: bool) -> None:
        """Cap the allocator, or lift the cap."""
        self.meter.cap(max(limit_bytes, 1) if on else 0)

    def out_of_memory(self) -> Callable[[BaseException], bool]:
        """A function that tells whether an error raised from now on means that memory ran out."""
        denied = self.meter.denied()
        return lambda error: self.evictor.operators.is_out_of_memory(error, denied)

    def end_plan(self, plan: PlannedMode) -> None:
        """The unit that followed a plan, or left it, is over: autograd may still ask for its saved tensors, but no more."""
        self.stack.take()
        plan.let_go()
        self.retained.add(plan)

    # --- watching writes when nothing else is on ---------------------------------------------------------------------

    def watch_nothing(self) -> None:
        """Intercept nothing, except writes that affect what earlier units saved."""
        self.clock.detailed = False
        self.stack.take()
        self.writes_unseen()
        self.watch_retained()

    def watch_retained(self) -> None:
        """If nothing else is on, watch writes for as long as graphs of earlier planned units are retained."""
        left = self.retained.left()
        if self.stack.mode is None and left and not self.stack.put_mode(WriteMode(self.retained)):
            self.retained.hold_all()
        elif isinstance(self.stack.mode, WriteMode) and not left:
            self.stack.take()

    def watch_writes_of(self, plan: PlannedMode) -> None:
        """Watch writes in a planned backward in which code of the script may run."""
        self.stack.put(WriteMode(plan, self.retained), self.saver.pack, self.saver.unpack, within=True)

    def update_begins(self, plan: PlannedMode | None, *, closure: bool) -> None:
        """An optimizer is about to step: its operators belong to no unit, but may write to what replays read.

        Args:
            plan: the plan that the unit follows, if it follows one.
            closure: whether the optimizer was given a closure, which runs forwards and backwards before the update.
        """
        self.retained.updating = not closure
        self.online.updating = not (closure or self.saver.awaited)
        if plan is None and not isinstance(self.stack.mode, WriteMode):
            return
        self.stack.take()
        listeners = (self.retained,) if plan is None else (plan, self.retained)
        if self.stack.mode is None and (plan is not None or self.retained.left()):
            self.stack.put_mode(WriteMode(*listeners), within=True)

    def update_is_over(self) -> None:
        """The update is over: later writes are not the optimizer's."""
        self.retained.updating = self.online.updating = False

    def writes_unseen(self) -> None:
        """Recompute earlier units' dropped saved tensors now: the writes that follow are not observed."""
        if self.saver.outstanding > 0:
            self.evictor.before_unseen_writes()

    def before_planned_write(self, info: OpInfo, args: Any, kwargs: Any) -> None:
        """A planned operator is about to write in place."""
        self.writes_unseen()
        self.tell_retained(tensor for tensor, _ in written_by(info, args, kwargs))

    def tell_retained(self, written: Iterable[torch.Tensor]) -> None:
        """Tensors are about to be written where no mode sees it: tell the retained graphs."""
        if self.retained.left():
            for tensor in written:
                self.retained.will_write(tensor)

    # --- what earlier units left -------------------------------------------------------------------------------------

    def retained_bytes(self, last_plan: PlannedMode | None) -> RetainedBytes:
        """What graphs of earlier units still hold; ``last_plan`` is the plan that the last of them followed, if any."""
        evictor, queue = self.evictor, self.evictor.queue
        planned = 0 if last_plan is None else last_plan.left_bytes()
        if self.saver.outstanding <= 0:
            return RetainedBytes(planned)
        there = planned + self.ledger.saved_bytes() + queue.there_bytes()
        return RetainedBytes(there, evictor.away_bytes() + queue.away_bytes(), evictor.has_dropped())

    def hold_everything(self) -> None:
        """Interception ends: make resident what the script may still ask for, as far as there is memory for it."""
        with contextlib.suppress(RuntimeError, MemoryError):
            self.budget.lift()
            self.evictor.before_unseen_writes()
            self.retained.hold_all()

    def silence(self) -> None:
        """Intercept nothing in this process: it is a forked child that inherited the interpreter."""
        self.online.passive = True
        self.saver.keep_only = True
        with contextlib.suppress(AssertionError, RuntimeError):
            self.stack.take()


def _tier_of(meter: Meter) -> FileTier | PinnedTier:
    """The tier to which values on the meter's device may be offloaded."""
    return PinnedTier(meter.device) if is_accelerator(meter.device) else FileTier()
