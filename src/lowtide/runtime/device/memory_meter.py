"""Meters: live and peak bytes of a device, behind one interface.

``HeapMeter`` reads the counter of ``probe/heap.c``; ``CudaMeter`` reads CUDA's caching allocator. Where neither is there,
``LedgerMeter`` knows the storages that the dispatch mode has seen, and has torch's profiler look into single operators.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, Protocol, final

import torch
from lowtide.runtime.device.heap_counters import FIELDS, Counters, library_path
from lowtide.runtime.device.peak_statistics import PeakStatistics
from lowtide.runtime.tensors import storages_of, tensors_so_far, with_gradients

_PROBE_BYTES = 4096
"""Size of the probe allocation that shows whether the heap counter tells torch's requests from those of libraries."""


def counters() -> Counters | None:
    """The counters of this process, attached now where they were not preloaded; None where that cannot be."""
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
    """Count from now on, and book what torch's allocator gave out before, as far as tensors show it."""
    if not library.lowtide_attach():
        return False
    adopt = library.lowtide_adopt
    adopt.argtypes, adopt.restype = (ctypes.c_void_p, ctypes.c_int64), None
    for storage in storages_of(with_gradients(tensors_so_far())).values():
        with contextlib.suppress(RuntimeError, NotImplementedError):  # a storage without bytes
            resizable = storage.resizable()  # numpy's memory, and files', is not
            if storage.device.type == "cpu" and resizable and storage.data_ptr():
                adopt(storage.data_ptr(), storage.nbytes())
    return True


@final
class _Profiler:
    """torch's profiler for single operators: memory alone, in this thread.

    Raises:
        AttributeError, TypeError: where torch has no such thing any more.
    """

    def __init__(self) -> None:
        torch_autograd: Any = torch.autograd
        self._enable, self._disable = torch_autograd._enable_profiler_legacy, torch_autograd._disable_profiler_legacy
        given = {"input_shapes": False, "memory": True, "stack": False, "flops": False, "modules": False}
        self._config = torch_autograd.ProfilerConfig(
            torch_autograd.ProfilerState.CPU, *given.values(), torch._C._profiler._ExperimentalConfig()
        )

    def begin(self) -> bool:
        """Look on from here; False where a profiler of the script's own is on."""
        try:
            self._enable(self._config)
        except RuntimeError:
            return False
        return True

    def end(self) -> int:
        """The highest that what was allocated and freed since adds up to, bytes."""
        events = (e for events in self._disable() for e in events if e.kind() == "memory_alloc")
        return int(max(itertools.accumulate((e.cpu_memory_usage() for e in events), initial=0)))


