"""A recording as one HTML page that needs no network."""

from __future__ import annotations

import base64
import itertools
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lowtide.recording.explanation import ROLES, Block, Step, highest, steps_of
from lowtide.recording.findings.all_findings import findings
from lowtide.recording.peak_report import peak_report
from lowtide.recording.reader import Recording
from lowtide.report.pages import render
from lowtide.report.process import process_page
from lowtide.report.recording import COLOURS, difference, ended_at

INSTANTS: Final = 20_000
"""Instants drawn per step; of longer steps each stretch shows its highest."""
BLOCKS: Final = 5_000
"""Blocks per step that can be listed at an instant; the largest."""
EDGE: Final = 1e-3
"""Share of a step by which its last instant is drawn wider than it was."""
FIRST: Final = 2
"""So many of the first steps are drawn; besides them the highest, and one that was cut short."""


def page(recording: Recording, other: Recording | None = None) -> str:
    """The page; with a second recording, the difference from it to the first is shown too.

    The page takes about 90 KB plus the data: per instant one number per role, and the blocks.
    """
    if recording.process and not recording.steps:
        return process_page(recording)
    recorded = steps_of(recording)
    steps = [s for s in recorded if s.row.step >= 0] or recorded
    top = highest(steps)
    cut = [s for s in steps[-1:] if not s.row.complete]
    wanted = [*steps[:FIRST], *([] if top is None else [top]), *cut]
    shown = sorted({id(s): s for s in wanted}.values(), key=lambda s: s.row.step)
    before = None if other is None else highest(steps_of(other))
    data = {
        "roles": [r.name.lower() for r in ROLES],
        "colours": [COLOURS[r.name.lower()] for r in ROLES],
        "steps": [_step(s) for s in shown],
        "peaks": [[r.step, r.peak_bytes, r.seconds] for r in recording.steps if r.step >= 0],
        "shown": 0 if top is None or top not in shown else shown.index(top),
        "other": None if before is None else _step(before),
    }
    peak = None if top is None else peak_report(top)
    return render(
        "recording",
        data,
        meta=recording.meta,
        path=recording.path.name,
        other=None if other is None else other.path.name,
        peak=peak,
        ended=ended_at(recording),
        rows=[r for r in recording.steps if r.step >= 0],
        found=findings(recording),
        changed=None if other is None else difference(other, recording),
    )


def _step(step: Step) -> dict[str, Any]:
    """Two instants per operator (before it, and its highest), thinned, with what the page looks up about them.

    The last one is there twice, the second time at the end of a step that was cut short: an edge has no width.
    """
    ops = step.ops
    totals = np.repeat(step.before.sum(axis=1), 2)
    totals[1::2] = step.peaks
    keep = _thinned(totals)
    keep = np.append(keep, keep[-1:])
    matrix = np.empty((len(keep), len(ROLES)), dtype=np.float32)
    for i, k in enumerate(keep):
        matrix[i] = (step.before if k % 2 == 0 else step.at_peak)[k // 2] / 1024
    entry = ops[keep // 2]
    rows = step.entries[entry]
    times = rows["time"] - step.row.start
    if len(times):
        times[-1] = max(times[-1] * (1 + EDGE) + EDGE / 1000, 0.0 if step.row.complete else step.row.seconds)
    return {
        "step": step.row.step,
        "time": _packed(times.astype(np.float32)),
        "entry": _packed(entry.astype(np.float32)),
        "kib": _packed(matrix),
        "op": [int(x) for x in rows["a"]],
        "module": [int(x) for x in rows["b"]],
        "source": [int(x) for x in rows["c"]],
        "phases": _bands(step),
        "names": _names(step, rows),
        "blocks": [_block(b) for b in sorted(step.blocks, key=lambda b: -b.bytes)[:BLOCKS] if b.counted],
    }


def _thinned(totals: NDArray[np.int64]) -> NDArray[np.int64]:
    count = len(totals)
    if count <= INSTANTS:
        return np.arange(count)
    bounds = np.linspace(0, count, INSTANTS + 1).astype(np.int64)
    return np.array([a + int(totals[a:b].argmax()) for a, b in itertools.pairwise(bounds)])


def _packed(values: NDArray[Any]) -> str:
    return base64.b64encode(np.ascontiguousarray(values, dtype="<f4").tobytes()).decode()


def _bands(step: Step) -> list[list[Any]]:
    """Phases as [name, first instant's time, last]."""
    return [[p.name, round(p.start - step.row.start, 6), round(p.start + p.seconds - step.row.start, 6)]
            for p in step.row.phases]


def _names(step: Step, rows: NDArray[Any]) -> dict[int, str]:
    used = {int(x) for column in ("a", "b", "c") for x in np.unique(rows[column])}
    return {i: step.names[i] for i in sorted(used) if i < len(step.names)}


def _block(block: Block) -> list[Any]:
    spans = [[a, b, int(role)] for a, b, role in block.spans()]
    place = ", ".join(x for x in (block.module, block.source) if x)
    held = f" held by {block.held[-1]}" if block.held else ""
    return [block.bytes, spans, block.title + held, place]

