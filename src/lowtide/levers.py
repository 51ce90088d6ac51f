"""A recorded step's graph as it would be with levers: what would run, in which order, and how many bytes it would take.

A lever is known here as far as a recorded step shows it: recurrent layers and attention over pieces are not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace
from typing import Final

from lowtide.advise import CHUNKS, LARGE, loss_blocks
from lowtide.allowed import LEVERS, LOSS, PIECES, SLICES, UPDATE
from lowtide.explain import Step
from lowtide.pebble.graph import Graph, Node
from lowtide.pebble.referee import play
from lowtide.pebble.schedule import Act, Move, Row, plain_row, unfold
from lowtide.stepgraph import block_of, graph_of, operator_of
from lowtide.store import PHASES, Flag, Kind
from lowtide.trace import Phase

_CROSS_ENTROPY: Final = ("_log_softmax", "nll_loss")
"""Operators of the loss that can be had in pieces."""
_IN_PIECES: Final = ("convolution_backward", "batch_norm_backward")
"""Operators whose library takes less when they run over pieces."""
_LEFT: Final = 4
"""Of that, pieces leave the fourth part (measured on 3x3 convolutions and batch norms: docs/levers.md)."""
_FOREACH: Final = "_foreach_"
_OPTIMIZER: Final = PHASES.index(Phase.OPTIMIZER)
_BACKWARD: Final = PHASES.index(Phase.BACKWARD)


def levers_of(step: Step) -> list[str]:
    """Names of levers that would change a step, in the order in which they are listed."""
    plain = with_levers(step, ())
    return [name for name in LEVERS if _changes(plain, with_levers(step, (name,)))]


def peak_of(graph: Graph) -> int:
    """Of the graph's own order, without a plan, in bytes."""
    return play(graph, unfold(graph, plain_row(graph))).peak_bytes


def with_levers(step: Step, names: Collection[str]) -> Graph:
    """The graph of a step with some levers, its order the one in which operators would run.

    Args:
        step: with operators.
        names: of levers. An update in the backward is of one parameter, and has no slices.

    Raises:
        RecordingError: if the recording has no operators' seconds.
    """
    graph = graph_of(step, gradients_held=UPDATE not in names)
    if LOSS in names:
        graph = _loss_in_pieces(step, graph)
    if PIECES in names:
        graph = _libraries_take_less(step, graph)
    if UPDATE in names:
        graph = _lists_apart(step, graph)
        row = updates_at_once(step, graph)
        sources = [v for v in graph.order if graph.nodes[v].resident]
        order = [*sources, *(u for move in row for u in (move.node, *graph.members[move.node]))]
        return replace(graph, order=tuple(order))
    return _temporaries_one_by_one(step, graph) if SLICES in names else graph


def _changes(plain: Graph, other: Graph) -> bool:
    """Whether a lever would take less at some moment, or let it go earlier."""
    if plain.order != other.order or len(plain.nodes) != len(other.nodes):
        return True
    pairs = zip(plain.nodes, other.nodes, strict=True)
    return any((a.bytes, a.workspace_bytes) != (b.bytes, b.workspace_bytes) for a, b in pairs)


def _changed(graph: Graph, nodes: dict[int, Node]) -> Graph:
    return replace(graph, nodes=tuple(nodes.get(v, n) for v, n in enumerate(graph.nodes)))


def _values_of(graph: Graph) -> dict[int, list[int]]:
    """By a block's number, the nodes that are its versions."""
    found: dict[int, list[int]] = defaultdict(list)
    for v, node in enumerate(graph.nodes):
        number = block_of(node)
        if number is not None:
            found[number].append(v)
    return found


def _with_bytes(step: Step, graph: Graph, sizes: dict[int, int]) -> Graph:
    """Blocks, by their places in the step, of other sizes."""
    values = _values_of(graph)
    return _changed(graph, {
        v: replace(graph.nodes[v], bytes=size) for i, size in sizes.items() for v in values[step.blocks[i].number]
    })