class Meter(Protocol):
    """Bytes of one device."""

    exact: bool
    """Whether memory inside operators is seen."""

    capped: bool
    """Whether :meth:`cap` makes a request that would cross it fail."""

    device: torch.device
    """Whose bytes are counted."""

    def live(self) -> int:
        """Bytes live now."""

    def op_peak(self) -> int:
        """Highest point since :meth:`reset_op_peak`."""

    def reset_op_peak(self) -> None:
        """Begin a new window for :meth:`op_peak`."""

    def span_peak(self) -> int:
        """Highest point since :meth:`begin_span`."""

    def begin_span(self) -> None:
        """Begin a new window for :meth:`span_peak`."""

    def begin_operator(self) -> None:
        """An operator begins that is observed, in a window of its own for :meth:`op_peak`."""

    def end_operator(self) -> None:
        """It ended, or failed; in the thread that began it."""

    def cap(self, limit_bytes: int) -> None:
        """Cap the calling thread; 0 lifts the cap."""

    def denied(self) -> int:
        """How many requests were refused so far."""

    def denied_bytes(self) -> int:
        """Size of the last request refused."""

    def begin_library_window(self) -> None:
        """Begin a new window for :meth:`library_rise`."""

    def library_rise(self) -> int:
        """How far the bytes that cannot be refused (workspaces of libraries) rose in the window."""

    def library_live(self) -> int:
        """How many such bytes are live now: what libraries keep."""

    def counts(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage's bytes are among those counted: memory of numpy or of a file is not."""

    def close(self) -> None:
        """Count no more: what was changed in torch for it is put back."""


@final
class HeapMeter:
    """The CPU's tensors, counted in the process's heap."""

    exact = True
    capped = True
    device = torch.device("cpu")

    def __init__(self, found: Counters) -> None:
        """Map the counters; reading one costs some tens of nanoseconds."""
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
        """Highest point since :meth:`reset_op_peak`."""
        return self._op_peak.value

    def reset_op_peak(self) -> None:
        """Begin a new window for :meth:`op_peak`."""
        self._op_peak.value = self._live.value

    def span_peak(self) -> int:
        """Highest point since :meth:`begin_span`."""
        return self._span_peak.value

    def begin_span(self) -> None:
        """Begin a new window for :meth:`span_peak`."""
        self._span_peak.value = self._live.value

    def begin_operator(self) -> None:
        """Begin a new window for :meth:`op_peak`."""
        self._op_peak.value = self._live.value

    def end_operator(self) -> None:
        """The heap is counted at all times."""

    def cap(self, limit_bytes: int) -> None:
        """Cap the thread that made this meter; 0 lifts the cap."""
        self._cap.value = limit_bytes

    def denied(self) -> int:
        """How many requests were refused so far."""
        return self._denied.value

    def denied_bytes(self) -> int:
        """Size of the last request refused."""
        return self._denied_bytes.value

    def begin_library_window(self) -> None:
        """Begin a new window for :meth:`library_rise`."""
        self._library_peak.value = self._library_start = self._library_live.value

    def library_rise(self) -> int:
        """How far the bytes that cannot be refused (workspaces of libraries) rose in the window."""
        return self._library_peak.value - self._library_start

    def library_live(self) -> int:
        """How many bytes libraries keep that torch's allocator did not give out (primitives of oneDNN)."""
        return self._library_live.value if self._tells_libraries else 0

    @cached_property
    def _tells_libraries(self) -> bool:
        """Whether requests of torch's allocator are known from others: another counter in between hides who asks."""
        before = self._library_live.value
        probe = torch.empty(_PROBE_BYTES, dtype=torch.uint8)
        return self._library_live.value < before + probe.nbytes

    def counts(self, storage: torch.UntypedStorage) -> bool:
        """Whether torch's allocator asked the heap for a storage's bytes."""
        return bool(storage.device.type == "cpu" and self._block_bytes(storage.data_ptr()))

    def close(self) -> None:
        """Nothing of torch was changed."""


@final
class LedgerMeter:
    """Where no counter is loaded: the storages that the dispatch mode has seen, and what torch's profiler sees in an operator.

    The profiler is on for one observed operator at a time. Nothing else is as quick to switch: 20 microseconds for a window,
    where a whole ``torch.profiler`` takes a thousand times as long. What it does not see: LAPACK's and MKL's own buffers.
    """

    exact = False
    capped = False
    device = torch.device("cpu")

    def __init__(self, tracked: Callable[[], int]) -> None:
        """Read live bytes from the ledger."""
        self._tracked = tracked
        self._op_peak = 0
        self._span_peak = 0
        self._profiler: _Profiler | None = None
        with contextlib.suppress(AttributeError, TypeError):
            self._profiler = _Profiler()
        self._depth = 0
        self._open_at: int | None = None

    def begin_operator(self) -> None:
        """Begin a new window for :meth:`op_peak`, and look into the operator; one within another is part of that."""
        self._depth += 1
        if self._depth > 1:
            return
        self.reset_op_peak()
        if self._profiler is not None and self._profiler.begin():
            self._open_at = self._op_peak

    def end_operator(self) -> None:
        """Take what was allocated and freed inside for :meth:`op_peak`."""
        self._depth -= 1
        if self._depth:
            return
        start, self._open_at = self._open_at, None
        if self._profiler is not None and start is not None:
            self._op_peak = max(self._op_peak, start + self._profiler.end())
            self._span_peak = max(self._span_peak, self._op_peak)

    def live(self) -> int:
        """Bytes live now."""
        live = self._tracked()
        self._op_peak = max(self._op_peak, live)
        self._span_peak = max(self._span_peak, live)
        return live

    def op_peak(self) -> int:
        """Highest point since :meth:`reset_op_peak`."""
        self.live()
        return self._op_peak

    def reset_op_peak(self) -> None:
        """Begin a new window for :meth:`op_peak`."""
        self._op_peak = self._tracked()

    def span_peak(self) -> int:
        """Highest point since :meth:`begin_span`."""
        self.live()
        return self._span_peak

    def begin_span(self) -> None:
        """Begin a new window for :meth:`span_peak`."""
        self._span_peak = self._tracked()

    def cap(self, limit_bytes: int) -> None:
        """Nothing can be capped here."""

    def denied(self) -> int:
        """No request is ever refused by this meter."""
        return 0

    def denied_bytes(self) -> int:
        """No request is ever refused by this meter."""
        return 0

    def begin_library_window(self) -> None:
        """Workspaces of libraries are not seen apart here."""

    def library_rise(self) -> int:
        """Workspaces of libraries are not seen apart here."""
        return 0

    def library_live(self) -> int:
        """What libraries keep is not seen apart here."""
        return 0

    def counts(self, storage: torch.UntypedStorage) -> bool:
        """All that was seen is counted."""
        return storage.nbytes() > 0

    def close(self) -> None:
        """Nothing of torch was changed."""


@final
class CudaMeter:
    """One CUDA device, by its caching allocator's count of allocated bytes."""

    exact = True
    capped = False

    def __init__(self, device: torch.device) -> None:
        """Read the allocator of one device; until :meth:`close`, the script's own peak statistics are kept for it."""
        self.device = device
        self._span_peak = 0
        self._op_peak = 0
        index = torch.cuda.current_device() if device.index is None else device.index
        self._statistics = PeakStatistics(index, self._before_reset)
        self._statistics.install()

    def close(self) -> None:
        """Give the allocator's statistics back to the script."""
        self._statistics.remove()

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """While Lowtide takes memory for itself, and gives it back: neither its own peaks nor the script's show it."""
        self._op_peak = self.op_peak()
        with self._statistics.hidden():
            yield

    def _before_reset(self) -> None:
        """The script resets the allocator's peaks itself: what they were belongs to the window that is open."""
        self._op_peak = self.op_peak()

    def live(self) -> int:
        """Bytes allocated now."""
        return self._statistics.allocated()[0]

    def op_peak(self) -> int:
        """Highest point since :meth:`reset_op_peak`."""
        return max(self._op_peak, self._statistics.allocated()[1])

    def reset_op_peak(self) -> None:
        """Begin a new window; the step's own peak is carried over."""
        self._span_peak = max(self._span_peak, self.op_peak())
        self._statistics.reset()
        self._op_peak = 0

    def span_peak(self) -> int:
        """Highest point since :meth:`begin_span`."""
        return max(self._span_peak, self.op_peak())

    def begin_span(self) -> None:
        """Begin a new window for :meth:`span_peak`."""
        self._statistics.reset()
        self._span_peak = self._op_peak = 0

    def begin_operator(self) -> None:
        """Begin a new window for :meth:`op_peak`."""
        self.reset_op_peak()

    def end_operator(self) -> None:
        """The allocator counts at all times."""

    def cap(self, limit_bytes: int) -> None:
        """The allocator's own limit is left alone: it counts reserved bytes, not allocated ones."""

    def denied(self) -> int:
        """Out-of-memory errors of the allocator so far."""
        return int(torch.cuda.memory_stats(self.device).get("num_ooms", 0))

    def denied_bytes(self) -> int:
        """Not known for CUDA."""
        return 0

    def begin_library_window(self) -> None:
        """Workspaces of libraries are not seen apart here."""

    def library_rise(self) -> int:
        """Workspaces of libraries are not seen apart here."""
        return 0

    def library_live(self) -> int:
        """What libraries keep is not seen apart here."""
        return 0

    def cache(self) -> dict[str, int | str]:
        """What the caching allocator holds beyond what is allocated (``torch.cuda.memory_stats``), and how it was set."""
        stats = torch.cuda.memory_stats(self.device)
        keys = {"reserved_bytes": "reserved_bytes.all.peak", "allocated_bytes": "allocated_bytes.all.peak",
                "split_bytes": "inactive_split_bytes.all.peak", "retries": "num_alloc_retries"}
        settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
        return {**{name: int(stats.get(key, 0)) for name, key in keys.items()}, "settings": settings}

    def counts(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage lies on the device."""
        return storage.device == self.device
