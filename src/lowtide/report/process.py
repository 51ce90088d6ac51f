"""The HTML page of a recording without operators: a program in any framework, or a guarded run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lowtide.base.units import format_seconds
from lowtide.recording.explanation.explanation import ProcessMemory
from lowtide.recording.file_format import ProcessRow
from lowtide.report.pages import render


def process_page(process: ProcessMemory, meta: Mapping[str, Any]) -> str:
    """Memory of the process by step, or by second if it marked none; below, the processes of a guarded run."""
    rows, marked = process.rows, process.marked
    guard: dict[str, Any] | None = meta.get("guard")
    cap = None if guard is None or guard["enforced_by"] == "none" else guard["cap_bytes"]
    data = {
        "unit": "step" if marked else "second",
        "x": [float(r.step) if marked else round(r.start, 2) for r in rows],
        "highest": [r.highest_bytes for r in rows],
        "resident": [r.resident_bytes for r in rows],
        "unique": [r.unique_bytes for r in rows],
        "children": [r.children_bytes for r in rows],
        "heap": [r.heap_peak_bytes for r in rows],
        "cap": cap,
    }
    return render(
        "process", data, meta=meta, guard=guard, cap=cap, told=_told(rows, guard),
        highest=max(r.highest_bytes for r in rows),
    )  # fmt: skip


def _told(rows: Sequence[ProcessRow], guard: dict[str, Any] | None) -> str:
    """The length of the recording as text, in steps or in time."""
    if rows[0].marked:
        return f"{len(rows)} step{'s' if len(rows) != 1 else ''}"
    return format_seconds(rows[-1].start + rows[-1].seconds if guard is None else guard["seconds"])
