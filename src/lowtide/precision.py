"""A recorded step in float32, where it was float64: smaller blocks, no conversions.

What runs the same operators is told exactly. Kernels that exist for one of the two types only are not known to the recording.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set as AbstractSet
from typing import Final

from lowtide.finding import Case, Change

WIDE: Final = ("float64", "complex128")
"""Types (a label's beginning) that have a counterpart of half their size."""
_NARROW: Final = ("float32", "complex64")
_TWICE: Final = ("aten.mse_loss.default", "aten.smooth_l1_loss.default")
"""Operators that go over their inputs twice, and convert them each time: structured ones with a reduction."""
_FUSED: Final = "LSTMs"
_KERNELS: Final = {"aten.convolution": "convolutions", "aten.sigmoid_": _FUSED}
"""Operators on float64 whose layers oneDNN runs in float32 (an LSTM's gates on the CPU are activated in place)."""


def in_float32(case: Case) -> tuple[Change, str]:
    """The change that the types make, and which layers have other kernels then: what these take is not known.

    One kernel takes the place of all operators of an LSTM: nothing in its module is changed.
    """
    step = case.step
    modules = {
        told: {b.module for b in step.blocks if b.op.startswith(op) and b.label.startswith(WIDE)}
        for op, told in _KERNELS.items()
    }
    fused = modules[_FUSED]
    copies = _narrowed(case)
    lives = step.trace.buffers
    until: dict[int, int] = {}
    for copy, source in copies.items():  # then it is what was to be converted that lives on
        until[source] = max(until.get(source, 0), lives[source].held_until, lives[copy].held_until)
    inside = _insides(case, {step.blocks[i].born for i in copies})
    halved = {i: b.bytes // 2 for i, b in enumerate(step.blocks) if b.label.startswith(WIDE) and b.module not in fused}
    change = Change(
        bytes=halved | dict.fromkeys(copies, 0),
        until=until,
        inside={k: size for k, size in inside.items() if case.op(k).site.module not in fused},
    )
    return change, " and ".join(told for told, there in modules.items() if there)


def _narrowed(case: Case) -> dict[int, int]:
    """Copies to float32 of what is float64, and what each is a copy of (places of both), where both are there in the step.

    One that was made in the step before is a copy of what its maker read there.
    """
    step = case.step
    converted = ((i, b) for i, b in enumerate(step.blocks) if b.op.startswith("aten._to_copy"))
    made = {i: (step, b) for i, b in converted if b.label.startswith(_NARROW)}
    made |= {i: case.earlier[b.number] for i, (_, b) in made.items() if b.born < 0 and b.number in case.earlier}
    places = {b.number: i for i, b in enumerate(step.blocks) if b.counted and b.label.startswith(WIDE)}
    read: dict[tuple[int, int], int] = {}
    for at in {id(s): s for s, _ in made.values()}.values():
        read |= {(id(at), r): places[b.number] for b in at.blocks if b.number in places for r in b.reads}
    return {i: read[id(at), b.born] for i, (at, b) in made.items() if b.born >= 0 and (id(at), b.born) in read}


def _insides(case: Case, copying: AbstractSet[int]) -> dict[int, int]:
    """How far memory would rise within the operators that read float64, those apart that would not run.

    Half as far above what they make, once what is float32 is not converted there and back (``TensorIterator`` does so on the
    CPU: inputs, and outputs of another type than it computes in).
    """
    step = case.step
    made, left, converted = Counter[int](), Counter[int](), Counter[int]()
    readers: set[int] = set()
    for b in step.blocks:
        wide, narrow = b.label.startswith(WIDE), b.label.startswith(_NARROW)
        if not b.met:
            made[b.born] += b.bytes
            left[b.born] += b.bytes // 2 if wide else b.bytes
            converted[b.born] += 2 * b.bytes if narrow else 0
        for r in set(b.reads):
            converted[r] += 2 * b.bytes if narrow else 0
        readers.update(b.reads if wide else ())
    found = {}
    for r in readers - copying:
        k = step.op_at(r)
        times = 2 if case.op(k).site.op.startswith(_TWICE) else 1
        more = case.inside(k) - made[r]
        rest = more - times * converted[r]
        found[k] = left[r] + (rest if rest >= 0 else max(0, more)) // 2
    return found
