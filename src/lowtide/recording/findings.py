"""Advice: what of a recorded peak need not be, found by one function per kind of finding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from typing import Final

import numpy as np

from lowtide.base.errors import RecordingError
from lowtide.base.trace import Phase
from lowtide.base.units import format_bytes
from lowtide.recording.explanation import Block, Step, steps_of, telling
from lowtide.recording.file_format import BY_ZERO, HELD_BYTES, PHASES, Kind, Role
from lowtide.recording.peak_floor import blocks_at, floor_of, grows_with_the_batch
from lowtide.recording.precision import WIDE, has_convolutions, has_lstms, in_float32
from lowtide.recording.reader import Recording
from lowtide.recording.whatif import Case, Change, Finding

NOTABLE: Final = 0.01
"""Share of the peak from which on blocks are worth a finding."""
LARGE: Final = 0.05
"""Share of the peak from which on an explanation is worth a finding."""
CHUNKS: Final = 8
"""Parts in which a loss could be computed."""

LEVERS: Final = ("loss-block", "foreach", "resident-data", "smaller-batch")
"""Findings that are ways to do with less; the others are oversights, and come first."""

_TEMPORARIES: Final = {"SGD": 0, "ASGD": 0, "Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 5, "Adadelta": 2, "Rprop": 3}
"""Temporaries of a parameter's size that an optimizer's loop (``foreach=False``) holds at once, measured; else 1."""
_FUSED: Final = {"SGD", "Adam", "AdamW", "Adagrad"}
"""Optimizers of torch that have a fused kernel (``fused=`` in ``torch/optim``)."""
_RECTIFIED: Final = 5
"""Step, counted from 0, from which on RAdam takes as many; before, as Adam does."""
_ZEROS: Final = ("aten.zero_", "aten._foreach_zero_")
_LOSS_OPS: Final = ("_log_softmax", "nll_loss", "binary_cross_entropy", "mse_loss", "ctc_loss", "kl_div")
_SLICES: Final = ("aten.slice", "aten.select", "aten.index", "aten.narrow", "aten.split", "aten.unbind", "aten.as_strided")


def findings(recording: Recording) -> list[Finding]:
    """All findings of a recording: oversights, then levers, each by its saving; answers last."""
    recorded = steps_of(recording)
    steps = [s for s in recorded if s.row.step >= 0] or recorded
    step = telling(steps)
    if step is None:
        return []
    last = step.row.step == recording.steps[-1].step
    case = Case(
        recorded, step, int(recording.meta.get("cap_bytes") or 0), recording.meta.get("allocator") or {}, last=last,
        later_use=_later_use(recording.meta.get("later")),
        whole=bool(recording.meta.get("whole")),
    )
    found = [f for finder in FINDERS for f in finder(case)]
    return sorted(found, key=lambda f: (f.id in LEVERS, -f.saving_bytes) if f.saving_bytes else (True, 1))


def _later_use(found: object) -> dict[int, tuple[int, int]]:
    """Rows of (block, last step that read it, last that wrote it), out of a file that may have been changed."""
    rows = found if isinstance(found, list) else []
    sound = (r for r in rows if isinstance(r, list) and len(r) == 3 and all(isinstance(x, int) for x in r))
    return {number: (read, written) for number, read, written in sound}


# --- changes --------------------------------------------------------------------------------------------------------------


def zeroed_gradients(case: Case) -> Iterator[Finding]:
    """Gradients that are zeroed but not freed lie there through the forward."""
    step = case.step
    zeroed = [(i, b) for i, b in enumerate(step.blocks)
              if b.role is Role.GRADIENT and b.born < 0 and (any(_zeroes(step, w) for w in b.writes) or _left_zeroed(b, case))]
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
        added = next((w for w in b.writes if not _zeroes(step, w)), None)
        zero = max((w for w in b.writes if _zeroes(step, w) and (added is None or w < added)), default=-1)
        change.until[i] = step.op_at(zero)  # or it was zeroed when the step before ended
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
        f"{format_bytes(total)} of gradients are zeroed and kept through the forward: free them with "
        "zero_grad(set_to_none=True), torch's default",
        change,
    )


def _left_zeroed(block: Block, case: Case) -> bool:
    """Whether the step before ended with a block zeroed, and nothing was added to it since."""
    if block.writes or block.number not in case.earlier:
        return False
    step, before = case.earlier[block.number]
    return bool(before.writes) and _zeroes(step, before.writes[-1])


def _zeroes(step: Step, write: int) -> bool:
    """Whether it is an operator that fills with zeros, or one of ``zero_grad``, that wrote."""
    entry = step.entries[write]
    name = step.names[entry["a"]]
    return bool(entry["phase"] == PHASES.index(Phase.ZERO_GRAD)) or name.startswith(_ZEROS) or name.endswith(BY_ZERO)


def held_results(case: Case) -> Iterator[Finding]:
    """Results that a variable of the script still refers to after their last use."""
    groups: dict[tuple[str, str], list[tuple[int, Block]]] = {}
    _, copied = _copies(case)  # told of as such
    listed = [b for b in case.step.blocks if b.held and "[" in b.held[-1]]
    in_use = {b.variable for b in listed if _is_kept_for_more(b) or case.is_used_later(b)}
    for i, b, role in case.there():
        if b.held and i not in copied and _is_past_use(b, role, case) and b.variable not in in_use:
            groups.setdefault(b.variable, []).append((i, b))
    others: dict[tuple[str, str], list[int]] = {}  # that its variable referred to at other times of the step
    for i, b in enumerate(case.step.blocks):
        result = b.held and b.counted and b.role is None and b.phase is not Phase.DATA
        if result and b.variable in groups and _is_past_use(b, Role.OUTPUT, case):
            others.setdefault(b.variable, []).append(i)
    for (root, place), members in groups.items():
        total = sum(b.bytes for _, b in members)
        if total < NOTABLE * case.peak:
            continue
        alone = members[0][1].held[-1].rpartition(" (")[0] if len(members) == 1 else f"{root}[...]"
        many = "" if len(members) == 1 else f" and {len(members) - 1} more"
        way = f"`del {alone}`" if alone.isidentifier() else f"let go of {alone}"
        yield case.found(
            "held-result",
            f"{format_bytes(total)} ({members[0][1].label}{many}) are held by the variable {alone} ({place} after their last "
            f"use: {way} once it is used",
            Change(until={i: case.step.op_at(_last_use(case.step.blocks[i]))
                          for i in {*(i for i, _ in members), *others.get((root, place), ())}}),
        )


def _last_use(block: Block) -> int:
    """The last entry at which an operator read a block, or autograd had it."""
    return max(block.last_read, *(end for _, end in block.saved), -1)


def _is_kept_for_more(block: Block) -> bool:
    """Whether it was there before the step, and is read within: then it is likely to be read in the next one, too."""
    return block.born < 0 and bool(block.reads)


def _is_past_use(block: Block, role: Role, case: Case) -> bool:
    """Whether nothing asks for a block any more, as far as is known: in doubt, somebody does."""
    if _is_kept_for_more(block) or case.is_used_later(block):
        return False
    if role is Role.INPUT:
        return block.born < 0 and case.whole
    known = block.born >= 0 or case.step.row.complete or block.variable in case.idle_variables
    return role is Role.OUTPUT and known


def double_precision(case: Case) -> Iterator[Finding]:
    """float64 where the model computes in float32; complex128 likewise."""
    wide = [b for _, b, _ in case.there() if b.label.startswith(WIDE)]
    total = sum(b.bytes for b in wide)
    if total < NOTABLE * case.peak:
        return
    first = min(wide, key=lambda b: b.born)
    unknown = has_lstms(case)
    besides = ""
    if unknown:
        besides = " (what that saves is not known: LSTMs run by one kernel then, whose workspace may be larger)"
    elif has_convolutions(case):
        besides = " (it may save more: convolutions run by other kernels then, which take less)"
    yield case.found(
        "float64",
        f"{format_bytes(total)} at the peak are float64 (first: {first.title}{_at(first)}): convert to float32 where "
        f"it enters{besides}",
        None if unknown else in_float32(case),
    )


def graph_kept(case: Case) -> Iterator[Finding]:
    """Saved tensors of earlier steps are still alive: something holds a graph."""
    kept = [(i, b) for i, b in enumerate(case.step.blocks)
            if b.born < 0 and b.counted and b.saved and b.role in (None, Role.INPUT) and not b.reads]
    total = sum(b.bytes for _, b in kept)
    if case.step.row.step < 1 or total < NOTABLE * case.peak:
        return
    yield case.found(
        "graph-kept",
        f"{format_bytes(total)} of activations of earlier steps are still held, because something computed from them is "
        "(a loss that is summed up with its graph, an output in a variable?): keep loss.item(), or what is detached",
        Change(until={i: -1 for i, _ in kept}),
    )


def model_copies(case: Case) -> Iterator[Finding]:
    """Several copies of the parameters."""
    copies, members = _copies(case)
    total = sum(case.step.blocks[i].bytes for i in members)
    if not copies or total < NOTABLE * case.peak:
        return
    yield case.found(
        "model-copies",
        f"{format_bytes(total)} are {copies} more {'copy' if copies == 1 else 'copies'} of the parameters (deepcopy of best "
        f"models{'' if case.whole else ', or an average of them'}?): keep one state_dict, on disk, or the best values only",
        Change(bytes=dict.fromkeys(members, 0)),
    )


def _copies(case: Case) -> tuple[int, frozenset[int]]:
    """How many whole copies of the parameters are there that nobody reads, and their blocks.

    The values of one state_dict may be kept, as is advised: it is no copy, but they are told.
    """
    idle = {i: b for i, b, role in case.there()
            if role in (Role.INPUT, Role.OUTPUT, Role.UNKNOWN, Role.PARAMETER) and _is_idle(b, case)}
    parameters = [b for i, b in enumerate(case.step.blocks) if b.role is Role.PARAMETER and i not in idle]
    trained = {b.label for b in parameters if b.writes}  # of which others may be read, too: those of a copy that is evaluated
    parameters = [b for b in parameters if b.writes or b.label not in trained]
    sizes = {b.bytes for b in parameters}
    raw = any(b.label.startswith("uint8") and b.bytes in sizes for b in idle.values())  # a storage was copied, not a tensor

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


def _is_idle(block: Block, case: Case) -> bool:
    """Whether nothing reads a block, now or later: no average of the parameters, nor the first ones, to begin anew from."""
    return not (block.saved or block.reads or case.is_written_later(block) or case.is_used_later(block))


def evaluation_graph(case: Case) -> Iterator[Finding]:
    """A forward that recorded a graph which no backward used."""
    step = case.step
    calls = np.flatnonzero(step.entries["kind"] == Kind.CALL)
    within = [b for b in step.blocks if b.role is None and b.saved and b.phase is Phase.FORWARD]
    trained = {int(np.searchsorted(calls, b.born)) for b in within if _is_used(b, step)} - {0}
    unused, inputs = [], []
    for i, b in enumerate(step.blocks):
        if int(np.searchsorted(calls, b.born)) in trained:  # an output that no loss was made of, but no evaluation
            continue
        made = b.counted and b.saved and b.phase in (Phase.FORWARD, Phase.LOSS, Phase.DATA)
        if made and not _is_used(b, step) and not (_is_saved_still(b, step) and _may_be_used(b, case)):
            if _is_batch(b):
                inputs.append((i, b))
            elif b.role is None and b.born >= 0 and not b.held:
                unused.append((i, b))
    if step.denied.any():
        yield from _evaluation_that_failed(case)
        return
    total = _at_once([b for _, b in unused])
    if total < LARGE * case.peak:
        return
    yield case.found(
        "evaluation-graph",
        f"{format_bytes(total)} were saved for a backward that never came (first: {unused[0][1].title}{_at(unused[0][1])}): "
        "evaluate under torch.no_grad()",
        Change(until={i: step.op_at(b.last_read) for i, b in unused} | _until_the_next(inputs, step)),
    )


def _is_batch(block: Block) -> bool:
    """Whether it is an input, or what a plain variable referred to when a model was called."""
    return block.role is Role.INPUT or (block.role is None and bool(block.held) and block.variable[0].isidentifier()
                                        and "[" not in block.held[-1])


def _until_the_next(inputs: list[tuple[int, Block]], step: Step) -> dict[int, int]:
    """A batch that no graph holds is there until its variable is given the next one."""
    ends: dict[int, int] = {}
    for _, same in groupby(sorted(inputs, key=lambda x: (x[1].label, x[1].born)), key=lambda x: x[1].label):
        ends |= {i: step.op_at(max(b.last_read, after.born)) for (i, b), (_, after) in pairwise(same) if after.born >= 0}
    return ends


def _evaluation_that_failed(case: Case) -> Iterator[Finding]:
    """Memory ran out in calls of a model that evaluates, whose graphs are recorded; no backward has come since.

    What was read last before the failure is taken to be needed no more: a plain evaluation would have let go of it.
    """
    step = case.step
    calls = np.flatnonzero(step.entries["kind"] == Kind.CALL)
    trains = np.flatnonzero((step.entries["kind"] == Kind.CALL) & (step.entries["flags"] == 0))
    backwards = np.flatnonzero(step.entries["phase"] == PHASES.index(Phase.BACKWARD))
    after = max((int(x[-1]) for x in (trains, backwards) if len(x)), default=-1)
    first = next((int(c) for c in calls if c > after), None)
    if first is None:
        return
    saved = [(i, b) for i, b in enumerate(step.blocks) if b.counted and b.saved and b.reads]
    unused = [(i, b) for i, b in saved if b.role is None and b.born >= first and not b.held]
    inputs = [(i, b) for i, b in saved if _is_batch(b) and b.last_read >= first]
    total = _at_once([b for _, b in unused])
    if total < LARGE * case.peak:
        return
    yield case.found(
        "evaluation-graph",
        f"{format_bytes(total)} are saved for a backward by a model that evaluates (first: {unused[0][1].title}"
        f"{_at(unused[0][1])}): evaluate under torch.no_grad()",
        Change(until={i: step.op_at(b.reads[-1]) for i, b in unused} | _until_the_next(inputs, step)),
    )


def _at_once(blocks: Iterable[Block]) -> int:
    """The most bytes of blocks that are there at the same time."""
    changes = sorted(change for b in blocks for change in ((b.born, b.bytes), (b.died, -b.bytes)))
    return max(accumulate((size for _, size in changes)), default=0)


def _is_used(block: Block, step: Step) -> bool:
    """Whether a backward of the step asked for a block, or let go of it."""
    phases, backward = step.entries["phase"], PHASES.index(Phase.BACKWARD)
    ends = [e for _, e in block.saved if e < len(phases)]
    return any(phases[e] == backward for e in (*ends, *block.reads))


def _is_saved_still(block: Block, step: Step) -> bool:
    return any(e >= len(step.entries) for _, e in block.saved)


def _may_be_used(block: Block, case: Case) -> bool:
    """Whether a backward of a later step uses what is still saved when this one ends, as far as the recording tells."""
    if case.whole and block.bytes >= HELD_BYTES:
        return case.is_used_later(block)
    after = case.following
    if after is None:
        return not (case.last and case.step.row.complete)
    there = case.later.get(block.number)
    return there is not None and (_is_used(there, after) or _is_saved_still(there, after))


def foreach_extra(case: Case) -> Iterator[Finding]:
    """What the optimizer's foreach kernels take beyond one parameter at a time."""
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
    fused = ", fused=True none" if kinds <= _FUSED else ""
    yield case.found(
        "foreach",
        f"the optimizer's foreach kernels take {format_bytes(total)} of temporaries for all parameters at once: "
        f"foreach=False takes those of one parameter at a time{fused} (`lowtide run` cuts the update by itself where it must)",
        change,
    )


