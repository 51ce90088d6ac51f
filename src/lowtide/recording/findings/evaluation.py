"""Findings of evaluations: autograd graphs that they build and no backward uses."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lowtide.base.trace import Phase
from lowtide.base.units import format_bytes
from lowtide.recording.file_format import PHASES, EntryKind
from lowtide.recording.findings.common import (
    is_batch,
    is_saved_still,
    is_used,
    may_be_used,
    most_at_once,
    place_of,
    until_the_next,
)
from lowtide.recording.findings.loss_and_data import LARGE
from lowtide.recording.whatif import Case, Change, Finding


def evaluation_graph(case: Case) -> Iterator[Finding]:
    """A forward that recorded a graph which no backward used."""
    step = case.step
    calls = np.flatnonzero(step.entries["kind"] == EntryKind.CALL)
    within = [b for b in step.blocks if b.role is None and b.saved and b.phase is Phase.FORWARD]
    trained = {int(np.searchsorted(calls, b.born)) for b in within if is_used(b, step)} - {0}
    unused, inputs = [], []
    for i, b in enumerate(step.blocks):
        if int(np.searchsorted(calls, b.born)) in trained:  # an unused output of a training forward
            continue
        made = b.counted and b.saved and b.phase in (Phase.FORWARD, Phase.LOSS, Phase.DATA)
        if made and not is_used(b, step) and not (is_saved_still(b, step) and may_be_used(b, case)):
            if is_batch(b):
                inputs.append((i, b))
            elif b.role is None and b.born >= 0 and not b.held:
                unused.append((i, b))
    if step.denied.any():
        yield from _evaluation_that_failed(case)
        return
    total = most_at_once([b for _, b in unused])
    if total < LARGE * case.peak:
        return
    yield case.found(
        "evaluation-graph",
        f"{format_bytes(total)} were saved for a backward that never ran "
        f"(first: {unused[0][1].title}{place_of(unused[0][1])}): "
        "evaluate under torch.no_grad()",
        Change(until={i: step.op_at(b.last_read) for i, b in unused} | until_the_next(inputs, step)),
    )


def _evaluation_that_failed(case: Case) -> Iterator[Finding]:
    """Memory ran out while a model in ``eval()`` mode recorded graphs, and no training call or backward came after its calls.

    Blocks are taken to be unneeded after their last read before the failure: an evaluation under ``no_grad`` would have freed
    them there.
    """
    step = case.step
    calls = np.flatnonzero(step.entries["kind"] == EntryKind.CALL)
    trains = np.flatnonzero((step.entries["kind"] == EntryKind.CALL) & (step.entries["flags"] == 0))
    backwards = np.flatnonzero(step.entries["phase"] == PHASES.index(Phase.BACKWARD))
    after = max((int(x[-1]) for x in (trains, backwards) if len(x)), default=-1)
    first = next((int(c) for c in calls if c > after), None)
    if first is None:
        return
    saved = [(i, b) for i, b in enumerate(step.blocks) if b.counted and b.saved and b.reads]
    unused = [(i, b) for i, b in saved if b.role is None and b.born >= first and not b.held]
    inputs = [(i, b) for i, b in saved if is_batch(b) and b.last_read >= first]
    total = most_at_once([b for _, b in unused])
    if total < LARGE * case.peak:
        return
    yield case.found(
        "evaluation-graph",
        f"a model in eval mode saves {format_bytes(total)} for a backward (first: {unused[0][1].title}"
        f"{place_of(unused[0][1])}): evaluate under torch.no_grad()",
        Change(until={i: step.op_at(b.reads[-1]) for i, b in unused} | until_the_next(inputs, step)),
    )
