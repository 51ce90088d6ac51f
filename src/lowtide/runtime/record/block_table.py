"""The storages that live: which block each is, when it appeared, died and was used last, and what a library keeps."""

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
"""Shapes that are told apart by name: lengths that change at every step must not fill the memory."""
MOST_LATER: Final = 10_000
"""Limit on the number of blocks whose last use is noted."""


@final
class BlockTable:
    """One per recorder.

    Attributes:
        seen_bytes: of all storages that live.
        later: blocks that were used again after the step in which they appeared: number, and the last steps in which it was
            read, and written.
    """

    def __init__(self, state: RecordingState, kept_steps: Callable[[], Iterator[int]]) -> None:
        """None was met; ``kept_steps`` tells the steps whose entries are kept."""
        self._state, self._kept_steps = state, kept_steps
        self.seen_bytes = 0
        self.later: list[tuple[int, int, int]] = []
        self._blocks: dict[int, StorageRef] = {}
        self._numbers = itertools.count(1).__next__
        self._labels: dict[Any, int] = {}
        self._library: list[LiveBlock] = []
        self._library_bytes = 0

    def find(self, storage: torch.UntypedStorage) -> LiveBlock | None:
        """The block that a storage is; None for one that was not met."""
        ref = self._blocks.get(storage._cdata)
        return None if ref is None or ref() is None else ref.value

    def of(self, part: torch.Tensor) -> LiveBlock:
        """The block that a strided tensor lies on; one that was not met was there before."""
        storage = part.untyped_storage()
        return self.find(storage) or self.enter(storage, part, NOWHERE, met=True)

    def all_of(self, tensor: torch.Tensor) -> list[LiveBlock]:
        """The blocks that hold a tensor's bytes."""
        return [self.of(part) for part in parts_of(tensor)]

    def enter(self, storage: torch.UntypedStorage, tensor: torch.Tensor, origin: Origin, *, met: bool) -> LiveBlock:
        """A storage is seen for the first time.

        Args:
            storage: that is seen.
            tensor: a strided tensor on it.
            origin: of the operator that made it.
            met: whether it was there before.
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
        """Note the last step that used a large block, if the block was live in a kept step and used after it."""
        if block.bytes < HELD_BYTES or block.role in (Role.GRADIENT, Role.OPTIMIZER_STATE) or len(self.later) >= MOST_LATER:
            return
        if any(block.made <= step < block.read for step in self._kept_steps()):
            self.later.append((block.number, block.read, block.written))

    def close(self) -> None:
        """Watch none of them any more."""
        for ref in list(self._blocks.values()):
            if ref.value is not None:
                self._note_last_use(ref.value)
                ref.value.storage = None
            ref.value = None
        self._blocks = {}

    @property
    def knows_all_uses(self) -> bool:
        """Whether not too many blocks were used again."""
        return len(self.later) < MOST_LATER

    def rows(self) -> Any:
        """All that live, as a step that begins has them."""
        live = (ref.value for ref in list(self._blocks.values()) if ref() is not None)
        rows = [
            (block.number, block.role, block.counted, block.phase, block.name, block.op, block.module, block.source,
             block.label, block.saves, block.bytes)
            for block in (*live, *self._library) if block is not None
        ]
        return np.array(rows, dtype=CARRIED)

    # --- what a library keeps ----------------------------------------------------------------------------------------

    def library_begins(self) -> None:
        """What libraries keep by now is nobody's."""
        self._library_bytes = self._state.meter.library_live()

    def note_library(self, origin: Origin) -> None:
        """What a library keeps more, or less, than before an operator (oneDNN its primitives, one per shape)."""
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
        for tensor, where in holders(frame):
            for part in parts_of(tensor):
                held = sizes.get(part.untyped_storage()._cdata)
                if held is not None:
                    self._state.write(EntryKind.HELD, held.number, self._state.writer.name(where))
