"""Models the update in the backward on a recorded graph: whether it is possible, and the operators' new order.

Whether a script allows the lever is determined while it runs (``runtime/updates/optimizer_in_backward``). Here it is inferred
from the recorded operators, so anything that leaves no operator (a hook, a changed learning rate, several processes) goes
unnoticed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from lowtide.base.trace import Phase
from lowtide.planning.graph import Graph
from lowtide.planning.schedule import plain_row
from lowtide.recording.file_format import PHASES, EntryKind, Flag, Role
from lowtide.recording.graph import BACKWARD, block_of, inside_of, operator_of
from lowtide.recording.recorded_step import RecordedStep

OPTIMIZER: Final = PHASES.index(Phase.OPTIMIZER)
FOREACH: Final = "_foreach_"
"""Part of the names of operators that take lists of tensors."""
_FUSED: Final = "_fused_"


def consumed(step: RecordedStep) -> frozenset[int]:
    """Numbers of the gradient blocks that an update in the backward would free, including unread ones of the previous step.

    Empty if the lever cannot work: a gradient is made, written or read by anything other than its backward and one optimizer's
    update, is carried over from the previous step, or another backward runs between its backward and its update.
    """
    phases = step.entries["phase"]
    segments = np.cumsum(step.entries["kind"] == EntryKind.PHASE)
    of_segment = {int(s): int(p) for s, p in zip(segments, phases, strict=True)}
    gradients = [b for b in step.blocks if b.role is Role.GRADIENT and b.counted]
    left, found, unread = [], [], []
    for block in gradients:
        if block.born < 0 and not block.reads:
            left.append(block)
            continue
        if block.born < 0 or block.met or phases[block.born] != BACKWARD:
            return frozenset()
        made = int(segments[block.born])
        at = {int(segments[r]) for r in block.reads} - {made}
        if not at:
            unread.append(block)
            continue
        update = min(at)
        between = (of_segment[s] for s in range(made + 1, update))
        if len(at) > 1 or of_segment[update] != OPTIMIZER or BACKWARD in between:
            return frozenset()
        found.append(block)
    names = {b.name for b in found}
    if any(b.name in names for b in unread):  # another backward made a gradient of a parameter that the update covers
        return frozenset()
    return frozenset(b.number for b in [*found, *(b for b in left if b.name in names)])


def lists_apart(step: RecordedStep, graph: Graph) -> Graph:
    """Splits each list operator of the update into one operator per list entry, as it would run for one parameter."""
    parts = {}
    for v, k in operator_of(graph).items():
        name = step.names[step.entries["a"][step.ops[k]]]
        if step.entries["phase"][step.ops[k]] == OPTIMIZER and (FOREACH in name or _FUSED in name):
            found = _entries_of_lists(step, k, fused=_FUSED in name)
            if found:
                parts[v] = found
    return _split(step, graph, parts) if parts else graph


def _entries_of_lists(step: RecordedStep, k: int, *, fused: bool) -> dict[int, int]:
    """Maps block numbers to indices in an operator's lists; empty if the operator has no lists of several entries.

    The recorder notes an operator's inputs list after list, parameters first, then what all entries share (a scalar tensor).
    """
    end = int(step.ops[k + 1]) if k + 1 < len(step.ops) else len(step.entries)
    noted = step.entries[int(step.ops[k]) + 1 : end]
    read = noted[noted["kind"] == EntryKind.READ]
    made = noted[(noted["kind"] == EntryKind.BORN) & ((noted["flags"] & Flag.MET) == 0)]
    written = int(((read["flags"] & Flag.WRITTEN) != 0).sum())
    count = _parameters(step, read["a"]) if fused else len(made) or written
    if count < 2 or len(read) < count or len(made) not in (0, count):
        return {}
    whole = len(read) // count * count
    if written and not fused and written != count:
        return {}
    pairs = [(int(b), i % count) for i, b in enumerate(read["a"][:whole])] + [(int(b), i) for i, b in enumerate(made["a"])]
    found = dict(pairs)
    return found if all(found[b] == i for b, i in pairs) else {}


def _parameters(step: RecordedStep, numbers: Collection[int]) -> int:
    """How many of an operator's input blocks are parameters."""
    wanted = {int(n) for n in numbers}
    return sum(1 for b in step.blocks if b.number in wanted and b.role is Role.PARAMETER)