def _temporaries(made: list[Block], step: Step) -> int:
    """How many temporaries of a parameter's size the optimizer's loop would hold where its foreach kernels made these."""
    kinds = {b.name.split(" ")[0] for b in step.blocks if b.role is Role.OPTIMIZER_STATE} or {"SGD"}
    base = max(_TEMPORARIES.get(kind, 1) for kind in kinds)
    if kinds == {"RAdam"} and step.row.step < _RECTIFIED:
        base = _TEMPORARIES["Adam"]
    replaced = {e for e, op in {b.born: b.op for b in made}.items() if op.startswith("aten._foreach_neg") or (
        op == "aten._foreach_add.List" and {Role.PARAMETER, Role.GRADIENT} <= {b.role for b in step.blocks if e in b.reads})}
    again = kinds == {"SGD"} and any(w > b.born for b in made if b.born in replaced for w in b.writes)
    own = kinds == {"ASGD"}  # it adds the parameters once for its average
    return base + (len(replaced) > own) + again


def loss_blocks(step: Step, parts: Sequence[str] = _LOSS_OPS, failed: Collection[int] = ()) -> list[int]:
    """Logits, log-softmax and their gradients: places in the step's blocks.

    Args:
        step: a recorded step.
        parts: of the names of a loss's operators.
        failed: operators of a loss that were refused their memory.
    """
    losses = [i for i, b in enumerate(step.blocks) if b.counted and any(part in b.op for part in parts)]
    entries = {step.blocks[i].born for i in losses if step.blocks[i].born >= 0} | {int(step.ops[k]) for k in failed}
    logits = [i for i, b in enumerate(step.blocks)
              if b.counted and b.role is None and i not in losses and entries.intersection(b.reads) and b.born >= 0]
    return [*losses, *logits]


