"""Table of live storages: the block of each, when it appeared, died and was last used; and what libraries keep."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final, final

import numpy as np

import torch
from lowtide.base.trace import Phase
from lowtide.recording.file_format import CARRIED, HELD_BYTES, EntryKind, Flag, Role
from lowtide.runtime.intercept.inplace_accumulation import running
from lowtide.runtime.intercept.script_frames import holders
from lowtide.runtime.record.live_blocks import LiveBlock
from lowtide.runtime.record.recording_state import CODE, NOWHERE, Origin, RecordingState
from lowtide.runtime.record.tensor_parts import parts_of
from lowtide.runtime.storage.views import StorageRef

MOST_LABELS: Final = 50_000
"""Maximum number of types and shapes with a label of their own (further ones share ``[...]`` per type): lengths that change at
every step must not fill memory."""
MOST_LATER: Final = 10_000
"""Maximum number of blocks whose last use is recorded."""


@final
class BlockTable:
    """The live storages of a recorder, by address, each with its block; one per recorder.

    Attributes:
        seen_bytes: bytes of all live storages that were seen.
        later: large blocks that were live in a kept step and used after it, as (number, last step in which it was read, last
            step in which it was written or, if never, that in which it appeared).
    """

    def __init__(self, state: RecordingState, kept_steps: Callable[[], Iterator[int]]) -> None:
        """Start empty; ``kept_steps`` returns the steps whose entries are kept."""
        self._state, self._kept_steps = state, kept_steps
        self.seen_bytes = 0
        self.later: list[tuple[int, int, int]] = []
        self._blocks: dict[int, StorageRef] = {}
        self._numbers = itertools.count(1).__next__
        self._labels: dict[Any, int] = {}
        self._library: list[LiveBlock] = []
        self._library_bytes = 0

    def find(self, storage: torch.UntypedStorage) -> LiveBlock | None:
        """The block of a storage; None if the storage was not seen before."""
        ref = self._blocks.get(storage._cdata)
        return None if ref is None or ref() is None else ref.value

    def of(self, part: torch.Tensor) -> LiveBlock:
        """The block of a strided tensor's storage, which is entered as already existing if it was not seen before."""
        storage = part.untyped_storage()
        return self.find(storage) or self.enter(storage, part, NOWHERE, met=True)

    def all_of(self, tensor: torch.Tensor) -> list[LiveBlock]:
        """The blocks that hold a tensor's bytes."""
        return [self.of(part) for part in parts_of(tensor)]

    def enter(self, storage: torch.UntypedStorage, tensor: torch.Tensor, origin: Origin, *, met: bool) -> LiveBlock:
        """Enter a storage that is seen for the first time, and return its block.

        Args:
            storage: the storage.
            tensor: a strided tensor on it.
            origin: origin of the operator that made it.
            met: whether it existed before it was seen, so that no observed operator made it.
        """
        state = self._state
        size, counted = storage.nbytes(), state.meter.counts(storage)
        block = LiveBlock(self._numbers(), size, state.step, counted=counted)
        block.op, block.module, block.source = origin
        block.phase = CODE[state.phase]
        if state.phase is Phase.BACKWARD and not met:
            block.node = running()
        block.label = self._label(tensor)
        ref = StorageRef(storage, self._died)
        ref.cdata, ref.value, block.storage = storage._cdata, block, ref
        self._blocks[ref.cdata] = ref
        self.seen_bytes += size
        state.write(EntryKind.BORN, block.number, block.label, flags=Flag.COUNTED * counted | Flag.MET * met, size=size)
        return block

    def _label(self, tensor: torch.Tensor) -> int:
        key = (tensor.dtype, tensor.size())
        label = self._labels.get(key)
        if label is None:
            shape = list(tensor.size()) if len(self._labels) < MOST_LABELS else "[...]"
            label = self._state.writer.name(f"{str(tensor.dtype).removeprefix('torch.')} {shape}")
            if len(self._labels) < MOST_LABELS:
                self._labels[key] = label
        return label

    def _died(self, ref: StorageRef) -> None:
        if self._blocks.get(ref.cdata) is ref:
            del self._blocks[ref.cdata]
        block = ref.value
        if block is not None:
            block.storage = None
            self.seen_bytes -= block.bytes
            self._note_last_use(block)
            self._state.write(EntryKind.DIED, block.number)

    def _note_last_use(self, block: LiveBlock) -> None:
        """Record the last step that used a large block, if the block was live in a kept step and used after it."""
        if block.bytes < HELD_BYTES or block.role in (Role.GRADIENT, Role.OPTIMIZER_STATE) or len(self.later) >= MOST_LATER:
            return
        if any(block.made <= step < block.read for step in self._kept_steps()):
            self.later.append((block.number, block.read, block.written))

    def close(self) -> None:
        """Record the last uses, and stop watching all storages."""
        for ref in list(self._blocks.values()):
            if ref.value is not None:
                self._note_last_use(ref.value)
                ref.value.storage = None
            ref.value = None
        self._blocks = {}

    @property
    def knows_all_uses(self) -> bool:
        """Whether :attr:`later` is complete, not cut off at :data:`MOST_LATER`."""
        return len(self.later) < MOST_LATER

    def rows(self) -> Any:
        """All live blocks, and those kept by libraries, as rows of :data:`CARRIED` for a step that begins."""
        live = (ref.value for ref in list(self._blocks.values()) if ref() is not None)
        rows = [
            (block.number, block.role, block.counted, block.phase, block.name, block.op, block.module, block.source,
             block.label, block.saves, block.bytes)
            for block in (*live, *self._library) if block is not None
        ]
        return np.array(rows, dtype=CARRIED)

    # --- what a library keeps ----------------------------------------------------------------------------------------

    def library_begins(self) -> None:
        """Take what libraries keep already as the baseline, which belongs to no operator."""
        self._library_bytes = self._state.meter.library_live()

    def note_library(self, origin: Origin) -> None:
        """Record how much more or less libraries keep than before an operator (oneDNN keeps a primitive per shape)."""
        state = self._state
        live_bytes = state.meter.library_live()
        while self._library and live_bytes < self._library_bytes:
            block = self._library.pop()
            self._library_bytes -= block.bytes
            state.write(EntryKind.DIED, block.number)
        more = live_bytes - self._library_bytes
        if more <= 0:
            return
        block = LiveBlock(self._numbers(), more, state.step, counted=True)
        block.op, block.module, block.source = origin
        block.phase, block.role = CODE[state.phase], Role.CACHE
        block.label = block.name = state.writer.name("kept by oneDNN")
        self._library.append(block)
        self._library_bytes += more
        state.write(EntryKind.BORN, block.number, block.label, flags=Flag.COUNTED, size=more)
        state.write(EntryKind.ROLE, block.number, block.name, flags=Role.CACHE)

    # --- what variables hold -----------------------------------------------------------------------------------------

    def look_for_holders(self, frame: FrameType, *, called: bool = False) -> None:
        """Record which variables of the script refer to large blocks without a role.

        Args:
            frame: the innermost frame to search.
            called: whether a model is being called. Then only blocks count that no earlier call has looked up and that
                autograd has not saved: what is left of the previous call. Otherwise all count but those at which a backward
                started.
        """
        sizes: dict[int, LiveBlock] = {}
        for ref in list(self._blocks.values()):
            block = ref.value
            if block is None or block.bytes < HELD_BYTES or block.role >= 0:
                continue
            if called:
                if block.looked or block.saves:
                    continue
                block.looked = True
            elif block.root:  # this backward needs it, and the script often uses its variable afterwards
                continue
            sizes[ref.cdata] = block
        if not sizes:
            return
        for tensor, where in holders(frame):
            for part in parts_of(tensor):
                held = sizes.get(part.untyped_storage()._cdata)
                if held is not None:
                    self._state.write(EntryKind.HELD, held.number, self._state.writer.name(where))
