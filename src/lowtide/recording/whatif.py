"""What-if analysis: a change to a recorded step, and the bytes that it would save.

A change shortens the lifetimes of blocks in the step's trace, shrinks blocks, or removes them. ``planning/unit/simulate``
plays the changed trace; the saving is how far its peak falls. A finding whose change does not lower the peak merely answers
"what is this memory", with a saving of 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from lowtide.base.trace import Buffer, Op, Trace
from lowtide.recording.file_format import Role
from lowtide.recording.peak_report import peak_of
from lowtide.recording.recorded_step import Block, RecordedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that a user may want to change, or to know.

    Attributes:
        id: the kind of finding.
        text: what takes the memory, with its bytes, and what to do about it.
        saving_bytes: how far the step's peak falls when the changed trace is played; 0 for a finding that is only an answer.
        changed_peak_bytes: the peak after the change.
        step: number of the step.
    """

    id: str
    text: str
    saving_bytes: int
    changed_peak_bytes: int
    step: int

    def to_json(self) -> dict[str, Any]:
        """An element of ``findings`` in the JSON file."""
        return {"id": self.id, "text": self.text, "saving_bytes": self.saving_bytes, "step": self.step,
                "changed_peak_bytes": self.changed_peak_bytes}


@dataclass(slots=True)
class Change:
    """A change to a step's trace.

    Attributes:
        until: new last operator of blocks, by their index in the step's ``blocks``.
        bytes: new sizes of blocks, by the same index.
        inside: new rise of memory inside operators, by operator, if it does not follow from the sizes of their outputs.
        more: additional blocks.
    """

    until: dict[int, int] = field(default_factory=dict)
    bytes: dict[int, int] = field(default_factory=dict)
    inside: dict[int, int] = field(default_factory=dict)
    more: list[Buffer] = field(default_factory=list)

    def add(self, size: int, born: int, until: int) -> None:
        """Add a block of ``size`` bytes that lives from operator ``born`` to operator ``until``."""
        self.more.append(Buffer(bytes=size, born=born, slot=0, held_until=until, released=-1, counted=True, movable=False))

    def apply(self, trace: Trace) -> Trace:
        """The changed trace."""
        buffers = list(trace.buffers)
        for i, until in self.until.items():
            buffers[i] = replace(buffers[i], held_until=max(until, buffers[i].born))
        less: Counter[int] = Counter()
        for i, size in self.bytes.items():
            if 0 <= buffers[i].born < len(trace.events) and buffers[i].counted:  # not if it was met after the last operator
                less[buffers[i].born] += buffers[i].bytes - size
            buffers[i] = replace(buffers[i], bytes=size)
        events = list(trace.events)
        for k, size in less.items():  # an operator's outputs are part of its rise
            event = events[k]
            assert isinstance(event, Op)
            events[k] = replace(event, inside_bytes=max(0, event.inside_bytes - size))
        for k, inside in self.inside.items():
            event = events[k]
            assert isinstance(event, Op)
            events[k] = replace(event, inside_bytes=inside)
        return replace(trace, buffers=(*buffers, *self.more), events=tuple(events))


@dataclass(frozen=True)
class Case:
    """The input of the finders: the recorded steps, and the step to explain.

    Attributes:
        steps: all steps whose operators were kept.
        step: the step to explain.
        cap_bytes: the memory limit of the run; 0 without one.
        allocator: figures of the device's caching allocator; empty without one.
        last: whether ``step`` is the last step of the recording.
        later_use: by number of a block that was used again after the step in which it appeared: the last step that read it,
            and the last that wrote it.
        whole: whether the recording goes to the script's end, so that all uses are known.
    """

    steps: Sequence[RecordedStep]
    step: RecordedStep
    cap_bytes: int = 0
    allocator: Mapping[str, Any] = field(default_factory=dict)
    last: bool = False
    later_use: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    whole: bool = False

    @cached_property
    def following(self) -> RecordedStep | None:
        """The next step, if its operators were kept."""
        return next((s for s in self.steps if s.row.step == self.step.row.step + 1), None)

    @cached_property
    def earlier(self) -> Mapping[int, tuple[RecordedStep, Block]]:
        """The previous step and its blocks, by block number; empty if its operators were not kept."""
        before = next((s for s in self.steps if s.row.step == self.step.row.step - 1), None)
        return {} if before is None else {b.number: (before, b) for b in before.blocks}

    @cached_property
    def later(self) -> Mapping[int, Block]:
        """Blocks of the next step, by number; empty if its operators were not kept."""
        return {} if self.following is None else {b.number: b for b in self.following.blocks}

    @cached_property
    def idle_variables(self) -> frozenset[tuple[str, str]]:
        """Variables whose blocks lay unread through the whole of another step.

        Only complete steps count: one that was cut short might still have read them.
        """
        return frozenset(
            b.variable for s in self.steps if s.row.complete and s is not self.step
            for b in s.blocks if b.held and b.born < 0 and b.died == len(s.entries) and not b.reads
        )

    @cached_property
    def peak(self) -> int:
        """The step's peak in bytes, as ``planning/unit/simulate`` plays it."""
        return peak_of(self.step.trace)

    def is_used_later(self, block: Block) -> bool:
        """Whether a later step reads a block."""
        return self.later_use.get(block.number, (-1, -1))[0] > self.step.row.step

    def is_written_later(self, block: Block) -> bool:
        """Whether a later step writes a block in place."""
        return self.later_use.get(block.number, (-1, -1))[1] > self.step.row.step

    def op(self, k: int) -> Op:
        """One of the step's operators."""
        event = self.step.trace.events[k]
        assert isinstance(event, Op)
        return event

    def inside(self, k: int) -> int:
        """Bytes by which memory rises inside an operator, its outputs included."""
        return self.op(k).inside_bytes

    def denied(self, *parts: str) -> list[int]:
        """Operators (indices) that ran out of memory and whose names contain any of the given parts."""
        step = self.step
        names = [(int(k), step.names[step.entries[step.ops[k]]["a"]]) for k in np.flatnonzero(step.denied)]
        return [k for k, name in names if any(part in name for part in parts)]

    def there(self) -> list[tuple[int, Block, Role]]:
        """Blocks that are live at the peak: (index in the step's ``blocks``, block, role)."""
        entry = int(self.step.ops[self.step.peak_op])
        return [(i, b, b.role_at(entry)) for i, b in enumerate(self.step.blocks) if b.counted and b.born <= entry < b.died]

    def found(self, kind: str, text: str, change: Change | None) -> Finding:
        """Builds a finding; its saving comes from playing the change with ``planning/unit/simulate`` (None: no saving)."""
        before = self.peak
        after = before if change is None else peak_of(change.apply(self.step.trace))
        return Finding(id=kind, text=text, saving_bytes=max(0, before - after), changed_peak_bytes=after,
                       step=self.step.row.step)
