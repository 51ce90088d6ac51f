"""Findings of the whole run: its first steps, the allocator, the backward, the lowest peak of any plan."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lowtide.base.errors import RecordingError
from lowtide.base.trace import Phase
from lowtide.base.units import format_bytes
from lowtide.recording.file_format import PHASES, EntryKind, Role
from lowtide.recording.findings.common import NOTABLE, op_to_compare
from lowtide.recording.findings.loss_and_data import LARGE
from lowtide.recording.peak_floor import blocks_at, floor_of
from lowtide.recording.whatif import Case, Finding


def second_step(case: Case) -> Iterator[Finding]:
    """Why the second step peaks above the first."""
    known = {s.row.step: s for s in case.steps}
    if 0 not in known or 1 not in known:
        return
    first, second = known[0], known[1]
    rise = int(second.peaks.max()) - int(first.peaks.max())
    if rise < NOTABLE * case.peak:
        return
    roles = second.at_peak[second.peak_op] - first.at_peak[op_to_compare(first, second)]
    grown = [f"{Role(r).name.lower()} {format_bytes(int(roles[r]))}" for r in np.argsort(-roles) if roles[r] > NOTABLE * rise]
    yield case.found(
        "second-step", f"step 1 peaks {format_bytes(rise)} above step 0; what grew: {', '.join(grown)}", None
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
        f"step 0 peaks {format_bytes(rise)} above step 1, {format_bytes(workspace)} of it workspace of {op}: the first call "
        "tries out algorithms (on CUDA, set torch.backends.cudnn.benchmark = False)",
        None,
    )


def allocator_cache(case: Case) -> Iterator[Finding]:
    """Bytes that CUDA's caching allocator reserved beyond those that were ever allocated."""
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
    """Memory that the backward adds to what the forward left."""
    step = case.step
    backward = [p for p in step.row.phases if p.name == Phase.BACKWARD]
    if not backward:
        return
    largest = max(backward, key=lambda p: p.peak_bytes)
    extra = largest.peak_bytes - largest.start_bytes
    phases = step.entries["kind"] == EntryKind.PHASE
    begins = np.flatnonzero(phases & (step.entries["phase"] == PHASES.index(Phase.BACKWARD)))
    first = begins[backward.index(largest)] if len(begins) == len(backward) else 0
    ends = np.flatnonzero(phases & (np.arange(len(step.entries)) > first))
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
        f"the backward peaks {format_bytes(extra)} above the end of the forward; what grew: "
        f"{', '.join(parts)}",
        None,
    )


def memory_floor(case: Case) -> Iterator[Finding]:
    """The lowest peak that a plan could give the step, what is live there, and how large a batch could fit."""
    step = case.step
    if step.denied.any() or not any(p.name == Phase.BACKWARD for p in step.row.phases):
        return
    try:
        floor = floor_of(step, case.peak)
    except RecordingError:  # its format is too old for a graph
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
    batch = f"; within the current peak no plan fits a batch more than {floor.batch_factor:.1f} times as large"
    yield case.found(
        "memory-floor",
        f"recomputing and offloading cannot go below {format_bytes(floor.bytes)}, {floor.bytes / case.peak:.0%} of the peak"
        f"{where}{batch if np.isfinite(floor.batch_factor) else ''}",
        None,
    )
