"""The counters of ``probe/heap.c``, mapped so that Python can read them; needs no torch."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Final

from lowtide.base.package import PACKAGE

FIELDS: Final = (
    "layout",
    "tensor_live",
    "tensor_peak",
    "tensor_op_peak",
    "tensor_step_peak",
    "tensor_blocks",
    "heap_live",
    "heap_peak",
    "heap_requests",
    "cap",
    "denied",
    "denied_bytes",
    "library_live",
    "library_op_peak",
    "outside_peak",
)


class Counters(ctypes.Structure):
    """The library's counters, in the library's own memory. Keep the fields in step with ``probe/heap.c``."""

    _fields_ = [(name, ctypes.c_int64) for name in FIELDS]


def library_path() -> Path | None:
    """Path of the compiled counter; None if it was not built (no compiler, or not Linux)."""
    return next(iter(sorted((PACKAGE / "probe").glob("_heap*.so"))), None)


def preloaded() -> Counters | None:
    """The counters, if the library was preloaded (``LD_PRELOAD``) into the process; None otherwise."""
    path = library_path()
    if path is None:
        return None
    try:
        found = Counters.in_dll(ctypes.CDLL(str(path)), "lowtide_heap")
    except (OSError, ValueError):
        return None
    return found if found.layout == ctypes.sizeof(Counters) and found.heap_requests else None
