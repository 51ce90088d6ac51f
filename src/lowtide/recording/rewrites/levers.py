"""Applies levers to the graph of a recorded step: which operators would run, in what order, and their bytes.

A lever is modelled only as far as a recorded step shows it. Recurrent layers and attention in pieces are not modelled, nor is
anything that leaves no operator in the recording.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Final

from lowtide.base.lever_catalogue import (
    CHANNEL_PIECES,
    LEAST_LOGITS_BYTES,
    LEAST_PIECES_BYTES,
    LEVERS,
    LOSS,
    SLICES,
    SPLIT_OPS,
    UPDATE,
    WIDE,
    sample_pieces,
)
from lowtide.base.trace import Phase
from lowtide.planning.graph import Graph, Node
from lowtide.planning.referee import play
from lowtide.planning.schedule import plain_row, unfold
from lowtide.recording.findings.loss_and_data import CHUNKS, LARGE, loss_blocks
from lowtide.recording.graph import BACKWARD, block_of, graph_of, inside_of, operator_of
from lowtide.recording.recorded_step import Block, RecordedStep
from lowtide.recording.rewrites.update import FOREACH, consumed, lists_apart, updates_at_once

_CROSS_ENTROPY: Final = ("_log_softmax", "nll_loss")
"""Operators of the loss that can run in pieces."""
_FIRST: Final = "aten._log_softmax."
"""The one of them that reads the logits."""
_PRODUCTS: Final = ("aten.mm.", "aten.addmm.", "aten.bmm.")
"""Operators of a linear layer."""
_DEFERRED: Final = (
    "aten._to_copy", "aten.clone", "aten.copy", "aten.mul", "aten.div", "aten.tanh", "aten.masked_fill", "aten.where",
    "aten.index", "aten.constant_pad_nd", "aten.cat",
)
"""Operators that may come between the linear layer and the loss, besides views."""
_VIEWS: Final = ("aten.view", "aten._unsafe_view", "aten.t.", "aten.transpose", "aten.permute", "aten.slice", "aten.select",
                 "aten.unsqueeze", "aten.squeeze", "aten.expand", "aten.detach", "aten.alias", "aten._reshape_alias")
_FAR: Final = 6
"""Longest chain of such operators that is followed."""
_CONVOLUTION: Final = "aten.convolution_backward"
_NORM: Final = "aten.native_batch_norm_backward"
_REST: Final = 1 / 8
"""Share of these operators' workspace that stays in addition to one piece's share (measured: of eight pieces, 1/4 is left)."""


def each_lever(step: RecordedStep) -> dict[str, Graph]:
    """The graph of a step with one lever alone, by lever name, for each lever that changes it; in catalogue order."""
    plain = with_levers(step, ())
    alone = {name: with_levers(step, (name,)) for name in LEVERS}
    return {name: graph for name, graph in alone.items() if _changes(plain, graph)}


def peak_of(graph: Graph) -> int:
    """Peak bytes of a graph in its own order, without a plan."""
    return play(graph, unfold(graph, plain_row(graph))).peak_bytes


def with_levers(step: RecordedStep, names: Collection[str]) -> Graph:
    """The graph of a step with some levers, in the order in which its operators would run.

    Args:
        step: a step recorded with its operators.
        names: the levers' names. Slices are ignored with an update in the backward, which covers one parameter at a time.

    Raises:
        RecordingError: if the recording's format does not say when backward asks for saved tensors.
    """
    let_go = consumed(step) if UPDATE in names else ()
    graph = graph_of(step, let_go=let_go)
    if LOSS in names:
        graph = _loss_in_pieces(step, graph)
    if SPLIT_OPS in names:
        graph = _libraries_take_less(step, graph)
    if let_go:
        graph = lists_apart(step, graph)
        order = [u for v in updates_at_once(step, graph) for u in (v, *graph.members[v])]
        return replace(graph, order=(*(v for v in graph.order if graph.nodes[v].resident), *order))
    return _temporaries_one_by_one(step, graph) if SLICES in names else graph


def _changes(plain: Graph, other: Graph) -> bool:
    """Whether a lever changes the order, the nodes, or the bytes, workspace or lifetime of any of them."""
    if plain.order != other.order or len(plain.nodes) != len(other.nodes):
        return True
    pairs = zip(plain.nodes, other.nodes, strict=True)
    return any((a.bytes, a.workspace_bytes, a.held_until) != (b.bytes, b.workspace_bytes, b.held_until) for a, b in pairs)


def _changed(graph: Graph, nodes: dict[int, Node]) -> Graph:
    return replace(graph, nodes=tuple(nodes.get(v, n) for v, n in enumerate(graph.nodes)))


def _with_bytes(step: RecordedStep, graph: Graph, sizes: dict[int, int]) -> Graph:
    """The graph with new sizes for some blocks, given by their index in the step's ``blocks``."""
    values: dict[int, list[int]] = defaultdict(list)
    for v, node in enumerate(graph.nodes):
        number = block_of(node)
        if number is not None:
            values[number].append(v)
    return _changed(graph, {
        v: replace(graph.nodes[v], bytes=size) for i, size in sizes.items() for v in values[step.blocks[i].number]
    })


