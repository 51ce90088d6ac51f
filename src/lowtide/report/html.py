"""A recording as one HTML page that needs no network."""

from __future__ import annotations

import base64
import itertools
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lowtide.recording.explanation.difference import difference
from lowtide.recording.explanation.explanation import Explanation
from lowtide.recording.recorded_step import ROLES, Block, RecordedStep, highest
from lowtide.report.pages import render
from lowtide.report.process import process_page
from lowtide.report.recording import COLOURS

INSTANTS: Final = 20_000
"""Instants drawn per step; a longer step is cut into that many stretches, each drawn by its highest instant."""
BLOCKS: Final = 5_000
"""Blocks per step that the page can list at an instant: the largest ones."""
EDGE: Final = 1e-3
"""Share of a step's time by which its last instant is drawn wider than it was."""
FIRST: Final = 2
"""Number of first steps that are drawn, besides the step that is explained and one that was cut short."""


def page(found: Explanation, before: Explanation | None = None) -> str:
    """The HTML page; with ``before``, it also shows the difference from that recording to this one.

    The page takes about 90 KB plus the data: one number per instant and role, and the blocks.
    """
    if found.process is not None and not found.recording.steps:
        return process_page(found.process, found.meta)
    steps = [s for s in found.steps if s.row.step >= 0]
    cut = [s for s in found.steps[-1:] if not s.row.complete]
    wanted = [*steps[:FIRST], *([] if found.telling is None else [found.telling]), *cut]
    shown = sorted({id(s): s for s in wanted}.values(), key=lambda s: s.row.step)
    other = None if before is None else highest(before.steps)
    data = {
        "roles": [r.name.lower() for r in ROLES],
        "colours": [COLOURS[r.name.lower()] for r in ROLES],
        "steps": [_step(s) for s in shown],
        "peaks": [[r.step, r.peak_bytes, r.seconds] for r in found.rows],
        "shown": 0 if found.telling is None else shown.index(found.telling),
        "other": None if other is None else _step(other),
    }
    return render(
        "recording",
        data,
        meta=found.meta,
        path=found.recording.path.name,
        other=None if before is None else before.recording.path.name,
        peak=found.peak,
        ended=found.ended,
        rows=found.rows,
        found=found.findings,
        changed=None if before is None else difference(before, found),
    )


def _step(step: RecordedStep) -> dict[str, Any]:
    """The data of a step: two instants per operator (before it, and at its peak), thinned, with what the page looks up.

    The last instant is repeated a little later, or at the end of a step that was cut short, because a bare edge has no width.
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


def _bands(step: RecordedStep) -> list[list[Any]]:
    """Phases as [name, start, end], in seconds since the step began."""
    return [[p.name, round(p.start - step.row.start, 6), round(p.start + p.seconds - step.row.start, 6)]
            for p in step.row.phases]


def _names(step: RecordedStep, rows: NDArray[Any]) -> dict[int, str]:
    used = {int(x) for column in ("a", "b", "c") for x in np.unique(rows[column])}
    return {i: step.names[i] for i in sorted(used) if i < len(step.names)}


def _block(block: Block) -> list[Any]:
    spans = [[a, b, int(role)] for a, b, role in block.spans()]
    place = ", ".join(x for x in (block.module, block.source) if x)
    held = f" held by {block.held[-1]}" if block.held else ""
    return [block.bytes, spans, block.title + held, place]

