"""Findings of loss and data: blocks as large as the logits, data sets held in memory, oversized batches."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Final

import numpy as np

from lowtide.base.trace import Phase
from lowtide.base.units import format_bytes
from lowtide.recording.file_format import PHASES, Role
from lowtide.recording.peak_floor import grows_with_the_batch
from lowtide.recording.recorded_step import Block, RecordedStep
from lowtide.recording.whatif import Case, Change, Finding

LARGE: Final = 0.05
"""Minimum share of the peak for an explanation to be worth a finding."""
CHUNKS: Final = 8
"""Number of chunks in which a loss could be computed."""
_LOSS_OPS: Final = ("_log_softmax", "nll_loss", "binary_cross_entropy", "mse_loss", "ctc_loss", "kl_div")
_SLICES: Final = ("aten.slice", "aten.select", "aten.index", "aten.narrow", "aten.split", "aten.unbind", "aten.as_strided")


def loss_blocks(step: RecordedStep, parts: Sequence[str] = _LOSS_OPS, failed: Collection[int] = ()) -> list[int]:
    """Logits, log-softmax and their gradients, as indices of the step's ``blocks``.

    Args:
        step: a recorded step.
        parts: parts of the names of the loss's operators.
        failed: operators of a loss that ran out of memory, as indices of the step's ``ops``.
    """
    losses = [i for i, b in enumerate(step.blocks) if b.counted and any(part in b.op for part in parts)]
    entries = {step.blocks[i].born for i in losses if step.blocks[i].born >= 0} | {int(step.ops[k]) for k in failed}
    logits = [i for i, b in enumerate(step.blocks)
              if b.counted and b.role is None and i not in losses and entries.intersection(b.reads) and b.born >= 0]
    return [*losses, *logits]


def loss_block(case: Case) -> Iterator[Finding]:
    """Logits, log-softmax and their gradients, which the loss could make chunk by chunk."""
    step = case.step
    failed = case.denied(*_LOSS_OPS)
    block = loss_blocks(step, failed=failed)
    there = {i for i, _, _ in case.there()}
    total = sum(step.blocks[i].bytes for i in block if i in there) + sum(case.inside(k) for k in failed)
    if total < LARGE * case.peak:
        return
    named = sorted((step.blocks[i] for i in block if i in there), key=lambda b: -b.bytes)[:3]
    parts = ", ".join(f"{b.op.removeprefix('aten.') or b.title} {format_bytes(b.bytes)}" for b in named)
    change = Change(
        bytes={i: step.blocks[i].bytes // CHUNKS for i in block}, inside={k: case.inside(k) // CHUNKS for k in failed}
    )
    yield case.found(
        "loss-block",
        f"the loss holds {format_bytes(total)} at the peak ({parts}): computed in {CHUNKS} chunks, each with its backward, it "
        "would hold one chunk at a time",
        change,
    )


def resident_data(case: Case) -> Iterator[Finding]:
    """A data set that is held in memory as a whole but read in slices."""
    step = case.step
    for k in np.flatnonzero(step.denied):
        asked = int(step.entries[step.ops[k]]["size"])
        if step.row.step < 0 and PHASES[step.entries[step.ops[k]]["phase"]] is Phase.DATA and asked > LARGE * case.peak:
            yield case.found(
                "resident-data",
                f"{format_bytes(asked)} were requested in one allocation before the first step "
                f"({step.names[step.entries[step.ops[k]]['c']]}): if that is data, load it in slices",
                Change(inside={int(k): 0}),
            )
    for i, b, role in case.there():
        if role is not Role.INPUT or b.bytes < LARGE * case.peak or not b.reads:
            continue
        part = _read_at_once(b, step)
        if not 0 < part <= b.bytes // 2:
            continue
        yield case.found(
            "resident-data",
            f"{format_bytes(b.bytes)} of data ({b.label}) are in memory as a whole and read in slices: map the file "
            "(numpy.memmap, h5py), or load the slices",
            Change(bytes={i: part}),
        )


def _read_at_once(block: Block, step: RecordedStep) -> int:
    """The most bytes of a block that one operator read, ignoring views; 0 if none did, or the recording does not say."""
    made: dict[int, int] = {}
    for x in step.blocks:
        made[x.born] = made.get(x.born, 0) + x.bytes
    most = 0
    for r in {r for r in block.reads if r >= 0}:
        if step.names[step.entries[r]["a"]].startswith(_SLICES):  # a view, or a copy of the slice
            most = max(most, made.get(r, 0))
        elif not block.shown.get(r):
            return 0
        else:
            most = max(most, block.shown[r])
    return most


def smaller_batch(case: Case) -> Iterator[Finding]:
    """The largest part of the batch (1/2 to 1/32) that would have fitted under the cap at which the step failed."""
    step = case.step
    if not case.cap_bytes or not step.denied.any() or step.row.step < 0:
        return
    scaled = grows_with_the_batch(step)
    optimizer = PHASES.index(Phase.OPTIMIZER)
    ops = [k for k in range(len(step.ops)) if step.entries["phase"][step.ops[k]] != optimizer]
    for part in (2, 4, 8, 16, 32):
        change = Change(
            bytes={i: step.blocks[i].bytes // part for i in scaled}, inside={k: case.inside(k) // part for k in ops}
        )
        found = case.found("smaller-batch", f"a batch of 1/{part} would have fit", change)
        if found.changed_peak_bytes <= case.cap_bytes:
            yield found
            return
