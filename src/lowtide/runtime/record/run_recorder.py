"""Recording a script as it is: what appears, is saved, is let go, and how high memory stands, into a recording.

Nothing is held that the plain run would not hold, and nothing is decided: names, roles and causes are worked out by the
reader (:mod:`lowtide.recording.explanation`) from what is written here.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final, final

import numpy as np
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

import torch
from lowtide.base.trace import Phase
from lowtide.probe.marks import Rounds
from lowtide.recording.file_format import BY_ZERO, CARRIED, COMPILED, HELD_BYTES, PHASES, EntryKind, Flag, Role, encode_run
from lowtide.recording.summary import summarize_step
from lowtide.recording.writer import Writer
from lowtide.runtime.device.memory_meter import CudaMeter, HeapMeter, LedgerMeter, Meter, counters
from lowtide.runtime.early_stop import StepLimitReached
from lowtide.runtime.intercept.bypass import Bypass
from lowtide.runtime.intercept.dispatch_mode import Mode, make_way, tell_of_forks
from lowtide.runtime.intercept.inplace_accumulation import InPlaceAccumulation, in_place, reaches_twice, running
from lowtide.runtime.intercept.mode_sensitive_backward import ModeSensitiveBackward, Unseen
from lowtide.runtime.intercept.mode_stack import ModeStack
from lowtide.runtime.intercept.phases import PhaseTracker
from lowtide.runtime.intercept.script_frames import holders, user_line
from lowtide.runtime.record.live_blocks import LiveBlock, RecordedSave, SavedWatch
from lowtide.runtime.record.saved_tensors import Kept
from lowtide.runtime.storage.arguments import NO_DISPATCH, PLAIN_TYPES, written_by
from lowtide.runtime.storage.op_schema import OpInfo, info_of
from lowtide.runtime.storage.views import StorageRef
from lowtide.runtime.tensors import beneath_autograd, grad_of, on_storage, tensors_in, tensors_so_far

FIRST_STEPS: Final = 3
"""Steps whose entries are always kept: the first allocates states and gradients, the second is warm, the third confirms."""
MOST_STEPS: Final = 16
"""Steps at most whose entries are kept, the unfinished one apart."""
HIGHER: Final = 1.005
"""Beyond the first steps, one that peaks so much higher than all that are kept is kept, too, and the one after it."""
HIGHER_STILL: Final = 1.02
"""So much higher, where that many are kept already: it takes the place of the oldest beyond the first steps."""
MOST_LABELS: Final = 50_000
"""Shapes that are told apart by name: lengths that change at every step must not fill the memory."""
COMPILED_NODE: Final = "CompiledFunctionBackward"
"""The type of the node that ``torch.compile`` puts into a graph for a region (``torch/_functorch/_aot_autograd``)."""
MOST_LATER: Final = 10_000
"""Blocks at most of which it is noted in which step they were used last."""

MOST_NODES: Final = 64
"""Nodes at most that one operator makes: the gradients of what counts as one are several."""
UNSEEN: Final = OpInfo(name="", writes_at=frozenset(), secret_at=frozenset(), seeded=True, replayable=False,
                       uninitialised=False, overwrites_fully=False)
"""What counts as one operator, and what runs in it is not seen."""
REGION: Final = replace(UNSEEN, name=COMPILED)
"""What ``torch.compile`` made."""
_CODE: Final = {phase: code for code, phase in enumerate(PHASES)}
_TO_ZERO: Final = {torch.ops.aten.mul_.Tensor, torch.ops.aten.fill_.Scalar, torch.ops.aten._foreach_mul_.Scalar}
"""What zeroes a gradient by hand, given a zero."""
_ADD: Final = torch.ops.aten.add.Tensor
_CLONE: Final = torch.ops.aten.clone.default


def _unpack(packed: Kept | RecordedSave) -> torch.Tensor:
    return packed.unpack()


@final
class _WatchMode(Mode):
    """Sees every operator below autograd."""

    def __init__(self, watcher: RunRecorder) -> None:
        super().__init__()
        self._watcher = watcher
        self.passive = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One operator."""
        if not PLAIN_TYPES.issuperset(types):
            return make_way(func, types, args, kwargs)
        kwargs = kwargs or {}
        if self.passive:
            return func(*args, **kwargs)
        self.passive = True
        try:
            if not self._watcher.asides.transforming:  # plain transforms run derivatives out of place themselves
                func = in_place(func, args)
            return self._watcher.observe(func, args, kwargs)
        finally:
            self.passive = False


