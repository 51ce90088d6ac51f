"""Findings of the optimizer: temporaries of its foreach kernels, and its states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from lowtide.base.trace import Phase
from lowtide.base.units import format_bytes
from lowtide.recording.file_format import Role
from lowtide.recording.findings.common import NOTABLE
from lowtide.recording.findings.loss_and_data import LARGE
from lowtide.recording.recorded_step import Block, RecordedStep
from lowtide.recording.whatif import Case, Change, Finding

_TEMPORARIES: Final = {"SGD": 0, "ASGD": 0, "Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 5, "Adadelta": 2, "Rprop": 3}
"""Temporaries of a parameter's size that an optimizer's loop (``foreach=False``) holds at once, as measured; 1 for others."""
_FUSED: Final = {"SGD", "Adam", "AdamW", "Adagrad"}
"""Optimizers of torch that have a fused kernel (``fused=`` in ``torch/optim``)."""
_RECTIFIED: Final = 5
"""First step, counted from 0, in which RAdam holds that many; before, it holds as many as Adam."""


def foreach_extra(case: Case) -> Iterator[Finding]:
    """Temporaries of the optimizer's foreach kernels beyond those of one parameter at a time."""
    step = case.step
    change = Change()
    made = [(i, b) for i, b in enumerate(step.blocks)
            if b.role is None and b.counted and b.op.startswith("aten._foreach") and b.phase is Phase.OPTIMIZER]
    alone = _temporaries([b for _, b in made], step)
    births = sorted({b.born for _, b in made})
    there = [[b.bytes for _, b in made if b.born <= t < b.died] for t in births]
    total = 0
    if births:
        held = max(there, key=sum)
        least = alone * max(held)
        total = max(0, sum(held) - least)
        change.bytes.update({i: 0 for i, _ in made})
        if least:
            change.add(least, step.op_at(births[0]), step.op_at(max(b.died for _, b in made)))
    for k in case.denied("_foreach"):
        read = sorted((b.bytes for b in step.blocks if int(step.ops[k]) in b.reads), reverse=True)
        total = max(total, case.inside(k) - sum(read[:alone]))
        change.inside[k] = min(case.inside(k), sum(read[:alone]))
    if total < NOTABLE * case.peak:
        return
    kinds = {b.name.split(" ")[0] for b in step.blocks if b.role is Role.OPTIMIZER_STATE} or {"SGD"}
    fused = ", fused=True takes none" if kinds <= _FUSED else ""
    yield case.found(
        "foreach",
        f"the optimizer's foreach kernels take {format_bytes(total)} of temporaries for all parameters at once: "
        f"foreach=False takes them for one parameter at a time{fused} (`lowtide run` slices the update by itself if needed)",
        change,
    )


def _temporaries(made: list[Block], step: RecordedStep) -> int:
    """How many temporaries of a parameter's size the optimizer's loop would hold, given those of its foreach kernels."""
    kinds = {b.name.split(" ")[0] for b in step.blocks if b.role is Role.OPTIMIZER_STATE} or {"SGD"}
    base = max(_TEMPORARIES.get(kind, 1) for kind in kinds)
    if kinds == {"RAdam"} and step.row.step < _RECTIFIED:
        base = _TEMPORARIES["Adam"]
    replaced = {e for e, op in {b.born: b.op for b in made}.items() if op.startswith("aten._foreach_neg") or (
        op == "aten._foreach_add.List" and {Role.PARAMETER, Role.GRADIENT} <= {b.role for b in step.blocks if e in b.reads})}
    again = kinds == {"SGD"} and any(w > b.born for b in made if b.born in replaced for w in b.writes)
    own = kinds == {"ASGD"}  # one addition of the parameters is for its average
    return base + (len(replaced) > own) + again


def optimizer_states(case: Case) -> Iterator[Finding]:
    """The optimizer's states, compared with the parameters."""
    states = [b for b in case.step.blocks if b.role is Role.OPTIMIZER_STATE and b.counted]
    weights = sum(b.bytes for b in case.step.blocks if b.role is Role.PARAMETER and b.counted)
    total = sum(b.bytes for b in states)
    if total < LARGE * case.peak or not weights:
        return
    kinds = Counter[str]()
    for b in states:
        kinds[b.name.split(" of ")[0]] += b.bytes
    told = ", ".join(f"{name} {format_bytes(size)}" for name, size in kinds.most_common(3))
    yield case.found(
        "optimizer-states", f"the optimizer keeps {format_bytes(total)}, {total / weights:.1f} x the parameters: {told}", None
    )
