"""A recorded step in float32, where it was float64: smaller blocks, no conversions.

Where kernels exist for one of the two types only, what they take in the other is not known to the recording. A conversion that
float32 would do as well (``copy=True``, another memory format) is taken for one that it would not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set as AbstractSet
from typing import Final

from lowtide.recording.recorded_step import Block
from lowtide.recording.whatif import Case, Change

WIDE: Final = ("float64", "complex128")
"""Types (a label's beginning) that have a counterpart of half their size."""
_NARROW: Final = ("float32", "complex64")
_TWICE: Final = ("aten.mse_loss.default", "aten.smooth_l1_loss.default")
"""Operators that go over their inputs twice, and convert them each time: structured ones with a reduction."""
_CHOOSING: Final = ("bool", "int", "uint8")
_CONVOLUTION: Final = "aten.convolution"
_GATES: Final = ("aten.sigmoid_.default", "aten.tanh_.default", "aten.unsafe_split.Tensor")
"""Operators of an LSTM's cell on the CPU; it alone has three gates of the first kind to one of the second."""


def in_float32(case: Case) -> Change:
    """The change that the types make."""
    step = case.step
    copies = _narrowed(case)
    lives = step.trace.buffers
    until: dict[int, int] = {}
    for copy, source in copies.items():  # then it is what was to be converted that lives on
        until[source] = max(until.get(source, 0), lives[source].held_until, lives[copy].held_until)
    return Change(
        bytes={i: b.bytes // 2 for i, b in enumerate(step.blocks) if _is_wide(b)} | dict.fromkeys(copies, 0),
        until=until,
        inside=_insides(case, {step.blocks[i].born for i in copies}),
    )


def has_convolutions(case: Case) -> bool:
    """Whether float64 is convolved: oneDNN does so in float32, with less memory of its own."""
    return any(_is_wide(b) and b.op.startswith(_CONVOLUTION) for b in case.step.blocks)


def has_lstms(case: Case) -> bool:
    """Whether an LSTM computes in float64: in float32 one kernel runs it on the CPU, whose workspace may be larger."""
    step = case.step
    wide = {step.op_at(entry) for b in step.blocks if _is_wide(b) for entry in (*b.reads, *b.writes)}
    cells: dict[str, Counter[str]] = {}
    for site in (case.op(k).site for k in wide if k < len(step.ops)):
        cells.setdefault(site.module, Counter())[site.op] += 1
    sigmoid, tanh, split = _GATES
    return any(there[split] and there[tanh] and there[sigmoid] == 3 * there[tanh] for there in cells.values())


def _is_wide(block: Block) -> bool:
    return block.label.startswith(WIDE)


def _narrowed(case: Case) -> dict[int, int]:
    """Copies to float32 of what is float64, and what each is a copy of (places of both), where both are there in the step.

    One that was made in the step before is a copy of what its maker read there.
    """
    step = case.step
    converted = ((i, b) for i, b in enumerate(step.blocks) if b.op.startswith("aten._to_copy"))
    made = {i: (step, b) for i, b in converted if b.label.startswith(_NARROW)}
    made |= {i: case.earlier[b.number] for i, (_, b) in made.items() if b.born < 0 and b.number in case.earlier}
    places = {b.number: i for i, b in enumerate(step.blocks) if b.counted and _is_wide(b)}
    steps = {at for at, _ in made.values()}
    read = {(at, r): places[b.number] for at in steps for b in at.blocks if b.number in places for r in b.reads}
    found = {i: read[at, b.born] for i, (at, b) in made.items() if b.born >= 0 and (at, b.born) in read}
    return {i: source for i, source in found.items() if _is_counterpart(step.blocks[i], step.blocks[source])}


def _is_counterpart(narrow: Block, wide: Block) -> bool:
    return any(narrow.label.startswith(n) and wide.label.startswith(w) for n, w in zip(_NARROW, WIDE, strict=True))


def _insides(case: Case, copying: AbstractSet[int]) -> dict[int, int]:
    """How far memory would rise within the operators that read float64, those apart that would not run.

    Half as far above what they make, once what is float32 is not converted there and back (``TensorIterator`` does so on the
    CPU: inputs, and outputs of another type than it computes in). Where operators choose or make indices, what they take
    besides may be indices as well: as far as before.
    """
    step = case.step
    made, left, converted = Counter[int](), Counter[int](), Counter[int]()
    readers: set[int] = set()
    indexing: set[int] = set()
    for b in step.blocks:
        wide, takes_part = _is_wide(b), set(b.reads)
        if not b.met:
            made[b.born] += b.bytes
            left[b.born] += b.bytes // 2 if wide else b.bytes
            takes_part.add(b.born)
        if wide:
            readers.update(b.reads)
        elif b.label.startswith(_NARROW):
            converted.update(dict.fromkeys(takes_part, 2 * b.bytes))
        elif b.label.startswith(_CHOOSING):
            indexing |= takes_part
    found = {}
    for r in readers - copying:
        k = step.op_at(r)
        times = 2 if case.op(k).site.op.startswith(_TWICE) else 1
        more = case.inside(k) - made[r]
        rest = more - times * converted[r]
        rest = rest if rest >= 0 else max(0, more)
        found[k] = left[r] + (rest if r in indexing else rest // 2)
    return found
