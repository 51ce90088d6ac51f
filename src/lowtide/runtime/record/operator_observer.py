"""Runs an operator and records it: bytes before, inside and after it, and the blocks it read, wrote and made."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final, final

import torch
from lowtide.base.trace import Phase
from lowtide.recording.file_format import COMPILED, EntryKind, Flag, encode_run
from lowtide.runtime.device.heap_counters import Counters
from lowtide.runtime.intercept.inplace_accumulation import adds, reaches_twice, running, takes_over
from lowtide.runtime.intercept.mode_sensitive_backward import Unseen
from lowtide.runtime.intercept.phases import PhaseTracker
from lowtide.runtime.record.attribution import COMPILED_NODE, Attribution
from lowtide.runtime.record.block_table import BlockTable
from lowtide.runtime.record.live_blocks import SavedWatch
from lowtide.runtime.record.recording_state import NOWHERE, Origin, RecordingState
from lowtide.runtime.record.tensor_parts import parts_of
from lowtide.runtime.storage.arguments import written_by
from lowtide.runtime.storage.op_schema import OpInfo, info_of
from lowtide.runtime.tensors import on_storage, tensors_in

UNSEEN: Final = OpInfo(name="", writes_at=frozenset(), secret_at=frozenset(), seeded=True, replayable=False,
                       uninitialised=False, overwrites_fully=False)
"""Schema of what is recorded as one operator because the operators inside it are not seen."""
REGION: Final = replace(UNSEEN, name=COMPILED)
"""The same for a region compiled by ``torch.compile``."""
_ADD: Final = torch.ops.aten.add.Tensor
_CLONE: Final = torch.ops.aten.clone.default


@final
class OperatorObserver:
    """Runs operators for a recorder and records each; one per recorder."""

    def __init__(
        self, state: RecordingState, clock: PhaseTracker, blocks: BlockTable, saved: SavedWatch, attribution: Attribution,
        heap: Counters | None,
    ) -> None:
        """Start with no operator seen; ``heap`` is the heap counter, whose cap may be set, or None."""
        self._state, self._clock, self._blocks, self._saved = state, clock, blocks, saved
        self._attribution, self._heap = attribution, heap
        self._latest: Origin = NOWHERE
        self._phase_peak = 0
        self._summed = False

    def end_phase(self, live: int) -> int:
        """Begin another phase at ``live`` bytes; returns the peak bytes of the phase that ends."""
        meter = self._state.meter
        peak = max(self._phase_peak, live if self._summed else meter.op_peak(), live)
        self._summed = False
        meter.reset_op_peak()
        self._phase_peak = live
        return peak

    def peak_so_far(self) -> int:
        """Peak bytes of the current phase, inside and outside operators."""
        return max(self._phase_peak, self._state.meter.op_peak())

    def observe(self, func: Any, args: Any, kwargs: Any, info: OpInfo | None = None) -> Any:
        """Run one operator, or with ``info`` something that is recorded as one; record what it did and return its result."""
        meter = self._state.meter
        self._begins()
        before, denied = meter.live(), meter.denied()
        module, source = self._attribution.where()
        op = self._attribution.name_of(func, args) if info is None else self._state.writer.name(info.name)
        sums = self._sums(func, args)
        beside = sum(part.nbytes for part in parts_of(args[0])) if sums else 0
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
        self._note_run(info, took, before, sums=sums)
        self._note_tensors(info, args, kwargs, out)
        self._ends()
        return out

    @contextlib.contextmanager
    def observe_unseen(self, what: Unseen) -> Iterator[None]:
        """Record as one operator a derivative whose own operators are not seen."""
        meter = self._state.meter
        self._begins()
        before, denied = meter.live(), meter.denied()
        origin = self._state.writer.name(type(what.node).__name__), *self._attribution.where(what.node)
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
        if self._clock.differentiable:
            self._attribution.note_origin(*origin[1:])
        self._latest = origin
        self._note_run(UNSEEN, took, before, sums=False)
        self._note_tensors(UNSEEN, what.given, {}, what.made)
        self._ends()

    def observe_region(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a compiled region and record it as one operator, with what it saved for its backward.

        No saved-tensor hook is called for that, so it is read from the region's nodes.
        """
        out = self.observe(run, args, kwargs, REGION)
        nodes: set[Any] = {t.grad_fn for t in tensors_in(out) if t.grad_fn is not None}
        for node in nodes:
            if type(node).__name__ != COMPILED_NODE:
                continue
            self._attribution.compiled_region_seen()
            for tensor in (*node.saved_tensors, *getattr(node, "_tensors_no_vc_check", ())):
                for part in parts_of(tensor):
                    storage = part.untyped_storage()
                    block = self._blocks.find(storage) or self._blocks.enter(storage, part, self._latest, met=False)
                    self._state.write(EntryKind.SAVED, a=block.number)
        return out

    def _begins(self) -> None:
        """Before an operator: the rise of memory up to here belongs to the phase."""
        if not self._summed:  # after such a sum, the window starts with bytes that the plain run does not have
            self._phase_peak = max(self._phase_peak, self._state.meter.op_peak())
        self._saved.look()

    def _sums(self, func: Any, args: Any) -> bool:
        """Whether this add or clone happens only because autograd accumulates gradients out of place under a dispatch mode."""
        if self._state.phase is not Phase.BACKWARD or self._clock.differentiable or torch.is_grad_enabled():
            return False
        if func is not _ADD:
            return func is _CLONE and takes_over(args)
        if not adds(args):
            return False
        block = self._blocks.find(args[0].untyped_storage())
        fresh = block is not None and block.node == running()
        if args[1].layout is torch.sparse_coo:
            return fresh  # the engine adds a waiting sparse gradient to a fresh dense one, never the reverse
        return not fresh or reaches_twice()

    def _move_cap(self, by: int) -> None:
        """Raise the cap by bytes that only the interception allocates, so that they cause no out-of-memory error."""
        if by and self._heap is not None and self._heap.cap:
            self._heap.cap += by

    def _note_run(self, info: OpInfo, took: float, before: int, *, sums: bool) -> None:
        """Record the latest operator's run; a sum that the plain run makes in place counts as taking no memory."""
        meter = self._state.meter
        peak, after = (before, before) if sums else (meter.op_peak(), meter.live())
        self._summed = sums
        self._phase_peak = max(self._phase_peak, peak)
        run = encode_run(took, replayable=info.replayable, seeded=info.seeded)
        self._state.write(EntryKind.OP, *self._latest, flags=run, size=before, live=after, peak=peak)

    def _ends(self) -> None:
        """Record what libraries keep of the latest operator, and start a new window for peaks."""
        self._blocks.note_library(self._latest)
        self._state.meter.reset_op_peak()

    def _note_denial(
        self, error: BaseException, denied: int, origin: Origin, info: OpInfo, args: Any, kwargs: Any
    ) -> None:
        """If an operator ran out of memory, record that, what it read, and variables that hold large blocks."""
        meter = self._state.meter
        if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) and meter.denied() <= denied:
            return
        self._state.write(EntryKind.DENIED, *origin, size=meter.denied_bytes(), live=meter.live(), peak=meter.op_peak())
        self._note_reads(info, args, kwargs)
        with contextlib.suppress(MemoryError):
            self._blocks.look_for_holders(sys._getframe(1))

    def _note_tensors(self, info: OpInfo, args: Any, kwargs: Any, out: Any) -> None:
        self._note_reads(info, args, kwargs)
        for tensor in tensors_in(list(out) if isinstance(out, tuple) else out):
            for part in parts_of(tensor):
                storage = part.untyped_storage()
                if self._blocks.find(storage) is None:
                    self._blocks.enter(storage, part, self._latest, met=False)

    def _note_reads(self, info: OpInfo, args: Any, kwargs: Any) -> None:
        read = tensors_in(list(args)) + (tensors_in(kwargs) if kwargs else [])
        written: set[int] = set()
        if info.mutates:
            written = {t.untyped_storage()._cdata for t, _ in written_by(info, args, kwargs) if on_storage(t)}
        step = self._state.step
        for tensor in read:
            for part in parts_of(tensor):
                block = self._blocks.of(part)
                block.read = step
                if flags := Flag.WRITTEN if part.untyped_storage()._cdata in written else 0:
                    block.written = step
                size = min(block.bytes, part.numel() * part.element_size())
                self._state.write(EntryKind.READ, block.number, flags=flags, size=size)
