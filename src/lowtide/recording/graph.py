"""A recorded step as a graph for the pebble game, in the order in which eager mode ran it.

Nodes are operators and the blocks (storages) that they make; every in-place write of a block adds a version of it. A block
that existed before the step and is neither written nor freed stays resident; one that is written or freed is a source, which
cannot be recomputed.

A block may be dropped only while autograd is its only holder: from the moment nothing else holds it, except during the
operators of an autograd node that has asked for it. A block that was not saved is held until its last read. A block that
outlives both its last read and its release by autograd (a variable of the script refers to it) is held until it was freed.

Bytes inside an operator that belong to no block are its workspace; live bytes that no block explains are added to it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lowtide.base.errors import RecordingError
from lowtide.base.trace import Phase
from lowtide.planning.graph import Graph, Node, Offload
from lowtide.recording.file_format import PHASES, EntryKind, Role, decode_run
from lowtide.recording.recorded_step import Block, RecordedStep

BACKWARD = PHASES.index(Phase.BACKWARD)
_OF_A_UNIT = frozenset(PHASES.index(phase) for phase in (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD))
FIRST_WITH_NEEDS = 3
"""The oldest recording format that says when backward asks for a saved tensor, and until when anything else holds it."""

_HELD_BY_THEIR_OWNER = frozenset({Role.PARAMETER, Role.BUFFER, Role.GRADIENT, Role.OPTIMIZER_STATE})
"""A module, a parameter or an optimizer holds these, even if they were made within the step."""

STATE_BYTES = 5056
"""Size of a CPU generator's state (mt19937); a CUDA generator's is smaller."""


@dataclass(slots=True)
class _Entry:
    """The fields of a node under construction; ``parents`` holds node ids."""

    node: dict[str, Any]
    parents: dict[str, None] = field(default_factory=dict)


def graph_of(step: RecordedStep, *, offload: Offload | None = None, let_go: Collection[int] = ()) -> Graph:
    """The graph of a recorded step.

    Args:
        step: a step recorded with its operators.
        offload: the offload tier; None if nothing may be offloaded.
        let_go: numbers of the gradient blocks that nothing holds (the update runs in the backward): each is freed after its
            last read, and the previous step has left none of them.

    Raises:
        RecordingError: if the recording's format does not say when backward asks for saved tensors.
    """
    if step.file_format < FIRST_WITH_NEEDS:
        raise RecordingError("the recording was made by an older version and lacks what a plan needs: record again")
    return _Builder(step, let_go).graph(offload)


def inside_of(step: RecordedStep) -> list[int]:
    """Per operator, the bytes by which memory rises inside it above its outputs: a library's workspace."""
    made = np.zeros(len(step.entries) + 1, dtype=np.int64)
    for block in step.blocks:
        if block.counted and not block.met:
            made[block.born] += block.bytes
    rise = step.peaks - step.before.sum(axis=1) - made[step.ops]
    return [max(0, int(size)) for size in rise]


def operator_of(graph: Graph) -> dict[int, int]:
    """Maps the nodes that are operators, or parts of one (``op7.2``), to the operator's index in the step's ``ops``."""
    names = {v: str(n.id) for v, n in enumerate(graph.nodes)}
    return {v: int(name[2:].partition(".")[0]) for v, name in names.items() if name.startswith("op")}


def block_of(node: Node) -> int | None:
    """The number of the block that a node stands for, as a whole or as a version (``block7.2``); None for an operator."""
    name = str(node.id)
    return int(name[5:].partition(".")[0]) if name.startswith("block") else None


