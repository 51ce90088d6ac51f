"""The counters of a watched run as series, one value per step, as they are judged."""

from __future__ import annotations

from typing import Final

import numpy as np

from lowtide.studies.leak.trend import FEWEST, Series, like_sized
from lowtide.studies.leak.watch import Run

BLOCK: Final = 64
"""Assumed bytes of a block of Python's small-object allocator, if CPython does not report bytes."""



def series_of(run: Run, *, collected_every: int = 0) -> dict[str, Series]:
    """The counters that are judged: bytes after each step of a process. Counters that it lacks are left out.

    Args:
        run: the process.
        collected_every: steps after which garbage in cycles was collected; between collections, what is held reads NaN.
    """
    heap = like_sized(run.column("heap_bytes"), run.column("peak_bytes"))
    if not np.isfinite(heap).any():
        heap = run.column("used_bytes")
    python = _filled(run.column("python_bytes"))
    if not np.isfinite(python).any():
        python = run.column("python_blocks") * BLOCK
    maps = run.column("private_bytes") - run.column("system_bytes") - _filled(run.column("arena_bytes"))
    shared = run.column("shared_bytes")
    virtual = run.column("virtual_bytes") - run.column("private_bytes") - np.nan_to_num(_filled(shared))
    held = heap + python if np.isfinite(python).all() else heap
    found = {
        "held": held,
        "heap": heap,
        "python": python,
        "maps": maps,
        "files": virtual,
        "file_pages": run.column("file_bytes"),
        "shared": shared,
        "segments": run.column("segments_bytes"),
        "workers": _workers(run),
        "cuda_allocated": run.column("cuda_allocated_bytes"),
        "cuda_reserved": run.column("cuda_reserved_bytes"),
        "resident": run.column("anonymous_bytes") + shared,
    }
    known = {name: values for name, values in found.items() if np.isfinite(values).any()}
    if collected_every > 1:
        for values in (held, heap, python):
            values[np.arange(1, len(values) + 1) % collected_every != 0] = np.nan
    return known


def garbage_rate(run: Run) -> float:
    """Garbage in reference cycles that audits after the first found waiting, in bytes per step; 0 without two audits."""
    audits = run.audits
    steps = audits[-1]["step"] - audits[0]["step"] if len(audits) > 1 else 0
    return sum(a["cycles_bytes"] for a in audits[1:]) / steps if steps else 0.0


def _filled(values: Series) -> Series:
    """Fill the steps between readings by linear interpolation, and those before the first and after the last with these.

    A series with few readings stays as it is: interpolated, it would look like one with a reading for each step.
    """
    known = np.flatnonzero(np.isfinite(values))
    if len(known) < FEWEST:
        return values
    return np.interp(np.arange(len(values)), known, values[known])


def _workers(run: Run) -> Series:
    """Bytes that the program's other processes took, not counting what they share; NaN if it never had any."""
    values = run.column("children_bytes")
    return values if (values > 0).any() else np.full(run.steps, np.nan)
