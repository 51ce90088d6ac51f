"""Records a plain run of a script: which blocks appear, are saved and are freed, and how many bytes are live.

The recorder keeps nothing alive that the plain run would free, and draws no conclusions: the reader
(:mod:`lowtide.recording.recorded_step`) derives names, roles and causes from the entries written here.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

import torch
from lowtide.base.forks import weakly
from lowtide.base.trace import Phase
from lowtide.probe.marks import Rounds
from lowtide.recording.file_format import CARRIED, EntryKind, Role
from lowtide.recording.summary import summarize_step
from lowtide.recording.writer import Writer
from lowtide.runtime.device.accelerator import counted_device_of
from lowtide.runtime.device.accelerator_meter import AcceleratorMeter
from lowtide.runtime.device.find_meter import find_meter
from lowtide.runtime.device.heap_meter import counters
from lowtide.runtime.early_stop import StepLimitReached
from lowtide.runtime.intercept.bypass import Bypass
from lowtide.runtime.intercept.dispatch_mode import Mode, call_under, leaves_autograd_on, make_way
from lowtide.runtime.intercept.inplace_accumulation import in_place
from lowtide.runtime.intercept.mode_sensitive_backward import ModeSensitiveBackward, Unseen
from lowtide.runtime.intercept.mode_stack import ModeStack
from lowtide.runtime.intercept.phases import PhaseTracker
from lowtide.runtime.record.attribution import Attribution
from lowtide.runtime.record.block_table import BlockTable
from lowtide.runtime.record.live_blocks import RecordedSave, SavedWatch
from lowtide.runtime.record.operator_observer import OperatorObserver
from lowtide.runtime.record.recording_state import NOWHERE, RecordingState
from lowtide.runtime.record.roles import RoleBook
from lowtide.runtime.record.saved_tensors import Kept
from lowtide.runtime.record.step_retention import StepRetention
from lowtide.runtime.record.tensor_parts import parts_of
from lowtide.runtime.storage.arguments import PLAIN_TYPES
from lowtide.runtime.tensors import tensors_in, tensors_so_far


def _unpack(packed: Kept | RecordedSave) -> torch.Tensor:
    return packed.unpack()


@final
class _WatchMode(Mode):
    """Dispatch mode that observes every operator below autograd."""

    def __init__(self, observer: OperatorObserver, bypass: Bypass) -> None:
        super().__init__()
        self._observer, self._bypass = observer, bypass
        self.passive = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Observe one operator."""
        if not PLAIN_TYPES.issuperset(types):
            return make_way(func, types, args, kwargs)
        if leaves_autograd_on(func):
            return call_under(self, func, args, kwargs)
        kwargs = kwargs or {}
        if self.passive:
            return func(*args, **kwargs)
        self.passive = True
        try:
            if not self._bypass.transforming:  # under a function transform, the plain run is out of place, too
                func = in_place(func, args)
            return self._observer.observe(func, args, kwargs)
        finally:
            self.passive = False


@final
@dataclass(slots=True)
class _RunningStep:
    """The current step.

    Attributes:
        start: seconds from the recording's beginning to the step's.
        start_bytes: live bytes when it began.
        high: peak bytes of the run up to its beginning.
        carried: the blocks that were live when it began, an array of :data:`CARRIED`.
        stepped: ids of the optimizers that have stepped in it; ``rounds`` counts the rounds of all optimizers that are over.
        forwards, backwards: how many have run in it; forwards without gradients do not count.
    """

    start: float = 0.0
    start_bytes: int = 0
    high: int = 0
    carried: NDArray[np.void] = field(default_factory=lambda: np.zeros(0, dtype=CARRIED))
    stepped: set[int] = field(default_factory=set)
    rounds: int = 0
    forwards: int = 0
    backwards: int = 0