def _loss_in_pieces(step: Step, graph: Graph) -> Graph:
    """Logits and what the loss makes of them as large as one piece; the backward makes them once more."""
    blocks = loss_blocks(step, _CROSS_ENTROPY)
    if sum(step.blocks[i].bytes for i in blocks) < LARGE * peak_of(graph):
        return graph
    position = {int(entry): k for k, entry in enumerate(step.ops)}
    nodes = {k: v for v, k in operator_of(graph).items()}
    made = {position[step.blocks[i].born] for i in blocks if step.blocks[i].born in position}
    backward = {k for k in range(len(step.ops)) if step.entries["phase"][step.ops[k]] == _BACKWARD}
    again = sum(graph.nodes[nodes[k]].seconds for k in made - backward)
    reading = sorted({position[r] for i in blocks for r in step.blocks[i].reads if r in position} & backward)
    smaller = _with_bytes(step, graph, {i: step.blocks[i].bytes // CHUNKS for i in blocks})
    if not reading:
        return smaller
    first = nodes[reading[0]]
    return _changed(smaller, {first: replace(smaller.nodes[first], seconds=smaller.nodes[first].seconds + again)})


def _libraries_take_less(step: Step, graph: Graph) -> Graph:
    """Backwards of convolutions and batch norms over pieces: what is inside them besides what they make."""
    made: dict[int, int] = defaultdict(int)
    for block in step.blocks:
        made[block.born] += block.bytes if block.counted else 0
    before = step.before.sum(axis=1)
    changed = {}
    for v, k in operator_of(graph).items():
        entry = int(step.ops[k])
        if any(part in step.names[step.entries["a"][entry]] for part in _IN_PIECES):
            inside = max(0, int(step.peaks[k]) - int(before[k]) - made[entry])
            less = min(inside - inside // _LEFT, graph.nodes[v].workspace_bytes)
            changed[v] = replace(graph.nodes[v], workspace_bytes=graph.nodes[v].workspace_bytes - less)
    return _changed(graph, changed)


def _temporaries_one_by_one(step: Step, graph: Graph) -> Graph:
    """Of what a foreach operator of the update makes for a while, only the largest at a time."""
    sizes: dict[int, int] = {}
    largest: dict[int, int] = {}
    for i, block in enumerate(step.blocks):
        if block.counted and block.phase is Phase.OPTIMIZER and _FOREACH in block.op and block.died < len(step.entries):
            one = largest.setdefault(block.born, i)
            if step.blocks[one].bytes < block.bytes:
                sizes[one], largest[block.born] = 0, i
            elif one != i:
                sizes[i] = 0
    return _with_bytes(step, graph, sizes)


def _lists_apart(step: Step, graph: Graph) -> Graph:
    """Each foreach operator of the update as one operator for each entry of its lists, as it runs for one parameter."""
    parts = {}
    for v, k in operator_of(graph).items():
        entry = int(step.ops[k])
        if step.entries["phase"][entry] == _OPTIMIZER and _FOREACH in step.names[step.entries["a"][entry]]:
            found = _entries_of_lists(step, k)
            if found:
                parts[v] = found
    return _split(graph, parts) if parts else graph


def _entries_of_lists(step: Step, k: int) -> dict[int, int]:
    """By a block's number, which entry of an operator's lists it is; nothing where the operator has no lists of several.

    What it was given was noted list after list, and what belongs to all entries (a scalar tensor) after these.
    """
    end = int(step.ops[k + 1]) if k + 1 < len(step.ops) else len(step.entries)
    noted = step.entries[int(step.ops[k]) + 1 : end]
    read, made = noted[noted["kind"] == Kind.READ], noted[noted["kind"] == Kind.BORN]
    count = len(made) or int(((read["flags"] & Flag.WRITTEN) != 0).sum())
    if count < 2 or len(read) < count:
        return {}
    whole = len(read) // count * count
    pairs = [(int(b), i % count) for i, b in enumerate(read["a"][:whole])] + [(int(b), i) for i, b in enumerate(made["a"])]
    found = dict(pairs)
    return found if all(found[b] == i for b, i in pairs) else {}


def _split(graph: Graph, parts: dict[int, dict[int, int]]) -> Graph:
    """Some operators in parts, given which part each block belongs to; what belongs to none belongs to all."""
    numbers = [block_of(node) for node in graph.nodes]
    counts = {v: max(found.values()) + 1 for v, found in parts.items()}
    place: dict[int, int] = {}
    of_part: dict[tuple[int, int], int] = {}
    order: list[tuple[int, int]] = []
    for v, node in enumerate(graph.nodes):
        if node.made_with is not None:
            continue
        for i in range(counts.get(v, 1)):
            of_part[v, i] = place[v] = len(order)
            order.append((v, i))
            for u in graph.members[v]:
                if v not in parts or parts[v].get(numbers[u] or 0, 0) == i:
                    place[u] = len(order)
                    order.append((u, 0))

    def part(v: int, value: int) -> int:
        """Where the part of an operator is that a value belongs to; the last one for what belongs to all."""
        found = parts.get(v)
        return place[v] if found is None else of_part[v, found.get(numbers[value] or 0, counts[v] - 1)]

    nodes = []
    for v, i in order:
        node = graph.nodes[v]
        if v in parts:
            mine = tuple(p for p in node.parents if parts[v].get(numbers[p] or 0, i) == i)
            node = replace(
                node, id=f"{node.id}.{i}" if i else node.id, parents=mine, seconds=node.seconds / counts[v],
                workspace_bytes=node.workspace_bytes // counts[v],
            )
        nodes.append(replace(
            node,
            parents=tuple(place[p] for p in node.parents),
            made_with=None if node.made_with is None else part(node.made_with, v),
            overwrites=None if node.overwrites is None else place[node.overwrites],
            held_until=None if node.held_until is None else part(node.held_until, v),
        ))
    return replace(graph, nodes=tuple(nodes), order=tuple(range(len(nodes))))


def updates_at_once(step: Step, graph: Graph) -> Row:
    """The given order, but for the optimizer's operators, each of which runs as soon as it can.

    It can when what it reads is there and everybody else has read what it overwrites.
    """
    phase = PHASES.index(Phase.OPTIMIZER)
    operators = operator_of(graph)
    row = [m.node for m in plain_row(graph)]
    late = {v for v in row if v in operators and step.entries["phase"][step.ops[operators[v]]] == phase}
    leader = {u: v for v in row for u in (v, *graph.members[v])}
    needs = {v: {leader[p] for p in graph.reads[v] if p in leader} for v in row}
    for v in late:
        for old in graph.olds[v]:
            needs[v] |= {r for r in graph.children[old] if r != v and r in needs and (r not in late or r < v)}
    waiting = {v: set(n) for v, n in needs.items() if v in late}
    unlocks: dict[int, list[int]] = {}
    for v, before in waiting.items():
        for p in before:
            unlocks.setdefault(p, []).append(v)
    out: list[int] = []
    ready: list[int] = []

    def run(v: int) -> None:
        out.append(v)
        for u in unlocks.get(v, ()):
            waiting[u].discard(v)
            if not waiting[u]:
                ready.append(u)

    for v in row:
        if v not in late:
            run(v)
        elif not needs[v]:
            ready.append(v)
        while ready:
            ready.sort(reverse=True)
            run(ready.pop())
    return tuple(Move(Act.COMPUTE, v) for v in out)