def loss_block(case: Case) -> Iterator[Finding]:
    """Logits, log-softmax and their gradients."""
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
        "would hold one of them at a time",
        change,
    )


def resident_data(case: Case) -> Iterator[Finding]:
    """A data set that lies in memory whole and is read in slices."""
    step = case.step
    for k in np.flatnonzero(step.denied):
        asked = int(step.entries[step.ops[k]]["size"])
        if step.row.step < 0 and PHASES[step.entries[step.ops[k]]["phase"]] is Phase.DATA and asked > LARGE * case.peak:
            yield case.found(
                "resident-data",
                f"{format_bytes(asked)} were asked for in one piece before the first step "
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
            f"{format_bytes(b.bytes)} ({b.label}) of data lie in memory whole and are read in slices: map the file "
            "(numpy.memmap, h5py) or load the slices",
            Change(bytes={i: part}),
        )


def _read_at_once(block: Block, step: Step) -> int:
    """The most of a block that an operator read, views of it apart; 0 where it was not read, or the recording does not say."""
    made: dict[int, int] = {}
    for x in step.blocks:
        made[x.born] = made.get(x.born, 0) + x.bytes
    most = 0
    for r in {r for r in block.reads if r >= 0}:
        if step.names[step.entries[r]["a"]].startswith(_SLICES):  # a view, or a copy of what it takes out
            most = max(most, made.get(r, 0))
        elif not block.shown.get(r):
            return 0
        else:
            most = max(most, block.shown[r])
    return most


