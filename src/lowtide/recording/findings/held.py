"""Findings of what the script holds: results, model copies, graphs, float64, gradients zeroed instead of freed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from lowtide.base.trace import Phase
from lowtide.base.units import format_bytes
from lowtide.recording.file_format import HELD_BYTES, Role
from lowtide.recording.findings.common import NOTABLE, is_idle, is_kept_for_more, is_past_use, last_use, place_of, zeroes
from lowtide.recording.precision import WIDE, has_convolutions, has_lstms, in_float32
from lowtide.recording.recorded_step import Block
from lowtide.recording.whatif import Case, Change, Finding


def zeroed_gradients(case: Case) -> Iterator[Finding]:
    """Gradients that are zeroed instead of freed, and so stay live through the forward."""
    step = case.step
    zeroed = [(i, b) for i, b in enumerate(step.blocks)
              if b.role is Role.GRADIENT and b.born < 0 and (any(zeroes(step, w) for w in b.writes) or _left_zeroed(b, case))]
    total = sum(b.bytes for _, b in zeroed)
    if total < NOTABLE * case.peak:
        return
    change = Change()
    readers: dict[int, list[int]] = {}
    for i, b in enumerate(step.blocks):
        for r in b.reads:
            readers.setdefault(r, []).append(i)
    end = len(step.ops)
    for i, b in zeroed:
        added = next((w for w in b.writes if not zeroes(step, w)), None)
        zero = max((w for w in b.writes if zeroes(step, w) and (added is None or w < added)), default=-1)
        change.until[i] = step.op_at(zero)  # -1 if the previous step ended by zeroing it
        if added is None:
            continue
        incoming = next((j for j in readers[added] if j != i and step.blocks[j].bytes == b.bytes
                         and step.blocks[j].role is None and j not in change.until), None)
        if incoming is not None:
            change.until[incoming] = end
        else:
            change.add(b.bytes, step.op_at(added), end)
    yield case.found(
        "zeroed-gradients",
        f"{format_bytes(total)} of zeroed gradients stay allocated through the forward: free them with "
        "zero_grad(set_to_none=True), torch's default",
        change,
    )


def _left_zeroed(block: Block, case: Case) -> bool:
    """Whether the previous step ended by zeroing a block, and nothing was added to it since."""
    if block.writes or block.number not in case.earlier:
        return False
    step, before = case.earlier[block.number]
    return bool(before.writes) and zeroes(step, before.writes[-1])


def held_results(case: Case) -> Iterator[Finding]:
    """Results that a variable of the script still refers to after their last use."""
    groups: dict[tuple[str, str], list[tuple[int, Block]]] = {}
    _, copied = _copies(case)  # reported as model copies
    listed = [b for b in case.step.blocks if b.held and "[" in b.held[-1]]
    in_use = {b.variable for b in listed if is_kept_for_more(b) or case.is_used_later(b)}
    for i, b, role in case.there():
        if b.held and i not in copied and is_past_use(b, role, case) and b.variable not in in_use:
            groups.setdefault(b.variable, []).append((i, b))
    others: dict[tuple[str, str], list[int]] = {}  # of the same variable, at other times
    for i, b in enumerate(case.step.blocks):
        result = b.held and b.counted and b.role is None and b.phase is not Phase.DATA
        if result and b.variable in groups and is_past_use(b, Role.OUTPUT, case):
            others.setdefault(b.variable, []).append(i)
    for (root, place), members in groups.items():
        total = sum(b.bytes for _, b in members)
        if total < NOTABLE * case.peak:
            continue
        alone = members[0][1].held[-1].rpartition(" (")[0] if len(members) == 1 else f"{root}[...]"
        many = "" if len(members) == 1 else f" and {len(members) - 1} more"
        way = f"`del {alone}`" if alone.isidentifier() else f"release {alone}"
        yield case.found(
            "held-result",
            f"{format_bytes(total)} ({members[0][1].label}{many}) are held by the variable {alone} ({place} after their last "
            f"use: {way} after that",
            Change(until={i: case.step.op_at(last_use(case.step.blocks[i]))
                          for i in {*(i for i, _ in members), *others.get((root, place), ())}}),
        )


def double_precision(case: Case) -> Iterator[Finding]:
    """Blocks at the peak in float64 or complex128, which could be half as large."""
    wide = [b for _, b, _ in case.there() if b.label.startswith(WIDE)]
    total = sum(b.bytes for b in wide)
    if total < NOTABLE * case.peak:
        return
    first = min(wide, key=lambda b: b.born)
    unknown = has_lstms(case)
    besides = ""
    if unknown:
        besides = " (the saving is unknown: LSTMs then run as one kernel, whose workspace may be larger)"
    elif has_convolutions(case):
        besides = " (it may save more: convolutions then run other kernels, which take less)"
    yield case.found(
        "float64",
        f"{format_bytes(total)} at the peak are float64 (first: {first.title}{place_of(first)}): convert to float32 at "
        f"the input{besides}",
        None if unknown else in_float32(case),
    )


def graph_kept(case: Case) -> Iterator[Finding]:
    """Saved tensors of earlier steps that are still live: something holds their graph."""
    kept = [(i, b) for i, b in enumerate(case.step.blocks)
            if b.born < 0 and b.counted and b.saved and b.role in (None, Role.INPUT) and not b.reads]
    total = sum(b.bytes for _, b in kept)
    if case.step.row.step < 1 or total < NOTABLE * case.peak:
        return
    yield case.found(
        "graph-kept",
        f"{format_bytes(total)} of activations of earlier steps are still held by something computed from them "
        "(a loss that is summed with its graph, or an output in a variable?): keep loss.item(), or detached tensors",
        Change(until={i: -1 for i, _ in kept}),
    )


def model_copies(case: Case) -> Iterator[Finding]:
    """Copies of the parameters besides the ones that train."""
    copies, members = _copies(case)
    total = sum(case.step.blocks[i].bytes for i in members)
    if not copies or total < NOTABLE * case.peak:
        return
    yield case.found(
        "model-copies",
        f"{copies} more {'copy' if copies == 1 else 'copies'} of the parameters: {format_bytes(total)} (deepcopy of the best "
        f"model{'' if case.whole else ', average of the weights'}?): keep one state_dict, on disk, or the best values only",
        Change(bytes=dict.fromkeys(members, 0)),
    )


def _copies(case: Case) -> tuple[int, frozenset[int]]:
    """How many whole copies of the parameters are live at the peak without being read, and the indices of their blocks.

    A single ``state_dict`` counts as no copy, since the finding advises to keep one; its blocks are returned all the same.
    """
    idle = {i: b for i, b, role in case.there()
            if role in (Role.INPUT, Role.OUTPUT, Role.UNKNOWN, Role.PARAMETER) and is_idle(b, case)}
    parameters = [b for i, b in enumerate(case.step.blocks) if b.role is Role.PARAMETER and i not in idle]
    trained = {b.label for b in parameters if b.writes}  # unwritten ones with such a label belong to a copy that is evaluated
    parameters = [b for b in parameters if b.writes or b.label not in trained]
    sizes = {b.bytes for b in parameters}
    raw = any(b.label.startswith("uint8") and b.bytes in sizes for b in idle.values())  # storages were copied, not tensors

    def alike(b: Block) -> str | int:
        return b.bytes if raw else b.label

    own = Counter(map(alike, parameters))
    total: Counter[str | int] = Counter()
    for b in parameters:
        total[alike(b)] += b.bytes
    others: dict[str | int, list[int]] = {}
    for i, b in idle.items():
        if alike(b) in own:
            others.setdefault(alike(b), []).append(i)
    large = [key for key in own if total[key] >= NOTABLE * total.total()]
    copies = min((len(others.get(key, ())) // own[key] for key in large), default=0)
    found = [i for key in others for i in others[key][: copies * own[key]]]
    named = [b for b in (idle[i] for i in found) if b.bytes >= HELD_BYTES]
    if copies == 1 and all(b.held and "['" in b.held[-1] for b in named) and len({b.variable for b in named}) == 1:
        copies = 0
    return copies, frozenset(found)
