"""What if: a change of a recorded step, and the bytes that it would save.

A change makes blocks of the step's trace live shorter, or smaller, or not be there. ``planning/unit/simulate`` plays the
changed trace; the saving is by how much its peak is lower. A finding whose change does not lower the peak is an answer to
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
        id: which kind of finding.
        text: what it is, in bytes, and what to do.
        saving_bytes: by how much the step's peak falls, as the changed trace is played; 0 for a mere answer.
        changed_peak_bytes: the peak then.
        step: which step it is about.
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
    """What would be different: a block's last operator or bytes (blocks by their places in the step), more blocks; how far
    memory rises inside an operator, where that does not follow from what it makes.
    """

    until: dict[int, int] = field(default_factory=dict)
    bytes: dict[int, int] = field(default_factory=dict)
    inside: dict[int, int] = field(default_factory=dict)
    more: list[Buffer] = field(default_factory=list)

    def add(self, size: int, born: int, until: int) -> None:
        """One more block, of so many bytes, from one operator to another."""
        self.more.append(Buffer(bytes=size, born=born, slot=0, held_until=until, released=-1, counted=True, movable=False))

    def apply(self, trace: Trace) -> Trace:
        """The changed trace."""
        buffers = list(trace.buffers)
        for i, until in self.until.items():
            buffers[i] = replace(buffers[i], held_until=max(until, buffers[i].born))
        less: Counter[int] = Counter()
        for i, size in self.bytes.items():
            if 0 <= buffers[i].born < len(trace.events) and buffers[i].counted:  # not met after the last operator only
                less[buffers[i].born] += buffers[i].bytes - size
            buffers[i] = replace(buffers[i], bytes=size)
        events = list(trace.events)
        for k, size in less.items():  # what an operator makes is part of its rise
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
    """What the finders look at: the recorded steps, and the one that is asked about.

    Attributes:
        last: whether no other step came after it.
        later_use: per block that was used again after the step in which it appeared, the last step in which it was read, and
            the last in which it was written.
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
        """The step after it, if its operators were kept."""
        return next((s for s in self.steps if s.row.step == self.step.row.step + 1), None)

    @cached_property
    def earlier(self) -> Mapping[int, tuple[RecordedStep, Block]]:
        """Blocks of the step before it, by number, if its operators were kept."""
        before = next((s for s in self.steps if s.row.step == self.step.row.step - 1), None)
        return {} if before is None else {b.number: (before, b) for b in before.blocks}

    @cached_property
    def later(self) -> Mapping[int, Block]:
        """Its blocks, by number."""
        return {} if self.following is None else {b.number: b for b in self.following.blocks}

    @cached_property
    def idle_variables(self) -> frozenset[tuple[str, str]]:
        """Variables through whose results a whole step went by without reading them: one that was cut short would not have."""
        return frozenset(
            b.variable for s in self.steps if s.row.complete and s is not self.step
            for b in s.blocks if b.held and b.born < 0 and b.died == len(s.entries) and not b.reads
        )

    @cached_property
    def peak(self) -> int:
        """The step's peak, as ``planning/unit/simulate`` plays it."""
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
        """How far memory rises inside an operator."""
        return self.op(k).inside_bytes

    def denied(self, *parts: str) -> list[int]:
        """Operators that failed for want of memory and have one of some parts in their names."""
        step = self.step
        names = [(int(k), step.names[step.entries[step.ops[k]]["a"]]) for k in np.flatnonzero(step.denied)]
        return [k for k, name in names if any(part in name for part in parts)]

    def there(self) -> list[tuple[int, Block, Role]]:
        """Blocks at the highest point, with their places and roles."""
        entry = int(self.step.ops[self.step.peak_op])
        return [(i, b, b.role_at(entry)) for i, b in enumerate(self.step.blocks) if b.counted and b.born <= entry < b.died]

    def found(self, kind: str, text: str, change: Change | None) -> Finding:
        """A finding, its change played by ``planning/unit/simulate``."""
        before = self.peak
        after = before if change is None else peak_of(change.apply(self.step.trace))
        return Finding(id=kind, text=text, saving_bytes=max(0, before - after), changed_peak_bytes=after,
                       step=self.step.row.step)