def smaller_batch(case: Case) -> Iterator[Finding]:
    """Which part of the batch would have fitted under the cap that the step failed at."""
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
        found = case.found("smaller-batch", f"a batch of 1/{part} would have come past this point", change)
        if found.changed_peak_bytes <= case.cap_bytes:
            yield found
            return


# --- answers --------------------------------------------------------------------------------------------------------------


def _like(first: Step, second: Step) -> int:
    """Of one step the operator to compare with another's highest: the highest of that phase, else of all."""
    phases = first.entries["phase"][first.ops]
    there = np.flatnonzero(phases == second.entries["phase"][second.ops[second.peak_op]])
    return int(there[np.argmax(first.peaks[there])]) if len(there) else first.peak_op


def second_step(case: Case) -> Iterator[Finding]:
    """Why the second step peaks above the first."""
    known = {s.row.step: s for s in case.steps}
    if 0 not in known or 1 not in known:
        return
    first, second = known[0], known[1]
    rise = int(second.peaks.max()) - int(first.peaks.max())
    if rise < NOTABLE * case.peak:
        return
    roles = second.at_peak[second.peak_op] - first.at_peak[_like(first, second)]
    grown = [f"{Role(r).name.lower()} {format_bytes(int(roles[r]))}" for r in np.argsort(-roles) if roles[r] > NOTABLE * rise]
    yield case.found(
        "second-step", f"step 1 peaks {format_bytes(rise)} above step 0; more there: {', '.join(grown)}", None
    )


