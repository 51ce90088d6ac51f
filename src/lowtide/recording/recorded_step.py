"""Lays out one recorded step: lifetimes of its blocks, bytes by role at each instant, the peak, a trace.

The instants are the step's operators. The recorder measured the live bytes before each operator and the peak inside it.
Bytes of the recorded blocks are attributed to their roles; the rest inside an operator is its workspace, and the rest before
it is ``unknown`` (in a compiled region: workspace). So the sums close by construction, and ``unknown`` says how much was not
seen.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from lowtide.base.trace import Buffer, Op, Phase, Site, Trace
from lowtide.recording.file_format import COMPILED, FORMAT, PHASES, EntryKind, Flag, Role, StepRow
from lowtide.recording.reader import Recording

ROLES: Final = tuple(Role)
TOP: Final = 10
_DATA: Final = PHASES.index(Phase.DATA)


@dataclass(slots=True, kw_only=True)
class Block:
    """One storage of a recorded step.

    Its many fields are what the entries say about one storage; none of them is derived.

    Attributes:
        counted: whether its bytes are part of the measured memory.
        born: entry at which it appeared; -1 if it was live when the step began.
        died: entry at which its memory was freed; the number of entries if it outlived the step.
        saved: spans of entries in which autograd held a saved tensor of it.
        needs: spans of entries in which an autograd node used a saved tensor of it that the node had asked for.
        unheld: entry from which only autograd's saved tensors held it; None if that never happened.
        reads: entries of the operators that read it.
        writes: entries of those readers that also wrote it in place.
        shown: by reading entry, bytes of the tensors on it that the operator was given; 0 if the recording does not say.
        held: variables of the script that were found to refer to it.
        holder: variable that referred to it when memory ran out; the block may simply have been in use.
        role: its recognised role; None if the role follows from its lifetime.
        met: whether it existed before the recorder saw it.
        open: whether the step was cut short while it was live, so that its later uses are unknown.
    """

    number: int
    bytes: int
    counted: bool
    born: int
    died: int
    phase: Phase
    role: Role | None
    name: str
    op: str
    module: str
    source: str
    label: str
    saved: list[tuple[int, int]]
    reads: list[int]
    writes: list[int]
    held: list[str]
    met: bool = False
    open: bool = False
    holder: str = ""
    shown: dict[int, int] = field(default_factory=dict)
    needs: list[tuple[int, int]] = field(default_factory=list)
    unheld: int | None = None

    @property
    def last_read(self) -> int:
        """The last entry at which an operator read or made it; its end if the step was cut short (:attr:`open`)."""
        if self.open:
            return self.died
        return max(self.reads[-1] if self.reads else -1, self.born)

    @property
    def variable(self) -> tuple[str, str]:
        """The variable that holds it (up to the first ``[``), and where that variable is."""
        name, _, place = self.held[-1].rpartition(" (")
        return name.split("[", 1)[0], place

    def role_at(self, entry: int) -> Role:
        """Its role just after an entry."""
        if self.role is not None:
            return self.role
        if any(a <= entry < b for a, b in self.saved):
            return Role.ACTIVATION
        if self.phase is Phase.DATA:
            return Role.INPUT
        return Role.TEMPORARY if entry <= self.last_read else Role.OUTPUT

    def spans(self) -> list[tuple[int, int, Role]]:
        """Its lifetime as spans (from, to, role) of entries, ``to`` excluded."""
        first = max(self.born, 0)
        if self.role is not None:
            return [(first, self.died, self.role)]
        cuts = sorted({first, self.died, *(min(max(x, first), self.died) for s in self.saved for x in s),
                       min(max(self.last_read + 1, first), self.died)})
        return [(a, b, self.role_at(a)) for a, b in itertools.pairwise(cuts) if b > a]

    @property
    def title(self) -> str:
        """Its name for reports."""
        return self.name or f"{self.op.removesuffix('.default')} -> {self.label}".removeprefix(" -> ")


@final
class RecordedStep:
    """One recorded step with its entries, laid out so that reports and finders can query it."""

    def __init__(self, row: StepRow, names: tuple[str, ...], *, file_format: int = FORMAT) -> None:
        """Index the entries of a step from a file of the given format; ``row.entries`` must not be None."""
        assert row.entries is not None
        self.row = row
        self.names = names
        self.file_format = file_format
        self.entries: NDArray[Any] = row.entries
        self.ops: NDArray[np.int64] = np.flatnonzero(np.isin(self.entries["kind"], (EntryKind.OP, EntryKind.DENIED)))

    def _name(self, number: int) -> str:
        return self.names[number] if number < len(self.names) else "?"

    @cached_property
    def blocks(self) -> list[Block]:
        """All blocks that were live at any time in the step."""
        end = len(self.entries)
        found: dict[int, Block] = {}
        open_saves: dict[int, tuple[int, int]] = {}
        open_needs: dict[int, list[int]] = defaultdict(list)
        for row in self.row.carried if self.row.carried is not None else ():
            number = int(row["block"])
            found[number] = Block(
                number=number, bytes=int(row["size"]), counted=bool(row["counted"]), born=-1, died=end,
                phase=PHASES[row["phase"]], role=None if row["role"] < 0 else Role(int(row["role"])),
                name=self._name(row["name"]), op=self._name(row["op"]), module=self._name(row["module"]),
                source=self._name(row["source"]), label=self._name(row["label"]), saved=[], reads=[], writes=[], held=[],
            )
            if row["saves"]:
                open_saves[number] = (int(row["saves"]), 0)
        op = (0, 0, 0)
        at = -1
        failed = False
        for i, (_, kind, phase, flags, a, b, c, size, _, _) in enumerate(self.entries.tolist()):
            if kind in (EntryKind.OP, EntryKind.DENIED):
                op, at, failed = (a, b, c), i, kind == EntryKind.DENIED
                continue
            if kind == EntryKind.BORN:
                met = bool(flags & Flag.MET)
                origin = (0, 0, 0) if met else op
                found[a] = Block(
                    number=a, bytes=size, counted=bool(flags & Flag.COUNTED), born=i if met else at, died=end,
                    phase=PHASES[phase], role=None, name="", op=self._name(origin[0]), module=self._name(origin[1]),
                    source=self._name(origin[2]), label=self._name(b), saved=[], reads=[], writes=[], held=[], met=met,
                )
                continue
            block = found.get(a)
            if block is None:
                continue
            if kind == EntryKind.DIED:
                block.died = i
                if a in open_saves:  # saved by a compiled region, which reports no release
                    block.saved.append((open_saves.pop(a)[1], i))
            elif kind == EntryKind.READ:
                block.reads.append(at)
                block.shown[at] = block.shown.get(at, 0) + size
                if flags & Flag.WRITTEN:
                    block.writes.append(at)
            elif kind == EntryKind.SAVED:
                count, since = open_saves.get(a, (0, at if block.born == at else i))
                open_saves[a] = (count + 1, since)
            elif kind == EntryKind.NEED:
                open_needs[a].append(i)
            elif kind == EntryKind.UNPINNED and open_needs[a]:
                block.needs.append((open_needs[a].pop(0), i))
            elif kind == EntryKind.UNHELD:
                block.unheld = i if block.unheld is None else block.unheld
            elif kind == EntryKind.RELEASED and a in open_saves:
                if open_needs[a]:
                    block.needs.append((open_needs[a].pop(0), i))
                count, since = open_saves.pop(a)
                if count > 1:
                    open_saves[a] = (count - 1, since)
                else:
                    block.saved.append((since, i))
            elif kind == EntryKind.ROLE:
                block.role, block.name = Role(flags), self._name(b)
            elif kind == EntryKind.HELD and failed:
                block.holder = self._name(b)
            elif kind == EntryKind.HELD:
                block.held.append(self._name(b))
        for number, (_, since) in open_saves.items():
            found[number].saved.append((since, end))
        for number, since_entries in open_needs.items():
            found[number].needs += [(since, end) for since in since_entries]
        if not self.row.complete:
            for block in found.values():
                block.open = block.died == end and not block.held
        return list(found.values())

    @cached_property
    def before(self) -> NDArray[np.int64]:
        """[operators, roles]: live bytes before each operator; each row sums to the measured bytes."""
        state = np.zeros((len(self.entries) + 1, len(ROLES)), dtype=np.int64)
        for block in self.blocks:
            if block.counted:
                for first, end, role in block.spans():
                    state[first, role] += block.bytes
                    state[end, role] -= block.bytes
        np.cumsum(state, axis=0, out=state)
        shifted = np.zeros((len(self.ops), len(ROLES)), dtype=np.int64)
        inner = self.ops > 0
        shifted[inner] = state[self.ops[inner] - 1]
        if not inner.all():
            shifted[~inner] = self._carried_by_role()
        measured = np.where(self.denied, self.entries["live"][self.ops], self.entries["size"][self.ops])
        unseen = measured - shifted.sum(axis=1)
        within = (unseen > 0) & np.isin(self.entries["a"][self.ops], self._compiled)
        shifted[:, Role.WORKSPACE] += np.where(within, unseen, 0)
        shifted[:, Role.UNKNOWN] += np.where(within, 0, unseen)
        return shifted

    @cached_property
    def _compiled(self) -> list[int]:
        """Ids of the names of operators that belong to a compiled region; the rest of such a region is not seen."""
        return [i for i, name in enumerate(self.names) if name.startswith(f"{COMPILED}: ")]

    @cached_property
    def denied(self) -> NDArray[np.bool_]:
        """[operators]: which operators ran out of memory."""
        found: NDArray[np.bool_] = self.entries["kind"][self.ops] == EntryKind.DENIED
        return found

    @cached_property
    def peaks(self) -> NDArray[np.int64]:
        """[operators]: peak bytes inside each operator; for one that ran out of memory, the least it would have needed."""
        asked = np.maximum(self.entries["peak"][self.ops], self.entries["live"][self.ops]) + self.entries["size"][self.ops]
        found: NDArray[np.int64] = np.where(self.denied, asked, self.entries["peak"][self.ops])
        return found

    def _carried_by_role(self) -> NDArray[np.int64]:
        found = np.zeros(len(ROLES), dtype=np.int64)
        for block in self.blocks:
            if block.counted and block.born < 0:
                found[block.role_at(0)] += block.bytes
        return found

    @cached_property
    def at_peak(self) -> NDArray[np.int64]:
        """[operators, roles]: bytes at the peak inside each operator; each row sums to the measured bytes."""
        found = self.before.copy()
        rest = self.peaks - found.sum(axis=1)
        made = np.zeros_like(found)
        ordinal = {int(e): k for k, e in enumerate(self.ops)}
        for block in self.blocks:
            k = ordinal.get(block.born)
            if k is not None and block.counted and not block.met:
                role = block.role_at(block.born)
                made[k, role] += block.bytes
        total = made.sum(axis=1)
        fits = total <= rest
        found += np.where(fits[:, None], made, 0)
        largest = made.argmax(axis=1)
        rows = np.flatnonzero(~fits)
        found[rows, largest[rows]] += rest[rows]
        found[:, Role.WORKSPACE] += np.where(fits, rest - total, 0)
        return found

    @cached_property
    def peak_op(self) -> int:
        """The operator (an index into :attr:`ops`) with the step's peak."""
        return int(self.peaks.argmax())

    def top(self, k: int, count: int = TOP) -> list[Block]:
        """The largest blocks that are live at an operator's peak, largest first."""
        entry = int(self.ops[k])
        there = [b for b in self.blocks if b.counted and b.born <= entry < b.died]
        return sorted(there, key=lambda b: -b.bytes)[:count]

    def op_at(self, entry: int) -> int:
        """The operator (an index into :attr:`ops`) at an entry, or else the next one; -1 for the start of the step."""
        return -1 if entry < 0 else int(np.searchsorted(self.ops, entry))

    @cached_property
    def trace(self) -> Trace:
        """The step as a trace: its operators, and its blocks with the lifetimes that they had."""
        entries, ops = self.entries, self.ops
        position = np.searchsorted(ops, np.arange(len(entries) + 1))
        buffers = []
        tracked = np.zeros(len(ops) + 2, dtype=np.int64)
        for block in self.blocks:
            born = int(position[block.born]) if block.born >= 0 else -1
            until = max(int(position[block.died]) - 1, born)
            buffers.append(Buffer(bytes=block.bytes, born=born, slot=0, held_until=until, released=-1,
                                  counted=block.counted, movable=False))
            if block.counted and until > born:
                tracked[born + 1] += block.bytes
                tracked[until + 1] -= block.bytes
        live = np.cumsum(tracked)[: len(ops)]
        base = self.row.start_bytes - sum(b.bytes for b in self.blocks if b.counted and b.born < 0)
        before = self.before.sum(axis=1)
        events = tuple(
            Op(
                site=Site(module=self._name(e["b"]), op=self._name(e["a"]), nth=0), phase=PHASES[e["phase"]], seconds=0.0,
                inside_bytes=max(0, int(self.peaks[k]) - int(before[k])), reads=(), writes=(),
            )
            for k, e in enumerate(entries[ops])
        )
        return Trace(
            base_bytes=base, resident_bytes=0, events=events, buffers=tuple(buffers), saves=(),
            other_bytes=tuple(int(x) for x in before - live - base), spike_bytes=(0,) * len(ops), backward_event=len(ops),
        )


def laid_out(recording: Recording) -> list[RecordedStep]:
    """The steps whose operators were kept, in order. Every call lays them out anew, so callers keep the result."""
    written = int(recording.meta.get("format", 0))
    steps = [RecordedStep(row, recording.names, file_format=written) for row in recording.steps if row.entries is not None]
    return [s for s in steps if len(s.ops)]


def highest(steps: Iterable[RecordedStep]) -> RecordedStep | None:
    """The step with the highest peak, the first one if several share it; None without steps."""
    return max(steps, key=lambda s: int(s.peaks.max()), default=None)


def telling(steps: Iterable[RecordedStep]) -> RecordedStep | None:
    """The step to explain: the last one that ran out of memory, else the one with the highest peak; None without steps."""
    found = list(steps)
    failed = [s for s in found if s.denied.any()]
    return failed[-1] if failed else highest(found)