@final
class _Names:
    """Names of parameters, by identity: tensors compare element by element."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}

    def put(self, parameter: torch.Tensor, name: str) -> str:
        self._found[id(parameter)] = weakref.ref(parameter), name
        return name

    def get(self, parameter: torch.Tensor) -> str:
        ref, name = self._found.get(id(parameter), (None, ""))
        return name if ref is not None and ref() is parameter else ""

    def items(self) -> list[tuple[torch.Tensor, str]]:
        return [(p, name) for ref, name in self._found.values() if (p := ref()) is not None]


@final
class RunRecorder:
    """One per process while a recording is made; listens to the clock.

    Attributes:
        later: blocks that were used again after the step in which they appeared: number, and the last steps in which it was
            read, and written.
    """

    def __init__(self, writer: Writer, *, operators: bool, steps: int = 0) -> None:
        """Watch phases, and with ``operators`` all that happens in them; end the script after ``steps``."""
        self._most = steps
        self.writer = writer
        self.operators = operators
        found = counters()
        self.meter: Meter = HeapMeter(found) if found is not None else LedgerMeter(lambda: self._seen_bytes)
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self.meter = CudaMeter(torch.device("cuda", torch.cuda.current_device()))
        self._heap = found
        self.clock = PhaseTracker(self, ModeSensitiveBackward(self))
        self.clock.detailed = operators
        self.stack = ModeStack()
        self.asides = Bypass(self.stack, self.clock, self._run_region, only_hooks=True)
        self.mode = _WatchMode(self)
        self.step = -1
        self._blocks: dict[int, StorageRef] = {}
        self._library: list[LiveBlock] = []
        self._library_bytes = 0
        self._seen_bytes = 0
        self._numbers = itertools.count(1).__next__
        self._active = False
        self._began = time.perf_counter()
        self._phase = Phase.DATA
        self._phase_peak = 0
        self._high = 0
        self._best, self._best_step = 0, -1
        self.later: list[tuple[int, int, int]] = []
        self._kept: list[int] = []
        self._step_start = 0.0
        self._step_bytes = 0
        self._step_high = 0
        self._carried = np.zeros(0, dtype=CARRIED)
        self._stepped: set[int] = set()
        self._rounds, self._rounds_over = Rounds(), 0
        self._idle: weakref.WeakSet[Any] = weakref.WeakSet()
        self.clock.on_optimizer = self._idle.add
        self._forwards, self._backwards = 0, 0
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._roots: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._names: dict[Any, int] = {}
        self._lines: dict[tuple[CodeType, int], int] = {}
        self._labels: dict[Any, int] = {}
        self._parameters = _Names()
        self._sequence = 0
        self._origin: dict[int, tuple[int, int]] = {}
        self._last_origin, self._latest = (0, 0), (0, 0, 0)
        self._compiled = False
        self._engine = InPlaceAccumulation()
        self._summed = False
        self._saved = SavedWatch(self.write)
        writer.name("")

    # --- on and off --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to watch."""
        self._active = True
        tell_of_forks(self)
        self.clock.install()
        self.asides.install()
        self.meter.reset_op_peak()
        self._library_bytes = self.meter.library_live()
        self._begin_journal()
        self.write(EntryKind.PHASE, live=self.meter.live(), size=self._outside())
        if self.operators:
            self._meet_what_is_there()
            self.stack.put(self.mode, self._pack, _unpack)
            self.clock.settle()

    def _meet_what_is_there(self) -> None:
        """Tensors that the script made before: in a notebook, all that it has; a plain script has none yet.

        The collector lists them in an order of its own; two recordings of one script are to number them alike.
        """
        plain = (t for t in tensors_so_far() if type(t) in PLAIN_TYPES)
        parts = sorted((p for t in plain for p in _parts(t)), key=lambda p: (p.nbytes, str(p.dtype), tuple(p.shape)))
        for part in parts:
            storage = part.untyped_storage()
            if self._find(storage) is None and self.meter.counts(storage):
                self._enter(storage, part, (0, 0, 0), met=True)

    def stop(self, *, complete: bool = True) -> None:
        """Watch no more; the step that runs is closed."""
        if not self._active:
            return
        self.mode.passive = True
        if self.operators and not complete:
            with contextlib.suppress(AttributeError, RuntimeError):  # the script's objects are as the failure left them
                self._recognise_all()
        peak = max(self._phase_peak, self.meter.op_peak())  # of the phase that runs, whoever took it
        self.write(EntryKind.PHASE, live=self.meter.live(), peak=peak, size=self._outside())
        self._active = False
        self.stack.take()
        self.clock.remove()
        self.asides.remove()
        if self.step < 0 or not complete or self._forwards or self._backwards or self._stepped:
            self._close_step(complete=complete)
        for ref in list(self._blocks.values()):
            if ref.value is not None:
                self._note_last_use(ref.value)
                ref.value.storage = None
            ref.value = None
        self._blocks = {}

    @property
    def knows_all_uses(self) -> bool:
        """Whether the script was not ended early, and not too many blocks were used again."""
        return not (self._most and self.step >= self._most) and len(self.later) < MOST_LATER

    def _note_last_use(self, block: LiveBlock) -> None:
        """Note the last step that used a large block, if the block was live in a kept step and used after it."""
        if block.bytes < HELD_BYTES or block.role in (Role.GRADIENT, Role.OPTIMIZER_STATE) or len(self.later) >= MOST_LATER:
            return
        if any(block.made <= step < block.read for step in (*range(-1, FIRST_STEPS), *self._kept)):
            self.later.append((block.number, block.read, block.written))

    def forked(self) -> None:
        """A child (a loader's worker) inherits the interpreter: it is not to be watched."""
        if self._active:
            self._active = False
            self.mode.passive = True
            self.clock.remove()

    def _begin_journal(self) -> None:
        live = self.meter.live()
        self._step_start, self._step_bytes, self._step_high = self._now(), live, max(self._high, live)
        self._carried = self._live_blocks()
        self.writer.journal.begin(self.step, self._step_start, live, self._step_high, self._carried)

    def _now(self) -> float:
        return time.perf_counter() - self._began

    def _outside(self) -> int:
        """The most that the heap held outside torch's allocator since this was last asked."""
        heap = self._heap
        if heap is None:
            return 0
        highest, now = int(heap.outside_peak), int(heap.heap_live) - int(heap.tensor_live)
        heap.outside_peak = now
        return max(highest, now, 0)

    def write(
        self, kind: EntryKind, a: int = 0, b: int = 0, c: int = 0,
        *, flags: int = 0, size: int = 0, live: int = 0, peak: int = 0,
    ) -> None:
        """One entry."""
        if self._active:
            self.writer.journal.add(self._now(), kind, _CODE[self._phase], flags, a, b, c, size, live, peak)

    # --- steps and phases --------------------------------------------------------------------------------------------

    def phase_begins(self, phase: Phase) -> None:
        """The clock says that the script does something else."""
        self._mark(phase)

    def _mark(self, phase: Phase) -> None:
        meter = self.meter
        live = meter.live()
        peak = max(self._phase_peak, live if self._summed else meter.op_peak(), live)
        self._summed = False
        meter.reset_op_peak()
        self._high, self._phase_peak = max(self._high, peak), live
        starts = phase in (Phase.ZERO_GRAD, Phase.FORWARD) and self._step_is_over()
        if starts:
            self._phase = phase
            self.write(EntryKind.PHASE, live=live, peak=peak, size=self._outside())
            self._close_step(complete=True)
            self._origin.clear()
            self.step += 1
            self._stepped, self._rounds_over, self._forwards, self._backwards = set(), 0, 0, 0
            self._begin_journal()
            if self._most and self.step >= self._most:
                raise StepLimitReached
            peak = live
        self._phase = phase
        self.write(EntryKind.PHASE, live=live, peak=peak, size=self._outside())

    def _step_is_over(self) -> bool:
        """Whether what begins now belongs to the next step: a round of the optimizers (`probe.marks.Rounds`) is over."""
        if self.step < 0:
            return True
        if not self._stepped:
            return self._backwards > 0 and not self._optimizers
        return self._rounds_over > 0

    def _trains(self, optimizer: Any) -> bool:
        """Whether an optimizer has parameters of a model that was called."""
        return any(self._parameters.get(p) for group in optimizer.param_groups for p in group["params"])

    def _close_step(self, *, complete: bool) -> None:
        entries = self.writer.journal.entries()
        if not len(entries):
            return
        row = summarize_step(
            self.step, self._step_start, self._step_bytes, self._step_high, entries, self._carried, complete=complete
        )
        self._high = max(self._high, row.high_water_bytes)
        full = len(self._kept) + FIRST_STEPS >= MOST_STEPS
        higher = self.step >= FIRST_STEPS and row.peak_bytes > (HIGHER_STILL if full else HIGHER) * self._best
        follows = self.step == self._best_step + 1  # it tells what became of what the highest one left
        keeps = self.operators and (not complete or self.step < FIRST_STEPS or higher or follows)
        if keeps and self.step >= 0 and row.peak_bytes > self._best:  # a setup may stand above every step
            self._best, self._best_step = row.peak_bytes, self.step
        if keeps and complete and self.step >= FIRST_STEPS:
            if full:
                self.writer.forget(self._kept.pop(0))
            self._kept.append(self.step)
        self.writer.step(row if keeps else replace(row, entries=None, carried=None))

    # --- what the clock tells ----------------------------------------------------------------------------------------

    def root_begins(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """A module is called from outside any module."""
        if not self._active:
            return
        self._forwards += torch.is_grad_enabled()
        if module not in self._roots:
            self._meet(module)
        if self.operators:
            for tensor in tensors_in([list(args), kwargs]):
                if tensor.grad_fn is None:
                    self._recognise(tensor, Role.INPUT, "")
            self._look_for_holders(called=True)
            if isinstance(module, torch.nn.Module) and next(module.parameters(), None) is not None:
                self.write(EntryKind.CALL, flags=int(torch.is_grad_enabled() and not module.training))

    def _meet(self, root: torch.nn.Module) -> None:
        if not any(isinstance(t, UninitializedTensorMixin) for t in (*root.parameters(), *root.buffers())):
            self._roots.add(root)  # else it is met again, once they have bytes
        if not self._optimizers:
            self._optimizers.update(o for o in gc.get_objects() if issubclass(type(o), torch.optim.Optimizer))
            self._idle.update(o for o in self._optimizers if _steps_itself(o))
        device = next((p.device for p in root.parameters() if p.is_cuda), None)
        if device is not None and not isinstance(self.meter, CudaMeter):
            self.meter = CudaMeter(device)
        kind = type(root).__name__
        for name, parameter in root.named_parameters():
            self._parameters.put(parameter, f"{kind}.{name}")
        if self.operators:
            for name, parameter in root.named_parameters():
                self._recognise(parameter, Role.PARAMETER, f"{kind}.{name}")
                if (grad := grad_of(parameter)) is not None:
                    self._recognise(grad, Role.GRADIENT, f"{kind}.{name}.grad")
            for name, buffer in root.named_buffers():
                self._recognise(buffer, Role.BUFFER, f"{kind}.{name}")
            for optimizer in self._optimizers:  # where training began before the recording
                self._recognise_states(optimizer)

    def _recognise_all(self) -> None:
        """The script failed before its hooks could tell: what its modules and optimizers hold is looked up now."""
        found = [o for o in gc.get_objects() if issubclass(type(o), (torch.nn.Module, torch.optim.Optimizer))]
        modules = [m for m in found if isinstance(m, torch.nn.Module) and "_modules" in vars(m)]  # some are half made
        inner = {id(child) for m in modules for child in m.children()}
        seen: set[Any] = {_shapes_of(m) for m in self._roots}
        for module in modules:
            if id(module) not in inner and module not in self._roots and _shapes_of(module) not in seen:
                seen.add(_shapes_of(module))  # a second one of the same shapes is a copy, and is shown as what it is
                self._meet(module)
        for optimizer in found:
            if isinstance(optimizer, torch.optim.Optimizer):
                self._recognise_states(optimizer)

    def called_elsewhere(self, module: torch.nn.Module) -> None:
        """Not followed."""

    def root_ends(self, result: Any) -> None:
        """That call returned."""

    def backward_begins(self) -> None:
        """Autograd's engine is about to run."""
        if self.operators and self._active:
            for part in (part for tensor in tensors_in(list(self.clock.outputs)) for part in _parts(tensor)):
                if (block := self._find(part.untyped_storage())) is not None:
                    block.root = True
            self._look_for_holders()

    def backward_ends(self) -> None:
        """Autograd's engine returned, or raised."""
        self._backwards += 1
        if self.operators and self._active:
            for parameter, name in self._parameters.items():
                if (grad := grad_of(parameter)) is not None:
                    self._recognise(grad, Role.GRADIENT, f"{name}.grad")

    def optimizer_begins(self, optimizer: Any) -> None:
        """An optimizer is about to step."""
        self._optimizers.add(optimizer)
        for other in list(self._idle):  # of what trains no model that was called nobody knows whether it will step
            if other is optimizer or self._trains(other):
                self._idle.discard(other)
                self._rounds.made(other)
        if self.operators and self._active:
            self._look_for_holders()
            for i, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
                name = self._parameters.get(parameter) or self._parameters.put(parameter, f"parameter {i}")
                self._recognise(parameter, Role.PARAMETER, name)
                if (grad := grad_of(parameter)) is not None:
                    self._recognise(grad, Role.GRADIENT, f"{name}.grad")

    def optimizer_ends(self, optimizer: Any) -> None:
        """An optimizer stepped (perhaps from a hook within the backward)."""
        self._optimizers.add(optimizer)
        self._rounds_over += self._rounds.stepped(optimizer)
        if _place(optimizer) not in self._stepped:
            self._stepped.add(_place(optimizer))
            if self.operators and self._active:
                self._recognise_states(optimizer)

    def _recognise_states(self, optimizer: Any) -> None:
        kind = type(optimizer).__name__
        for parameter, state in optimizer.state.items():
            name = self._parameters.get(parameter) if isinstance(parameter, torch.Tensor) else ""
            for key, value in state.items() if isinstance(state, dict) else ():
                for tensor in tensors_in(value):
                    self._recognise(tensor, Role.OPTIMIZER_STATE, f"{kind} {key} of {name}")

    # --- operators ---------------------------------------------------------------------------------------------------

    def _run_region(self, region: Any, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a compiled region, whose operators are not seen: it counts as one; a model that is compiled is called."""
        model = getattr(region, "_orig_mod", None)
        if not (self._active and self.clock.ours):
            return run(*args, **kwargs)

        def observed(*args: Any, **kwargs: Any) -> Any:
            if not self.operators or self.mode.passive:
                return run(*args, **kwargs)
            self.mode.passive = True  # a region within it is a part of it
            try:
                out = self.observe(run, args, kwargs, REGION)
            finally:
                self.mode.passive = False
            self._note_saved(out)
            return out

        if not isinstance(model, torch.nn.Module):
            return observed(*args, **kwargs)
        return self.clock.follow(lambda _, *rest: observed(args[0], *rest, **kwargs), model, args[1:], kwargs)

    def _note_saved(self, out: Any) -> None:
        """What a compiled region has saved for its backward: no hook is told of it."""
        nodes: set[Any] = {t.grad_fn for t in tensors_in(out) if t.grad_fn is not None}
        for node in nodes:
            if type(node).__name__ != COMPILED_NODE:
                continue
            self._compiled = True
            for tensor in (*node.saved_tensors, *getattr(node, "_tensors_no_vc_check", ())):
                for part in _parts(tensor):
                    storage = part.untyped_storage()
                    block = self._find(storage) or self._enter(storage, part, self._latest, met=False)
                    self.write(EntryKind.SAVED, a=block.number)

    def _name_of(self, func: Any, args: Any) -> int:
        """An operator's name; one that the backward of a compiled region calls is a part of it."""
        key = (BY_ZERO, func) if func in _TO_ZERO and type(args[1]) in (int, float) and not args[1] else func
        if self._compiled and self._phase is Phase.BACKWARD:
            node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
            if node is not None and type(node).__name__ == COMPILED_NODE:
                key = COMPILED, func
        op = self._names.get(key)
        if op is None:
            name = str(func) if key is func else f"{func}{BY_ZERO}" if key[0] is BY_ZERO else f"{COMPILED}: {func}"
            op = self._names[key] = self.writer.name(name)
        return op

    def observe(self, func: Any, args: Any, kwargs: Any, info: OpInfo | None = None) -> Any:
        """Run one operator, or what counts as one, and note what it did."""
        meter = self.meter
        self._note_peak()
        self._saved.look()
        before, denied = meter.live(), meter.denied()
        module, source = self._where()
        op = self._name_of(func, args) if info is None else self.writer.name(info.name)
        summarize_step = self._sums(func, args)
        beside = sum(part.nbytes for part in _parts(args[0])) if summarize_step else 0
        self._move_cap(beside)
        meter.begin_operator()
        began = time.perf_counter()
        try:
            try:
                out = func(*args, **kwargs)
            finally:
                took = time.perf_counter() - began
                meter.end_operator()
                self._move_cap(-beside)
        except (RuntimeError, MemoryError) as error:
            self._note_denial(error, denied, (op, module, source), info or info_of(func), args, kwargs)
            raise
        info = info or info_of(func)
        self._latest = op, module, source
        self._note_run(info, took, before, summarize_step=summarize_step)
        self._note_tensors(info, args, kwargs, out, self._latest)
        self._note_rest()
        return out

    @contextlib.contextmanager
    def unseen(self, what: Unseen) -> Iterator[None]:
        """A derivative runs that is not seen: it counts as one operator."""
        if not self.operators or self.mode.passive:
            yield
            return
        meter = self.meter
        self._note_peak()
        self._saved.look()
        before, denied = meter.live(), meter.denied()
        origin = self.writer.name(type(what.node).__name__), *self._where(what.node)
        meter.begin_operator()
        began = time.perf_counter()
        try:
            try:
                yield
            finally:
                took = time.perf_counter() - began
                meter.end_operator()
        except (RuntimeError, MemoryError) as error:
            self._note_denial(error, denied, origin, UNSEEN, what.given, {})
            raise
        if self.clock.differentiable:
            self._note_origin(*origin[1:])
        self._latest = origin
        self._note_run(UNSEEN, took, before, summarize_step=False)
        self._note_tensors(UNSEEN, what.given, {}, what.made, origin)
        self._note_rest()

    def _note_peak(self) -> None:
        """Up to an operator that is about to run."""
        if not self._summed:  # after such a sum the window begins with bytes that the plain run would not have
            self._phase_peak = max(self._phase_peak, self.meter.op_peak())

    def _sums(self, func: Any, args: Any) -> bool:
        """Whether it is the engine's sum, or copy, that the plain run has not."""
        if self._phase is not Phase.BACKWARD or self.clock.differentiable or torch.is_grad_enabled():
            return False
        if func is not _ADD:
            return func is _CLONE and self._engine.takes_over(args)
        if not self._engine.adds(args):
            return False
        block = self._find(args[0].untyped_storage())
        fresh = block is not None and block.node == running()
        if args[1].layout is torch.sparse_coo:
            return fresh  # a dense gradient takes up a sparse one that has waited, and not the other way round
        return not fresh or reaches_twice()

    def _move_cap(self, by: int) -> None:
        """Raise the cap by bytes that only the interception allocates, so that they cause no out-of-memory error."""
        if by and self._heap is not None and self._heap.cap:
            self._heap.cap += by

    def _note_run(self, info: OpInfo, took: float, before: int, *, summarize_step: bool) -> None:
        """The latest operator ran."""
        peak, after = (before, before) if summarize_step else (self.meter.op_peak(), self.meter.live())
        self._summed = summarize_step
        self._phase_peak = max(self._phase_peak, peak)
        run = encode_run(took, replayable=info.replayable, seeded=info.seeded)
        self.write(EntryKind.OP, *self._latest, flags=run, size=before, live=after, peak=peak)

    def _note_rest(self) -> None:
        """What the latest operator left in a library; from here on, it is the next one's."""
        kept = self.meter.library_live()
        if kept != self._library_bytes:
            self._note_library(kept, self._latest)
        self.meter.reset_op_peak()

    def _note_denial(
        self, error: BaseException, denied: int, origin: tuple[int, int, int], info: OpInfo, args: Any, kwargs: Any
    ) -> None:
        """Whether an operator failed for memory, and what there was of it."""
        meter = self.meter
        if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) and meter.denied() <= denied:
            return
        self.write(EntryKind.DENIED, *origin, size=meter.denied_bytes(), live=meter.live(), peak=meter.op_peak())
        self._note_reads(info, args, kwargs)
        with contextlib.suppress(MemoryError):
            self._look_for_holders()

    def _note_tensors(self, info: OpInfo, args: Any, kwargs: Any, out: Any, origin: tuple[int, int, int]) -> None:
        self._note_reads(info, args, kwargs)
        for tensor in tensors_in(list(out) if isinstance(out, tuple) else out):
            for part in _parts(tensor):
                storage = part.untyped_storage()
                if self._find(storage) is None:
                    self._enter(storage, part, origin, met=False)

    def _note_library(self, live_bytes: int, origin: tuple[int, int, int]) -> None:
        """A library keeps more than before an operator (oneDNN its primitives, one per shape), or less."""
        while self._library and live_bytes < self._library_bytes:
            block = self._library.pop()
            self._library_bytes -= block.bytes
            self.write(EntryKind.DIED, block.number)
        more = live_bytes - self._library_bytes
        if more <= 0:
            return
        block = LiveBlock(self._numbers(), more, self.step, counted=True)
        block.op, block.module, block.source = origin
        block.phase, block.role = _CODE[self._phase], Role.CACHE
        block.label = block.name = self.writer.name("kept by oneDNN")
        self._library.append(block)
        self._library_bytes += more
        self.write(EntryKind.BORN, block.number, block.label, flags=Flag.COUNTED, size=more)
        self.write(EntryKind.ROLE, block.number, block.name, flags=Role.CACHE)

    def _note_reads(self, info: OpInfo, args: Any, kwargs: Any) -> None:
        read = tensors_in(list(args)) + (tensors_in(kwargs) if kwargs else [])
        written: set[int] = set()
        if info.mutates:
            written = {t.untyped_storage()._cdata for t, _ in written_by(info, args, kwargs) if on_storage(t)}
        for tensor in read:
            for part in _parts(tensor):
                storage = part.untyped_storage()
                block = self._find(storage) or self._enter(storage, part, (0, 0, 0), met=True)
                block.read = self.step
                if flags := Flag.WRITTEN if storage._cdata in written else 0:
                    block.written = self.step
                size = min(block.bytes, part.numel() * part.element_size())
                self.write(EntryKind.READ, block.number, flags=flags, size=size)

    def _where(self, node: Any = None) -> tuple[int, int]:
        """Module and source line of the operator that is about to run: in backward, of the one whose gradient it makes."""
        path = self.clock.path()
        if node is None and self._phase is Phase.BACKWARD and not path:
            node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
        if node is not None:
            parameter = getattr(node, "variable", None)
            if parameter is None:
                self._last_origin = self._origin.get(node._sequence_nr(), self._last_origin)
                if self.clock.differentiable:
                    self._note_origin(*self._last_origin)
                return self._last_origin
            name = self._parameters.get(parameter).rpartition(".")[0]
            return (self.writer.name(name) if name else self._last_origin[0]), self._last_origin[1]
        module, source = self.writer.name(path), self._line()
        self._note_origin(module, source)
        return module, source

    def _note_origin(self, module: int, source: int) -> None:
        """Nodes that autograd has made since this was last called are of the operator that is about to run."""
        sequence = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        if sequence != self._sequence:
            for number in range(max(self._sequence, sequence - MOST_NODES), sequence):
                self._origin[number] = module, source
            self._sequence = sequence

    def _line(self) -> int:
        frame: FrameType | None = sys._getframe(4)
        found = user_line(frame)
        if found is None:
            return 0
        line = self._lines.get(found)
        if line is None:
            code, number = found
            line = self._lines[found] = self.writer.name(f"{_short(code.co_filename)}:{number} in {code.co_name}")
        return line

    # --- blocks ------------------------------------------------------------------------------------------------------

    def _find(self, storage: torch.UntypedStorage) -> LiveBlock | None:
        ref = self._blocks.get(storage._cdata)
        return None if ref is None or ref() is None else ref.value

    def _enter(
        self, storage: torch.UntypedStorage, tensor: torch.Tensor, origin: tuple[int, int, int], *, met: bool
    ) -> LiveBlock:
        size, counted = storage.nbytes(), self.meter.counts(storage)
        block = LiveBlock(self._numbers(), size, self.step, counted=counted)
        block.op, block.module, block.source = origin
        block.phase = _CODE[self._phase]
        if self._phase is Phase.BACKWARD and not met:
            block.node = running()
        key = (tensor.dtype, tensor.size())
        label = self._labels.get(key)
        if label is None:
            shape = list(tensor.size()) if len(self._labels) < MOST_LABELS else "[...]"
            label = self.writer.name(f"{str(tensor.dtype).removeprefix('torch.')} {shape}")
            if len(self._labels) < MOST_LABELS:
                self._labels[key] = label
        block.label = label
        ref = StorageRef(storage, self._died)
        ref.cdata, ref.value, block.storage = storage._cdata, block, ref
        self._blocks[ref.cdata] = ref
        self._seen_bytes += size
        self.write(EntryKind.BORN, block.number, label, flags=Flag.COUNTED * counted | Flag.MET * met, size=size)
        return block

    def _died(self, ref: StorageRef) -> None:
        if self._blocks.get(ref.cdata) is ref:
            del self._blocks[ref.cdata]
        block = ref.value
        if block is not None:
            block.storage = None
            self._seen_bytes -= block.bytes
            self._note_last_use(block)
            self.write(EntryKind.DIED, block.number)

    def _recognise(self, tensor: torch.Tensor, role: Role, name: str) -> None:
        for part in _parts(tensor):
            storage = part.untyped_storage()
            block = self._find(storage) or self._enter(storage, part, (0, 0, 0), met=True)
            if role is Role.INPUT and PHASES[block.phase] is not Phase.DATA:
                continue
            if block.role < 0 or role < block.role:
                block.role, block.name = role, self.writer.name(name)
                self.write(EntryKind.ROLE, block.number, block.name, flags=role)

    def _pack(self, tensor: torch.Tensor) -> Any:
        kept = Kept(tensor)
        if self.mode.passive or not self._active:
            return kept
        parts = [(part.untyped_storage(), part) for part in _parts(tensor)]
        blocks = [self._find(storage) or self._enter(storage, part, (0, 0, 0), met=True) for storage, part in parts]
        return RecordedSave(self._saved, blocks, kept) if blocks else kept

    def _live_blocks(self) -> Any:
        live = (ref.value for ref in list(self._blocks.values()) if ref() is not None)
        rows = [
            (block.number, block.role, block.counted, block.phase, block.name, block.op, block.module, block.source,
             block.label, block.saves, block.bytes)
            for block in (*live, *self._library) if block is not None
        ]
        return np.array(rows, dtype=CARRIED)

    def _look_for_holders(self, *, called: bool = False) -> None:
        """Which variables of the script refer to large blocks now; when a model is ``called``, to those of the call before."""
        sizes: dict[int, LiveBlock] = {}
        for ref in list(self._blocks.values()):
            block = ref.value
            if block is None or block.bytes < HELD_BYTES or block.role >= 0:
                continue
            if called:
                if block.looked or block.saves:
                    continue
                block.looked = True
            elif block.root:  # it is needed for the very backward, and its variable often after it
                continue
            sizes[ref.cdata] = block
        if not sizes:
            return
        for tensor, where in holders(sys._getframe(2)):
            for part in _parts(tensor):
                held = sizes.get(part.untyped_storage()._cdata)
                if held is not None:
                    self.write(EntryKind.HELD, held.number, self.writer.name(where))


def _place(optimizer: Any) -> int:
    """An optimizer's groups, which one that wraps it (accelerate's) shares: it is the same."""
    return id(getattr(optimizer, "param_groups", optimizer))


def _steps_itself(optimizer: Any) -> bool:
    """Whether torch's hooks tell when it steps: not of one that wraps another and was never made as one (accelerate's)."""
    return "_optimizer_step_post_hooks" in vars(optimizer)


def _shapes_of(module: torch.nn.Module) -> tuple[Any, ...]:
    return tuple((p.dtype, p.size()) for p in module.parameters())


def begin(writer: Writer, *, operators: bool, steps: int = 0) -> RunRecorder:
    """Start to record torch; after so many steps (0: never) the script is ended."""
    found = counters()
    writer.put_meta({"torch": torch.__version__, "level": "ops" if operators else "phases", "exact": found is not None})
    watcher = RunRecorder(writer, operators=operators, steps=steps)
    watcher.start()
    return watcher


def end(watcher: RunRecorder, *, complete: bool, whole: bool = False) -> None:
    """Record torch no more; ``whole``: the script is over, nothing is used later."""
    watcher.stop(complete=complete)
    watcher.writer.put_meta({"later": watcher.later, "whole": whole and complete and watcher.knows_all_uses})
    meter = watcher.meter
    if isinstance(meter, CudaMeter):
        watcher.writer.put_meta({"device": str(meter.device), "allocator": meter.cache()})
    meter.close()


_ROWS, _COLUMNS = ("crow_indices", "col_indices", "values"), ("ccol_indices", "row_indices", "values")
_SPARSE: Final = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _ROWS, torch.sparse_bsr: _ROWS, torch.sparse_csc: _COLUMNS, torch.sparse_bsc: _COLUMNS,
}
"""What the parts of sparse tensors are called, by layout."""


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Strided tensors that hold a tensor's bytes; none for what has no storage of its own."""
    if type(tensor).__torch_dispatch__ is not NO_DISPATCH or isinstance(tensor, UninitializedTensorMixin):
        return []
    if tensor.device.type == "meta":
        return []
    if is_functorch_wrapped_tensor(tensor) or is_legacy_batchedtensor(tensor) or tensor._is_zerotensor():
        return []
    if tensor.layout is torch.strided and not tensor.is_nested:
        return [tensor]
    names = ("values",) if tensor.is_nested else _SPARSE.get(tensor.layout, ())
    with beneath_autograd():
        return [getattr(tensor, name)() for name in names]


def _short(filename: str) -> str:
    """A path as the user would write it."""
    for root in sorted((p for p in sys.path if p), key=len, reverse=True):
        if filename.startswith(root + os.sep):
            return filename[len(root) + 1 :]
    return Path(filename).name if filename.startswith(os.sep) else filename
