"""Figures of a step and of its phases, from its entries."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.recording.file_format import PHASES, EntryKind, PhaseFigures, StepRow


def summarize_step(
    step: int, start: float, start_bytes: int, high_water_bytes: int, entries: NDArray[np.void], carried: NDArray[np.void],
    *, complete: bool,
) -> StepRow:
    """Computes a step's figures from its entries.

    Args:
        step: its number; -1 for everything before the first step.
        start: seconds since the recording began.
        start_bytes: live bytes when it began.
        high_water_bytes: peak of the run before it.
        entries: what happened in it; at least one.
        carried: blocks that were live when it began.
        complete: whether its end was seen.
    """
    kinds = entries["kind"]
    measured = entries[(kinds == EntryKind.OP) | (kinds == EntryKind.PHASE) | (kinds == EntryKind.DENIED)]
    end = float(entries["time"][-1])
    phases = tuple(_phases(measured, start, start_bytes, high_water_bytes, end))
    if complete and len(phases) > 1 and measured[-1]["kind"] == EntryKind.PHASE:
        phases = phases[:-1]  # the entry that closes the last phase opens none
    peak = max((int(p.peak_bytes) for p in phases), default=start_bytes)
    return StepRow(
        step=step, start=start, seconds=end - start, start_bytes=start_bytes,
        end_bytes=int(measured["live"][-1]) if len(measured) else start_bytes, peak_bytes=peak,
        high_water_bytes=max(high_water_bytes, peak), complete=complete, phases=phases, entries=entries, carried=carried,
    )


class _Entry(NamedTuple):
    """The fields of :data:`ENTRY`."""

    time: float
    kind: int
    phase: int
    flags: int
    a: int
    b: int
    c: int
    size: int
    live: int
    peak: int


def _phases(
    measured: NDArray[np.void], start: float, live: int, high: int, end: float
) -> Iterable[PhaseFigures]:
    """Splits a step at its PHASE entries. Memory that the script frees before a phase's first operator belongs to the phase
    before.
    """
    is_mark = measured["kind"] == EntryKind.PHASE
    bounds = sorted({0, *np.flatnonzero(is_mark).tolist(), len(measured)})
    spans = list(itertools.pairwise(bounds))
    if not spans:
        return
    peaks = np.maximum.reduceat(np.where(is_mark, 0, measured["peak"]), bounds[:-1]).tolist()
    heads = [_Entry(*measured[i].item()) for i, _ in spans]
    firsts = [
        _first_bytes(head, _Entry(*measured[i + 1].item()) if j > i + 1 else None, live)
        for head, (i, j) in zip(heads, spans, strict=True)
    ]
    for n, (_, j) in enumerate(spans):
        closes = heads[n + 1] if n + 1 < len(spans) else None
        begins = heads[n].time if heads[n].kind == EntryKind.PHASE else start
        last = firsts[n + 1] if closes is not None else int(measured[j - 1]["live"])
        peak = max(firsts[n], last, peaks[n], 0 if closes is None else closes.peak)
        high = max(high, peak)
        yield PhaseFigures(
            name=str(PHASES[heads[n].phase]), start=begins, seconds=(end if closes is None else closes.time) - begins,
            start_bytes=firsts[n], end_bytes=last, peak_bytes=peak, high_water_bytes=high,
            outside_bytes=0 if closes is None else closes.size,
        )


def _first_bytes(head: _Entry, following: _Entry | None, live: int) -> int:
    """Live bytes before the first operator of a phase, or at its PHASE entry if it has none."""
    if head.kind != EntryKind.PHASE:
        return head.size if head.kind == EntryKind.OP else live
    return following.size if following is not None and following.kind == EntryKind.OP else head.live