class _Builder:
    def __init__(self, step: RecordedStep, let_go: Collection[int]) -> None:
        self.step = step
        self.let_go = frozenset(let_go)
        self.count = len(step.ops)
        self.position = {int(e): k for k, e in enumerate(step.ops)}
        self.runs = [decode_run(int(f)) for f in step.entries["flags"][step.ops]]
        self.sources: list[list[_Entry]] = [[] for _ in range(self.count + 1)]  # per operator, those that exist before it
        self.ops: list[_Entry] = [_Entry({"id": f"op{k}"}) for k in range(self.count)]
        self.members: list[list[_Entry]] = [[] for _ in range(self.count)]
        self.made = np.zeros(self.count, dtype=np.int64)
        self.tracked = np.zeros(self.count + 1, dtype=np.int64)
        self.resident = 0
        self.spans: dict[str, tuple[int, int]] = {}
        self.within = self._within_units()

    def _within_units(self) -> list[bool]:
        """Per operator, whether it belongs to a unit (a forward, its loss and its backward), which `lowtide run` plans.

        If no module is called, a unit begins with the first tensor that autograd saves.
        """
        phases = self.step.entries["phase"]
        saves = np.flatnonzero(self.step.entries["kind"] == EntryKind.SAVED)
        found, since, inside, before = [], 0, False, -1
        for entry in map(int, self.step.ops):
            phase = int(phases[entry])
            if before == BACKWARD != phase:
                since, inside = entry, False
            saved = np.searchsorted(saves, since) < np.searchsorted(saves, entry)
            inside = inside or phase in _OF_A_UNIT or bool(saved)
            found.append(inside)
            before = phase
        return found

    def ordinal(self, entry: int) -> int:
        """Index of the last operator at or before an entry; -1 before the first operator."""
        return int(np.searchsorted(self.step.ops, entry, side="right")) - 1

    def graph(self, offload: Offload | None) -> Graph:
        for block in self.step.blocks:
            if block.bytes and block.counted and block.role is not Role.CACHE:  # a library keeps that
                self._block(block)
        before = self.step.before.sum(axis=1)
        unseen = before - np.cumsum(self.tracked)[: self.count] - self.resident
        base = int(unseen.min()) if self.count else 0
        entries: list[_Entry] = []
        for k, entry in enumerate(self.ops):
            entries += self.sources[k]
            seconds, replayable, seeded = self.runs[k]
            inside = int(self.step.peaks[k]) - int(before[k])
            row = self.step.entries[self.step.ops[k]]
            entry.node |= {
                "bytes": 0,
                "seconds": seconds,
                "workspace_bytes": max(0, inside - int(self.made[k])) + int(unseen[k]) - base,
                "recompute": replayable,
                "state_bytes": STATE_BYTES if seeded and replayable else 0,
                "module": self.step.names[row["b"]],
            }
            if inside < self.made[k]:
                self._in_place(k)
            entries.append(entry)
            entries += self.members[k]
        entries += self.sources[self.count]
        resident = _Entry({"id": "resident", "bytes": max(0, self.resident + base), "seconds": 0.0, "resident": True})
        entries.insert(0, resident)
        return _assemble(entries, offload, name=f"step {self.step.row.step}")

    def _block(self, block: Block) -> None:
        """Add the versions of one block: one from where it appeared, and one per operator that wrote it in place."""
        end = self.count if block.died >= len(self.step.entries) else self.ordinal(block.died)
        born = self.position.get(block.born, -1) if block.born >= 0 and not block.met else -1
        reads = [self.position[e] for e in block.reads if e in self.position]
        writes = [k for k in dict.fromkeys(self.position[e] for e in block.writes if e in self.position) if k > born]
        there = self._there_before(block, reads) if block.met else 0
        if born < 0 and not writes and end >= self.count and not there:
            self.resident += block.bytes
            return
        self.tracked[born + 1 if born >= 0 else there] += block.bytes
        self.tracked[min(end + 1, self.count)] -= block.bytes
        if block.number in self.let_go and born < 0:
            return  # from the previous step: it would have been freed by now
        starts = [born, *writes]
        for i, start in enumerate(starts):
            last = i == len(starts) - 1
            stop = end if last else starts[i + 1]
            name = f"block{block.number}" if not i else f"block{block.number}.{i}"
            entry = _Entry({"id": name, "bytes": block.bytes, "seconds": 0.0, "module": block.module})
            if i:
                entry.node["overwrites"] = f"block{block.number}" if i == 1 else f"block{block.number}.{i - 1}"
            if start < 0:
                entry.node |= {"recompute": False, "move": False}
                self.sources[there].append(entry)
            else:
                entry.node["made_with"] = f"op{start}"
                self.members[start].append(entry)
                if not i:
                    self.made[start] += block.bytes
            self.spans[name] = (block.bytes, end if last else -1)
            mine = [k for k in reads if start < k <= stop or (not last and k == stop)]
            for k in mine:
                self.ops[k].parents[name] = None
            self._hold(block, entry, start, stop, mine, last=last, end=end)
            self._pin(block, name, start, stop)

    def _there_before(self, block: Block, reads: list[int]) -> int:
        """The first operator before which a block is known to exist, if no operator was seen to make it.

        That is the operator that ran when the block was met, if it read the block; else the next one.
        """
        met = self.ordinal(block.born)
        return met if met in reads else met + 1

    def _pin(self, block: Block, name: str, start: int, stop: int) -> None:
        """Count the operators that an autograd node runs as readers of what it asked for: that must stay live meanwhile."""
        for asked, over in block.needs:
            first, end = self.ordinal(asked) + 1, self.ordinal(over)
            for k in range(max(first, start + 1), min(end, stop) + 1):
                self.ops[k].parents[name] = None

    def _in_place(self, k: int) -> None:
        """An operator made a block but took no memory (the engine sums two gradients in place): it reused one that died."""
        for member in self.members[k]:
            size = member.node["bytes"]
            dying = [p for p in self.ops[k].parents if self.spans[p] == (size, k)]
            taken = {m.node.get("overwrites") for m in self.members[k]}
            if dying and "overwrites" not in member.node and dying[0] not in taken:
                member.node["overwrites"] = dying[0]

    def _hold(self, block: Block, entry: _Entry, start: int, stop: int, reads: list[int], *, last: bool, end: int) -> None:
        """Set until when something other than autograd holds a version."""
        if block.number in self.let_go:
            return
        if last and end >= self.count:
            entry.node["keep"] = True
        saved = [
            (self.ordinal(a), self.ordinal(b)) for a, b in block.saved if self.ordinal(b) > start and self.ordinal(a) <= stop
        ]
        read = reads[-1] if reads else start
        released = max((min(b, stop) for _, b in saved), default=-1)
        before_its_unit = saved and start >= 0 and not self.within[start]
        if block.role in _HELD_BY_THEIR_OWNER or before_its_unit:
            until = min(stop, self.count - 1)
        elif last and end > max(read, released):
            until = min(end, self.count - 1)  # a variable of the script holds it, and Lowtide cannot take it away
        elif saved:
            until = stop if block.unheld is None else min(self.ordinal(block.unheld), stop)
        else:
            until = read
        if until > start and until >= 0:
            entry.node["held_until"] = f"op{until}"


def _assemble(entries: list[_Entry], offload: Offload | None, *, name: str) -> Graph:
    index = {str(e.node["id"]): i for i, e in enumerate(entries)}

    def at(entry: _Entry, key: str) -> int | None:
        other = entry.node.get(key)
        return None if other is None else index[str(other)]

    nodes = []
    for entry in entries:
        given = {k: v for k, v in entry.node.items() if k not in ("made_with", "overwrites", "held_until")}
        parents = tuple(index[p] for p in entry.parents)
        nodes.append(
            Node(
                **given,
                parents=parents,
                made_with=at(entry, "made_with"),
                overwrites=at(entry, "overwrites"),
                held_until=at(entry, "held_until"),
            )
        )
    return Graph(nodes=tuple(nodes), order=tuple(range(len(nodes))), name=name, offload=offload)