def _read_by(step: RecordedStep) -> Mapping[int, list[Block]]:
    """The blocks that each operator reads, by the operator's entry."""
    found: dict[int, list[Block]] = defaultdict(list)
    for block in step.blocks:
        for entry in block.reads:
            found[entry].append(block)
    return found


def _shape(block: Block) -> list[int]:
    """Shape of the tensor that a block was made for; empty if the recording does not say."""
    found = re.search(r"\[([\d, ]+)\]", block.label)
    return [int(size) for size in found[1].split(",")] if found else []


def _loss_in_pieces(step: RecordedStep, graph: Graph) -> Graph:
    """Shrinks the logits, and what the loss makes from them, to one piece; the backward computes them a second time."""
    blocks = loss_blocks(step, _CROSS_ENTROPY)
    large = [i for i in blocks if step.blocks[i].label.startswith(("float", "bfloat"))]
    if sum(step.blocks[i].bytes for i in large) < LARGE * peak_of(graph) or not _may_be_deferred(step, large):
        return graph
    position = {int(entry): k for k, entry in enumerate(step.ops)}
    nodes = {k: v for v, k in operator_of(graph).items()}
    made = {position[step.blocks[i].born] for i in large if step.blocks[i].born in position}
    backward = {k for k in range(len(step.ops)) if step.entries["phase"][step.ops[k]] == BACKWARD}
    again = sum(graph.nodes[nodes[k]].seconds for k in made - backward)
    reading = sorted({position[r] for i in large for r in step.blocks[i].reads if r in position} & backward)
    smaller = _with_bytes(step, graph, {i: step.blocks[i].bytes // CHUNKS for i in large})
    if not reading:
        return smaller
    first = nodes[reading[0]]
    return _changed(smaller, {first: replace(smaller.nodes[first], seconds=smaller.nodes[first].seconds + again)})


def _may_be_deferred(step: RecordedStep, blocks: Collection[int]) -> bool:
    """Whether the logits come from a wide linear layer, and only the loss reads what lies between the two."""
    read = _read_by(step)
    names = step.entries["a"]
    found = [step.blocks[i] for i in blocks]
    logits = [b for b in found if any(step.names[names[r]].startswith(_FIRST) for r in b.reads)]
    return bool(logits) and all(_is_deferred(step, b, read, _FAR) for b in logits)


def _is_deferred(step: RecordedStep, block: Block, read: Mapping[int, list[Block]], far: int) -> bool:
    known = (*_CROSS_ENTROPY, *_DEFERRED, *_VIEWS)
    phases, names = step.entries["phase"], step.entries["a"]
    if any(phases[r] != BACKWARD and not _named(step.names[names[r]], known) for r in block.reads):
        return False
    if block.op.startswith(_PRODUCTS):
        shape = _shape(block)
        return bool(shape) and shape[-1] >= WIDE and block.bytes >= LEAST_LOGITS_BYTES
    if not far or not block.op.startswith(_DEFERRED):
        return False
    return any(_is_deferred(step, b, read, far - 1) for b in read[block.born] if b.bytes >= block.bytes // 2)


def _named(name: str, parts: Collection[str]) -> bool:
    return any(part in name for part in parts)


def _libraries_take_less(step: RecordedStep, graph: Graph) -> Graph:
    """Runs the backwards of convolutions and batch norms in pieces, with less workspace."""
    read, inside = _read_by(step), inside_of(step)
    changed = {}
    for v, k in operator_of(graph).items():
        entry = int(step.ops[k])
        name = step.names[step.entries["a"][entry]]
        if not name.startswith((_CONVOLUTION, _NORM)) or not read[entry]:
            continue
        largest = max(read[entry], key=lambda b: b.bytes)
        shape = _shape(largest)
        if len(shape) < 2 or largest.bytes < LEAST_PIECES_BYTES:
            continue
        count = min(CHANNEL_PIECES, shape[1]) if name.startswith(_NORM) else sample_pieces(
            shape[0], math.prod(shape[1:]), len(shape)
        )
        left = min(1.0, max(1 / count + _REST, 2 * _REST))
        less = min(round(inside[k] * (1 - left)), graph.nodes[v].workspace_bytes)
        if count > 1 and less > 0:
            changed[v] = replace(graph.nodes[v], workspace_bytes=graph.nodes[v].workspace_bytes - less)
    return _changed(graph, changed)


def _temporaries_one_by_one(step: RecordedStep, graph: Graph) -> Graph:
    """Keeps only the largest temporary of each foreach operator of the update, as if it made them one at a time."""
    sizes: dict[int, int] = {}
    largest: dict[int, int] = {}
    for i, block in enumerate(step.blocks):
        if block.counted and block.phase is Phase.OPTIMIZER and FOREACH in block.op and block.died < len(step.entries):
            one = largest.setdefault(block.born, i)
            if step.blocks[one].bytes < block.bytes:
                sizes[one], largest[block.born] = 0, i
            elif one != i:
                sizes[i] = 0
    return _with_bytes(step, graph, sizes)
