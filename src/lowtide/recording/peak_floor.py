"""How low recompute and offload alone could bring a recorded step's peak, and how much its batch could grow."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from lowtide.base.trace import Phase
from lowtide.planning.bounds.precedence import certain_in_order
from lowtide.planning.graph import Graph, Offload
from lowtide.planning.solver.solve import Solver
from lowtide.recording.file_format import PHASES, Role
from lowtide.recording.graph import graph_of, operator_of
from lowtide.recording.recorded_step import Block, RecordedStep

_BOARD = Offload(write_bytes_per_second=1e9, read_bytes_per_second=1e9)
"""Only the existence of an offload tier matters here, not its speed."""
_MORE = 2
"""Factor by which the batch is enlarged to see what grows with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The peak below which no plan goes.

    Attributes:
        bytes: the proven lower bound of the step's peak.
        op: the operator that proves it, an index into the step's ``ops``; -1 if the resident bytes alone do.
        batch_factor: how many times as large the batch may be before the floor reaches the plain peak. What belongs to
            parameters keeps its size; everything else made in the step grows with the batch.
    """

    bytes: int
    op: int
    batch_factor: float


def with_board(graph: Graph) -> Graph:
    """The same graph with an offload tier, whose speed does not matter to a floor."""
    return replace(graph, offload=_BOARD)


def grows_with_the_batch(step: RecordedStep) -> list[int]:
    """Indices of the blocks whose size grows with the batch.

    These are blocks made in the step; of those made in backward or by the optimizer, only blocks without a parameter's shape.
    """
    fixed = {b.label for b in step.blocks if b.role is Role.PARAMETER}
    late = {PHASES.index(Phase.BACKWARD), PHASES.index(Phase.OPTIMIZER)}
    phases = step.entries["phase"]
    return [
        i for i, b in enumerate(step.blocks)
        if b.role in (None, Role.INPUT) and b.born >= 0 and not (b.label in fixed and int(phases[b.born]) in late)
    ]


def floor_of(step: RecordedStep, plain_peak_bytes: int) -> Floor:
    """The floor of a recorded step that ran to its end.

    Args:
        step: a step recorded with its operators.
        plain_peak_bytes: its peak without a plan.

    Raises:
        RecordingError: if the recording's format does not say when backward asks for saved tensors.
    """
    graph = with_board(graph_of(step))
    solver = Solver(graph)
    once, more = certain_in_order(solver.game), certain_in_order(Solver(_with_batch(graph, step)).game)
    if not len(once):
        return Floor(bytes=graph.resident_bytes, op=-1, batch_factor=1.0)
    slope = (more - once) / (_MORE - 1)
    growing = slope > 0
    room = 1 + (plain_peak_bytes - once[growing]) / slope[growing]
    floor = solver.told_floor  # as `lowtide plan` reports it
    return Floor(
        bytes=floor.bytes,
        op=operator_of(graph).get(floor.node, -1),
        batch_factor=float(room.min(initial=np.inf)),
    )


def _with_batch(graph: Graph, step: RecordedStep) -> Graph:
    """The same graph with the batch enlarged by ``_MORE``; the optimizer's workspaces stay."""
    scaled = {f"block{step.blocks[i].number}" for i in grows_with_the_batch(step)}
    operators = operator_of(graph)
    optimizer = PHASES.index(Phase.OPTIMIZER)
    nodes = []
    for v, node in enumerate(graph.nodes):
        k = operators.get(v)
        if str(node.id).split(".")[0] in scaled:
            nodes.append(replace(node, bytes=_MORE * node.bytes))
        elif k is not None and step.entries["phase"][step.ops[k]] != optimizer:
            nodes.append(replace(node, workspace_bytes=_MORE * node.workspace_bytes))
        else:
            nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def blocks_at(step: RecordedStep, op: int) -> list[Block]:
    """The blocks that an operator reads or makes, largest first."""
    entry = int(step.ops[op])
    return sorted((b for b in step.blocks if b.counted and (b.born == entry or entry in b.reads)), key=lambda b: -b.bytes)
