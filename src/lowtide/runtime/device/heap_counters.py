"""The counters of ``probe/heap.c``, as memory that Python reads; nothing here needs torch."""

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
    """The library's counters, in its own memory: keep in step with ``probe/heap.c``."""

    _fields_ = [(name, ctypes.c_int64) for name in FIELDS]


def library_path() -> Path | None:
    """Where the compiled counter lies; None where it was not built (no compiler, no Linux)."""
    return next(iter(sorted((PACKAGE / "probe").glob("_heap*.so"))), None)


def preloaded() -> Counters | None:
    """The counters, where the library was loaded before the process began; None otherwise."""
    path = library_path()
    if path is None:
        return None
    try:
        found = Counters.in_dll(ctypes.CDLL(str(path)), "lowtide_heap")
    except (OSError, ValueError):
        return None
    return found if found.layout == ctypes.sizeof(Counters) and found.heap_requests else None