@final
class RunRecorder:
    """Records the process's torch operators, or only its phases; one per process. Listens to its :class:`PhaseTracker`."""

    def __init__(self, writer: Writer, *, operators: bool, steps: int = 0) -> None:
        """Prepare to record phases and, with ``operators``, each operator; end the script after ``steps`` steps (0: never)."""
        self._most = steps
        self._heap = counters()
        self.state = state = RecordingState(writer, find_meter(lambda: self.blocks.seen_bytes), operators)
        self.clock = PhaseTracker(self, ModeSensitiveBackward(self))
        self.clock.detailed = operators
        self._stack = ModeStack()
        self._bypass = Bypass(self._stack, self.clock, self._run_region, only_hooks=True)
        self._retention = StepRetention(state)
        self.blocks = BlockTable(state, self._retention.steps)
        self._roles = RoleBook(state, self.blocks)
        self._saved = SavedWatch(state.write)
        self._attribution = Attribution(state, self.clock, self._roles)
        self._observer = OperatorObserver(state, self.clock, self.blocks, self._saved, self._attribution, self._heap)
        self._mode = _WatchMode(self._observer, self._bypass)
        self._running = _RunningStep()
        self._high = 0
        self._rounds = Rounds()
        self._idle: weakref.WeakSet[Any] = weakref.WeakSet()
        self.clock.on_optimizer = self._idle.add
        writer.name("")

    # --- on and off --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start recording."""
        state = self.state
        state.active = True
        os.register_at_fork(after_in_child=weakly(self.forked))
        self.clock.install()
        self._bypass.install()
        state.meter.reset_op_peak()
        self.blocks.library_begins()
        self._begin_journal()
        state.write(EntryKind.PHASE, live=state.meter.live(), size=self._outside())
        if state.operators:
            self._meet_what_is_there()
            self._stack.put(self._mode, self._pack, _unpack)
            self.clock.settle()

    def _meet_what_is_there(self) -> None:
        """Enter tensors that existed before the recording: all of a notebook's; a plain script has none yet.

        They are sorted because the garbage collector lists them in an arbitrary order, and two recordings of one script must
        number them alike.
        """
        plain = (t for t in tensors_so_far() if type(t) in PLAIN_TYPES)
        parts = sorted((p for t in plain for p in parts_of(t)), key=lambda p: (p.nbytes, str(p.dtype), tuple(p.shape)))
        for part in parts:
            storage = part.untyped_storage()
            if self.blocks.find(storage) is None and self.state.meter.counts(storage):
                self.blocks.enter(storage, part, NOWHERE, met=True)

    def stop(self, *, complete: bool = True) -> None:
        """Stop recording and close the current step; ``complete`` says that it ran to its end."""
        state = self.state
        if not state.active:
            return
        self._mode.passive = True
        if state.operators and not complete:
            with contextlib.suppress(AttributeError, RuntimeError):  # a failure may have left the script's objects half made
                self._roles.recognise_all()
        peak = self._observer.peak_so_far()
        state.write(EntryKind.PHASE, live=state.meter.live(), peak=peak, size=self._outside())
        state.active = False
        self._stack.take()
        self.clock.remove()
        self._bypass.remove()
        running = self._running
        if state.step < 0 or not complete or running.forwards or running.backwards or running.stepped:
            self._close_step(complete=complete)
        self.blocks.close()

    @property
    def knows_all_uses(self) -> bool:
        """Whether the last use of every block is known: the script was not ended early, and the table of uses is not full."""
        return not (self._most and self.state.step >= self._most) and self.blocks.knows_all_uses

    def forked(self) -> None:
        """Stop recording in a forked child (a data loader's worker), which inherits the interpreter."""
        if self.state.active:
            self.state.active = False
            self._mode.passive = True
            self.clock.remove()

    def _begin_journal(self) -> None:
        state = self.state
        live = state.meter.live()
        self._running = running = _RunningStep(state.now(), live, max(self._high, live), self.blocks.rows())
        state.writer.journal.begin(state.step, running.start, live, running.high, running.carried)

    def _outside(self) -> int:
        """Peak heap bytes outside torch's allocator since the last call; 0 without the heap counter."""
        heap = self._heap
        if heap is None:
            return 0
        highest, now = int(heap.outside_peak), int(heap.heap_live) - int(heap.tensor_live)
        heap.outside_peak = now
        return max(highest, now, 0)

    # --- steps and phases --------------------------------------------------------------------------------------------

    def phase_begins(self, phase: Phase) -> None:
        """Enter another phase, and first another step if the current one is over.

        Raises:
            StepLimitReached: if the recorder's limit of steps is reached.
        """
        state = self.state
        live = state.meter.live()
        peak = self._observer.end_phase(live)
        self._high = max(self._high, peak)
        if phase in (Phase.ZERO_GRAD, Phase.FORWARD) and self._step_is_over():
            state.phase = phase
            state.write(EntryKind.PHASE, live=live, peak=peak, size=self._outside())
            self._close_step(complete=True)
            self._attribution.step_begins()
            state.step += 1
            self._begin_journal()
            if self._most and state.step >= self._most:
                raise StepLimitReached
            peak = live
        state.phase = phase
        state.write(EntryKind.PHASE, live=live, peak=peak, size=self._outside())

    def _step_is_over(self) -> bool:
        """Whether the phase that begins belongs to the next step: a round of the optimizers (`probe.marks.Rounds`) is over.

        Without any optimizer, a step is over after a backward. The setup (step -1) is over at once.
        """
        running = self._running
        if self.state.step < 0:
            return True
        if not running.stepped:
            return running.backwards > 0 and not self._roles.optimizers
        return running.rounds > 0

    def _close_step(self, *, complete: bool) -> None:
        entries, running = self.state.writer.journal.entries(), self._running
        if not len(entries):
            return
        row = summarize_step(
            self.state.step, running.start, running.start_bytes, running.high, entries, running.carried, complete=complete
        )
        self._high = max(self._high, row.high_water_bytes)
        self._retention.put(row)

    # --- what the clock tells ----------------------------------------------------------------------------------------

    def root_begins(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """A module is called from outside any module."""
        state = self.state
        if not state.active:
            return
        self._running.forwards += torch.is_grad_enabled()
        if module not in self._roles.roots:
            self._meet(module)
        if state.operators:
            for tensor in tensors_in([list(args), kwargs]):
                if tensor.grad_fn is None:
                    self._roles.recognise(tensor, Role.INPUT, "")
            self.blocks.look_for_holders(sys._getframe(1), called=True)
            if isinstance(module, torch.nn.Module) and next(module.parameters(), None) is not None:
                state.write(EntryKind.CALL, flags=int(torch.is_grad_enabled() and not module.training))

    def _meet(self, root: torch.nn.Module) -> None:
        optimizers = self._roles.optimizers
        if not optimizers:
            optimizers.update(o for o in gc.get_objects() if issubclass(type(o), torch.optim.Optimizer))
            self._idle.update(o for o in optimizers if _steps_itself(o))
        device = counted_device_of(root.parameters())
        if device is not None and not isinstance(self.state.meter, AcceleratorMeter):
            self.state.meter = AcceleratorMeter(device)
        self._roles.meet(root)

    def called_elsewhere(self, module: torch.nn.Module) -> None:
        """Ignore a module called in another thread."""

    def root_ends(self, result: Any) -> None:
        """The outermost module call returned."""

    def backward_begins(self) -> None:
        """Autograd's engine is about to run."""
        if self.state.operators and self.state.active:
            for part in (part for tensor in tensors_in(list(self.clock.outputs)) for part in parts_of(tensor)):
                if (block := self.blocks.find(part.untyped_storage())) is not None:
                    block.root = True
            self.blocks.look_for_holders(sys._getframe(1))

    def backward_ends(self) -> None:
        """Autograd's engine returned, or raised."""
        self._running.backwards += 1
        if self.state.operators and self.state.active:
            self._roles.recognise_gradients()

    def optimizer_begins(self, optimizer: Any) -> None:
        """An optimizer is about to step."""
        self._roles.optimizers.add(optimizer)
        for other in list(self._idle):  # one that trains no called model may never step
            if other is optimizer or self._roles.trains(other):
                self._idle.discard(other)
                self._rounds.made(other)
        if self.state.operators and self.state.active:
            self.blocks.look_for_holders(sys._getframe(1))
            self._roles.recognise_updated(optimizer)

    def optimizer_ends(self, optimizer: Any) -> None:
        """An optimizer stepped (perhaps from a hook within the backward)."""
        self._roles.optimizers.add(optimizer)
        running = self._running
        running.rounds += self._rounds.stepped(optimizer)
        if _place(optimizer) not in running.stepped:
            running.stepped.add(_place(optimizer))
            if self.state.operators and self.state.active:
                self._roles.recognise_states(optimizer)

    # --- operators ---------------------------------------------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> Any:
        kept = Kept(tensor)
        if self._mode.passive or not self.state.active:
            return kept
        blocks = self.blocks.all_of(tensor)
        return RecordedSave(self._saved, blocks, kept) if blocks else kept

    def _run_region(self, region: Any, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a compiled region as one operator, since its own are not seen; a compiled model counts as a module call."""
        model = getattr(region, "_orig_mod", None)
        if not (self.state.active and self.clock.ours):
            return run(*args, **kwargs)

        def observed(*args: Any, **kwargs: Any) -> Any:
            if not self.state.operators or self._mode.passive:
                return run(*args, **kwargs)
            self._mode.passive = True  # a region nested in this one is part of it
            try:
                return self._observer.observe_region(run, args, kwargs)
            finally:
                self._mode.passive = False

        if not isinstance(model, torch.nn.Module):
            return observed(*args, **kwargs)
        return self.clock.follow(lambda _, *rest, **named: observed(args[0], *rest, **named), model, args[1:], kwargs)

    @contextlib.contextmanager
    def unseen(self, what: Unseen) -> Iterator[None]:
        """Record as one operator a derivative whose own operators are not seen."""
        if not self.state.operators or self._mode.passive:
            yield
            return
        with self._observer.observe_unseen(what):
            yield


def _place(optimizer: Any) -> int:
    """Identity of an optimizer: its ``param_groups``, which a wrapper (accelerate's) shares with the one that it wraps."""
    return id(getattr(optimizer, "param_groups", optimizer))


def _steps_itself(optimizer: Any) -> bool:
    """Whether torch's step hooks fire for an optimizer: not for a wrapper that skips ``Optimizer.__init__`` (accelerate's)."""
    return "_optimizer_step_post_hooks" in vars(optimizer)


def begin(writer: Writer, *, operators: bool, steps: int = 0) -> RunRecorder:
    """Start recording torch; end the script after ``steps`` steps (0: never)."""
    found = counters()
    writer.put_meta({"torch": torch.__version__, "level": "ops" if operators else "phases", "exact": found is not None})
    recorder = RunRecorder(writer, operators=operators, steps=steps)
    recorder.start()
    return recorder


def end(recorder: RunRecorder, *, complete: bool, whole: bool = False) -> None:
    """Stop recording torch.

    Args:
        recorder: the recorder to stop.
        complete: whether the current step ran to its end, without an error.
        whole: whether the script is over, so that no block is used later.
    """
    recorder.stop(complete=complete)
    writer, meter = recorder.state.writer, recorder.state.meter
    writer.put_meta({"later": recorder.blocks.later, "whole": whole and complete and recorder.knows_all_uses})
    if isinstance(meter, AcceleratorMeter):
        writer.put_meta({"device": str(meter.device), "allocator": meter.cache()})
    meter.close()