def cold_step(case: Case) -> Iterator[Finding]:
    """Workspace that only the first step takes."""
    known = {s.row.step: s for s in case.steps}
    if 0 not in known or 1 not in known:
        return
    cold, warm = known[0], known[1]
    rise = int(cold.peaks.max()) - int(warm.peaks.max())
    if rise < LARGE * case.peak:
        return
    workspace = int(cold.at_peak[cold.peak_op][Role.WORKSPACE])
    op = cold.names[cold.entries[cold.ops[cold.peak_op]]["a"]]
    yield case.found(
        "cold-step",
        f"step 0 peaks {format_bytes(rise)} above step 1, {format_bytes(workspace)} of it workspace of {op}: a first call "
        "tries algorithms out (on CUDA: torch.backends.cudnn.benchmark = False)",
        None,
    )


def allocator_cache(case: Case) -> Iterator[Finding]:
    """What CUDA's caching allocator reserved beyond what was allocated."""
    reserved, allocated = int(case.allocator.get("reserved_bytes", 0)), int(case.allocator.get("allocated_bytes", 0))
    extra = reserved - allocated
    if not reserved or extra < LARGE * reserved:
        return
    split, settings = int(case.allocator.get("split_bytes", 0)), str(case.allocator.get("settings", ""))
    advice = "" if "expandable_segments:True" in settings else ": try PYTORCH_ALLOC_CONF=expandable_segments:True"
    yield case.found(
        "allocator-cache",
        f"the allocator reserved {format_bytes(extra)} more than was ever allocated, {format_bytes(split)} of it in the gaps "
        f"of split blocks, and had to free its cache {case.allocator.get('retries', 0)} times{advice}",
        None,
    )


