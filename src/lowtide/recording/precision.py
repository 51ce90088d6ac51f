"""Models a recorded float64 step in float32: blocks of half the size, and no conversions.

If a kernel exists for only one of the two types, the recording cannot tell what the other type would take. A conversion that
would happen in float32 as well (``copy=True``, another memory format) is treated as if it would not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set as AbstractSet
from typing import Final

from lowtide.recording.recorded_step import Block
from lowtide.recording.whatif import Case, Change

WIDE: Final = ("float64", "complex128")
"""Data types, as the labels of blocks begin, that have a counterpart of half their size."""
_NARROW: Final = ("float32", "complex64")
_TWICE: Final = ("aten.mse_loss.default", "aten.smooth_l1_loss.default")
"""Operators that pass over their inputs twice and convert them each time: structured kernels with a reduction."""
_CHOOSING: Final = ("bool", "int", "uint8")
_CONVOLUTION: Final = "aten.convolution"
_GATES: Final = ("aten.sigmoid_.default", "aten.tanh_.default", "aten.unsafe_split.Tensor")
"""Operators of an LSTM cell on the CPU; only an LSTM has three sigmoid gates for each tanh gate."""


def in_float32(case: Case) -> Change:
    """The change to the step if it ran in float32."""
    step = case.step
    copies = _narrowed(case)
    lives = step.trace.buffers
    until: dict[int, int] = {}
    for copy, source in copies.items():  # without the copy, its source lives on instead
        until[source] = max(until.get(source, 0), lives[source].held_until, lives[copy].held_until)
    return Change(
        bytes={i: b.bytes // 2 for i, b in enumerate(step.blocks) if _is_wide(b)} | dict.fromkeys(copies, 0),
        until=until,
        inside=_insides(case, {step.blocks[i].born for i in copies}),
    )


def has_convolutions(case: Case) -> bool:
    """Whether a convolution runs in float64: in float32 oneDNN would run it, with less workspace."""
    return any(_is_wide(b) and b.op.startswith(_CONVOLUTION) for b in case.step.blocks)


def has_lstms(case: Case) -> bool:
    """Whether an LSTM runs in float64: in float32 a single kernel would run it on the CPU, whose workspace may be larger."""
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
    """Maps float32 copies of float64 blocks to their sources (indices in the step's ``blocks``), if both are in the step.

    The source of a copy from the previous step is what its maker read there.
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
    """Bytes by which memory would rise inside each operator that reads float64, except the conversions (``copying``).

    An operator would take half as much above its outputs, after subtracting the temporary float64 copies of float32 tensors
    (on the CPU, ``TensorIterator`` converts inputs, and outputs of another type than it computes in). If an operator reads or
    makes indices or masks, the rest may be indices, too, and is not halved.
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