def _split(step: RecordedStep, graph: Graph, parts: Mapping[int, Mapping[int, int]]) -> Graph:
    """Splits operators into parts, given the part that each block belongs to; a block without a part belongs to all parts."""
    numbers = [block_of(node) for node in graph.nodes]
    operators = operator_of(graph)
    counts = {v: max(found.values()) + 1 for v, found in parts.items()}
    place: dict[int, int] = {}
    of_part: dict[tuple[int, int], int] = {}
    order: list[tuple[int, int]] = []

    def which(v: int, value: int) -> int:
        """The part of an operator that a value belongs to; the last part for a value that belongs to all."""
        return parts[v].get(numbers[value] or 0, counts[v] - 1)

    for v, node in enumerate(graph.nodes):
        if node.made_with is not None:
            continue
        members: dict[int, list[int]] = defaultdict(list)
        for u in graph.members[v]:
            members[which(v, u) if v in parts else 0].append(u)
        for i in range(counts.get(v, 1)):
            of_part[v, i] = place[v] = len(order)
            order.append((v, i))
            for u in members[i]:
                place[u] = len(order)
                order.append((u, 0))

    def part(v: int, value: int) -> int:
        return of_part[v, which(v, value)] if v in parts else place[v]

    shares = {v: _shares(graph, v, found, numbers, counts[v]) for v, found in parts.items()}
    inside = inside_of(step)
    parents: dict[tuple[int, int], list[int]] = defaultdict(list)
    for v, found in parts.items():
        for p in graph.nodes[v].parents:
            one = found.get(numbers[p] or 0)
            for i in range(counts[v]) if one is None else (one,):
                parents[v, i].append(p)
    nodes = []
    for v, i in order:
        node = graph.nodes[v]
        if v in parts:
            own = min(inside[operators[v]], node.workspace_bytes)
            node = replace(
                node,
                id=f"{node.id}.{i}" if i else node.id,
                parents=tuple(parents[v, i]),
                seconds=node.seconds * shares[v][i],
                workspace_bytes=node.workspace_bytes - own + round(own * shares[v][i]),
            )
        nodes.append(replace(
            node,
            parents=tuple(place[p] for p in node.parents),
            made_with=None if node.made_with is None else part(node.made_with, v),
            overwrites=None if node.overwrites is None else place[node.overwrites],
            held_until=None if node.held_until is None else part(node.held_until, v),
        ))
    return replace(graph, nodes=tuple(nodes), order=tuple(range(len(nodes))))


def _shares(graph: Graph, v: int, found: Mapping[int, int], numbers: list[int | None], count: int) -> list[float]:
    """Each part's share of an operator's seconds and bytes, by the bytes that it works on; the shares add up to 1."""
    sizes = [0] * count
    for u in (*graph.nodes[v].parents, *graph.members[v]):
        one = found.get(numbers[u] or 0)
        if one is not None:
            sizes[one] += graph.nodes[u].bytes
    total = sum(sizes)
    return [size / total if total else 1.0 / count for size in sizes]


def updates_at_once(step: RecordedStep, graph: Graph) -> list[int]:
    """Operator nodes in the given order, except that each of the optimizer's runs as soon as it can.

    It can run once its inputs exist and every other reader of what it overwrites has run. An operator of the optimizer that
    depends on no operator outside it runs in its old place or, if needed earlier, right before the operator that needs it.
    """
    operators = operator_of(graph)
    row = [m.node for m in plain_row(graph)]
    late = {v for v in row if v in operators and step.entries["phase"][step.ops[operators[v]]] == OPTIMIZER}
    leader = {u: v for v in row for u in (v, *graph.members[v])}
    needs = {v: {leader[p] for p in graph.reads[v] if p in leader} for v in row}
    for v in late:
        for old in graph.olds[v]:
            needs[v] |= {r for r in graph.children[old] if r != v and r in needs and (r not in late or r < v)}
    moved: set[int] = set()
    for v in row:
        if v in late and any(p in moved or (p in operators and p not in late) for p in needs[v]):
            moved.add(v)
    waiting = {v: {p for p in needs[v] if p in moved or p not in late} for v in moved}
    unlocks: dict[int, list[int]] = defaultdict(list)
    for v, before in waiting.items():
        for p in before:
            unlocks[p].append(v)
    out: dict[int, None] = {}
    ready: list[int] = []

    def run(v: int) -> None:
        for p in sorted(needs[v] & late):
            if p not in out:
                run(p)
        out[v] = None
        for u in unlocks[v]:
            waiting[u].discard(v)
            if not waiting[u]:
                ready.append(u)

    for v in row:
        if v not in moved and v not in out:
            run(v)
        while ready:
            ready.sort(reverse=True)
            run(ready.pop())
    return list(out)