def backward_extra(case: Case) -> Iterator[Finding]:
    """What the backward adds to what the forward left."""
    step = case.step
    backward = [p for p in step.row.phases if p.name == Phase.BACKWARD]
    if not backward:
        return
    largest = max(backward, key=lambda p: p.peak_bytes)
    extra = largest.peak_bytes - largest.start_bytes
    begins = np.flatnonzero((step.entries["kind"] == Kind.PHASE) & (step.entries["phase"] == PHASES.index(Phase.BACKWARD)))
    first = begins[backward.index(largest)] if len(begins) == len(backward) else 0
    ends = np.flatnonzero((step.entries["kind"] == Kind.PHASE) & (np.arange(len(step.entries)) > first))
    until = ends[0] if len(ends) else len(step.entries)
    inside = np.flatnonzero(
        (step.entries["phase"][step.ops] == PHASES.index(Phase.BACKWARD)) & (step.ops >= first) & (step.ops < until)
    )
    if extra < NOTABLE * case.peak or not len(inside):
        return
    k = int(inside[step.peaks[inside].argmax()])
    roles = step.at_peak[k] - step.before[inside[0]]
    parts = [f"{Role(r).name.lower()} {format_bytes(int(roles[r]))}" for r in np.argsort(-roles) if roles[r] > NOTABLE * extra]
    yield case.found(
        "backward-extra",
        f"the backward rises {format_bytes(extra)} above where the forward ended; at its highest point it has gained "
        f"{', '.join(parts)}",
        None,
    )


def optimizer_states(case: Case) -> Iterator[Finding]:
    """What the optimizer keeps."""
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


def memory_floor(case: Case) -> Iterator[Finding]:
    """How low a plan could take the step, what stands there, and the batch that would fit."""
    step = case.step
    if step.denied.any() or not any(p.name == Phase.BACKWARD for p in step.row.phases):
        return
    try:
        floor = floor_of(step, case.peak)
    except RecordingError:  # of a version that did not note how long operators took
        return
    if floor.bytes > (1 - LARGE) * case.peak:
        return
    where = ""
    if floor.op >= 0:
        row = step.entries[step.ops[floor.op]]
        place = ", ".join(step.names[row[key]] for key in ("b", "c") if step.names[row[key]])
        largest = blocks_at(step, floor.op)[:2]
        where = (
            f", at {step.names[row['a']].removeprefix('aten.').removesuffix('.default')}{f' ({place})' if place else ''}"
            f" with {' and '.join(f'{b.title} {format_bytes(b.bytes)}' for b in largest)}"
        )
    batch = f"; within today's peak no plan holds a batch more than {floor.batch_factor:.1f} times as large"
    yield case.found(
        "memory-floor",
        f"no plan that recomputes and moves goes below {format_bytes(floor.bytes)}, {floor.bytes / case.peak:.0%} of the peak"
        f"{where}{batch if np.isfinite(floor.batch_factor) else ''}",
        None,
    )


FINDERS: Final[tuple[Callable[[Case], Iterable[Finding]], ...]] = (
    zeroed_gradients, held_results, double_precision, graph_kept, model_copies, evaluation_graph, foreach_extra, loss_block,
    resident_data, smaller_batch, second_step, cold_step, allocator_cache, backward_extra, optimizer_states,
    memory_floor,
)


def would_fit(found: Iterable[Finding], cap_bytes: int) -> list[Finding]:
    """The findings each of which alone would have kept the step within a limit."""
    return [f for f in found if f.saving_bytes and f.changed_peak_bytes <= cap_bytes]


def _at(block: Block) -> str:
    places = [p for p in (block.module, block.source) if p]
    return f", {', '.join(places)}" if places else ""


def by_role(step: Step) -> Mapping[str, int]:
    """Bytes per role at a step's highest point."""
    roles = step.at_peak[step.peak_op]
    return {Role(r).name.lower(): int(roles[r]) for r in range(len(roles)) if roles[r]}
