"""Meter of the CPU: tensors in the process's heap, counted by ``probe/heap.c``."""

from __future__ import annotations

import contextlib
import ctypes
from functools import cached_property
from typing import Final, final

import torch
from lowtide.runtime.device.accelerator import HOST
from lowtide.runtime.device.heap_counters import FIELDS, Counters, library_path
from lowtide.runtime.device.memory_meter import Meter
from lowtide.runtime.tensors import storages_of, tensors_so_far, with_gradients

_PROBE_BYTES: Final = 4096
"""Bytes of the probe allocation that shows whether the heap counter can tell torch's requests from those of libraries."""


def counters() -> Counters | None:
    """The heap counters of this process; if they were not preloaded, they are attached now. None if that is impossible."""
    path = library_path()
    if path is None:
        return None
    try:
        library = ctypes.CDLL(str(path))
        found = Counters.in_dll(library, "lowtide_heap")
    except (OSError, ValueError):
        return None
    if found.layout != ctypes.sizeof(Counters):
        return None
    if found.heap_requests == 0 and found.tensor_blocks == 0 and not _attach(library):
        return None
    return found


def _attach(library: ctypes.CDLL) -> bool:
    """Start counting, and book the blocks that torch's allocator handed out before, as far as tensors show them."""
    if not library.lowtide_attach():
        return False
    adopt = library.lowtide_adopt
    adopt.argtypes, adopt.restype = (ctypes.c_void_p, ctypes.c_int64), None
    for storage in storages_of(with_gradients(tensors_so_far())).values():
        with contextlib.suppress(RuntimeError, NotImplementedError):  # a storage without bytes
            resizable = storage.resizable()  # False for memory of numpy or of a file
            if storage.device.type == "cpu" and resizable and storage.data_ptr():
                adopt(storage.data_ptr(), storage.nbytes())
    return True


@final
class HeapMeter(Meter):
    """Counts the CPU's tensors in the process's heap."""

    exact = True
    capped = True
    device = HOST

    def __init__(self, found: Counters) -> None:
        """Map the counters; reading one takes a few tens of nanoseconds."""
        self._counters = found
        base = ctypes.addressof(found)
        cell = {n: ctypes.c_int64.from_address(base + getattr(Counters, n).offset) for n in FIELDS}
        self._live = cell["tensor_live"]
        self._op_peak = cell["tensor_op_peak"]
        self._span_peak = cell["tensor_step_peak"]
        self._denied = cell["denied"]
        self._denied_bytes = cell["denied_bytes"]
        self._library_live = cell["library_live"]
        self._library_peak = cell["library_op_peak"]
        self._library_start = 0
        path = library_path()
        assert path is not None
        library = ctypes.CDLL(str(path))
        slot = library.lowtide_thread_cap
        slot.restype = ctypes.c_void_p
        self._block_bytes = library.lowtide_block_bytes
        self._block_bytes.argtypes, self._block_bytes.restype = (ctypes.c_void_p,), ctypes.c_int64
        self._cap = ctypes.c_int64.from_address(slot())

    def live(self) -> int:
        """Bytes live now."""
        return self._live.value

    def op_peak(self) -> int:
        """Peak bytes since :meth:`reset_op_peak`."""
        return self._op_peak.value

    def reset_op_peak(self) -> None:
        """Begin a new window for :meth:`op_peak`."""
        self._op_peak.value = self._live.value

    def span_peak(self) -> int:
        """Peak bytes since :meth:`begin_span`."""
        return self._span_peak.value

    def begin_span(self) -> None:
        """Begin a new window for :meth:`span_peak`."""
        self._span_peak.value = self._live.value

    def begin_operator(self) -> None:
        """Begin a new window for :meth:`op_peak`."""
        self._op_peak.value = self._live.value

    def cap(self, limit_bytes: int) -> None:
        """Cap the thread that created this meter at ``limit_bytes`` live bytes; 0 lifts the cap."""
        self._cap.value = limit_bytes

    def cells(self) -> tuple[int, int]:
        """Addresses of the cap that :meth:`cap` sets, and of the number of requests refused so far."""
        return ctypes.addressof(self._cap), ctypes.addressof(self._denied)

    def denied(self) -> int:
        """Number of requests refused so far."""
        return self._denied.value

    def denied_bytes(self) -> int:
        """Bytes of the last request refused."""
        return self._denied_bytes.value

    def begin_library_window(self) -> None:
        """Begin a new window for :meth:`library_rise`."""
        self._library_peak.value = self._library_start = self._library_live.value

    def library_rise(self) -> int:
        """Bytes by which the memory of libraries (workspaces, which cannot be refused) rose within the window."""
        return self._library_peak.value - self._library_start

    def library_live(self) -> int:
        """Bytes that libraries hold outside torch's allocator (oneDNN's primitives); 0 if they cannot be told apart."""
        return self._library_live.value if self._tells_libraries else 0

    @cached_property
    def _tells_libraries(self) -> bool:
        """Whether the counter can tell torch's requests from others; another interposed counter hides the caller."""
        before = self._library_live.value
        probe = torch.empty(_PROBE_BYTES, dtype=torch.uint8)
        return self._library_live.value < before + probe.nbytes

    def counts(self, storage: torch.UntypedStorage) -> bool:
        """Whether the storage's bytes are a block that torch's allocator requested from the heap."""
        return bool(storage.device.type == "cpu" and self._block_bytes(storage.data_ptr()))
