"""Questions about a step that several finders share."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, groupby, pairwise
from typing import Final

import numpy as np

from lowtide.base.trace import Phase
from lowtide.recording.file_format import BY_ZERO, HELD_BYTES, PHASES, Role
from lowtide.recording.recorded_step import Block, RecordedStep
from lowtide.recording.whatif import Case

NOTABLE: Final = 0.01
"""Minimum share of the peak for blocks to be worth a finding."""
_ZEROS: Final = ("aten.zero_", "aten._foreach_zero_")


def zeroes(step: RecordedStep, write: int) -> bool:
    """Whether the operator at entry ``write`` fills with zeros, or ran in ``zero_grad``."""
    entry = step.entries[write]
    name = step.names[entry["a"]]
    return bool(entry["phase"] == PHASES.index(Phase.ZERO_GRAD)) or name.startswith(_ZEROS) or name.endswith(BY_ZERO)


def last_use(block: Block) -> int:
    """The last entry at which an operator read a block, or autograd held a saved tensor of it."""
    return max(block.last_read, *(end for _, end in block.saved), -1)


def is_kept_for_more(block: Block) -> bool:
    """Whether a block existed before the step and is read in it: then the next step is likely to read it, too."""
    return block.born < 0 and bool(block.reads)


def is_past_use(block: Block, role: Role, case: Case) -> bool:
    """Whether nothing uses a block any more; in doubt, it counts as used."""
    if is_kept_for_more(block) or case.is_used_later(block):
        return False
    if role is Role.INPUT:
        return block.born < 0 and case.whole
    known = block.born >= 0 or case.step.row.complete or block.variable in case.idle_variables
    return role is Role.OUTPUT and known


def is_idle(block: Block, case: Case) -> bool:
    """Whether nothing saves or reads a block in the step, and no later step reads or writes it.

    So an average of the parameters is not idle, nor are initial parameters to which the script returns.
    """
    return not (block.saved or block.reads or case.is_written_later(block) or case.is_used_later(block))


def is_batch(block: Block) -> bool:
    """Whether a block is an input, or a plain variable (not an element of a container) was found to refer to it."""
    return block.role is Role.INPUT or (block.role is None and bool(block.held) and block.variable[0].isidentifier()
                                        and "[" not in block.held[-1])


def until_the_next(inputs: list[tuple[int, Block]], step: RecordedStep) -> dict[int, int]:
    """The last operators that input batches would have if no graph held them, by block index.

    A batch then lives until the script assigns the next one to its variable. Batches with equal labels (type and shape) are
    taken to share a variable.
    """
    ends: dict[int, int] = {}
    for _, same in groupby(sorted(inputs, key=lambda x: (x[1].label, x[1].born)), key=lambda x: x[1].label):
        ends |= {i: step.op_at(max(b.last_read, after.born)) for (i, b), (_, after) in pairwise(same) if after.born >= 0}
    return ends


def most_at_once(blocks: Iterable[Block]) -> int:
    """The most bytes of the given blocks that are live at the same time."""
    changes = sorted(change for b in blocks for change in ((b.born, b.bytes), (b.died, -b.bytes)))
    return max(accumulate((size for _, size in changes)), default=0)


def is_used(block: Block, step: RecordedStep) -> bool:
    """Whether a backward of the step reads a block, or releases autograd's last saved tensor of it."""
    phases, backward = step.entries["phase"], PHASES.index(Phase.BACKWARD)
    ends = [e for _, e in block.saved if e < len(phases)]
    return any(phases[e] == backward for e in (*ends, *block.reads))


def is_saved_still(block: Block, step: RecordedStep) -> bool:
    """Whether autograd still holds a saved tensor of a block when the step ends."""
    return any(e >= len(step.entries) for _, e in block.saved)


def may_be_used(block: Block, case: Case) -> bool:
    """Whether, as far as the recording tells, a later step's backward uses a block that is still saved when this one ends."""
    if case.whole and block.bytes >= HELD_BYTES:
        return case.is_used_later(block)
    after = case.following
    if after is None:
        return not (case.last and case.step.row.complete)
    there = case.later.get(block.number)
    return there is not None and (is_used(there, after) or is_saved_still(there, after))


def op_to_compare(first: RecordedStep, second: RecordedStep) -> int:
    """The operator of ``first`` to compare with the peak of ``second``: its highest in the same phase, else its highest."""
    phases = first.entries["phase"][first.ops]
    there = np.flatnonzero(phases == second.entries["phase"][second.ops[second.peak_op]])
    return int(there[np.argmax(first.peaks[there])]) if len(there) else first.peak_op


def place_of(block: Block) -> str:
    """The module and the source line that made a block, as the end of a sentence; empty if neither is known."""
    places = [p for p in (block.module, block.source) if p]
    return f", {', '.join(places)}" if places else ""
