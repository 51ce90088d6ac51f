"""Meter of the CPU without a heap counter: sums the storages that were seen, and profiles single operators."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any, final

import torch
from lowtide.runtime.device.accelerator import HOST
from lowtide.runtime.device.memory_meter import Meter


@final
class _Profiler:
    """torch's profiler for single operators: it records only memory, in this thread.

    Raises:
        AttributeError, TypeError: if this torch no longer has the legacy profiler.
    """

    def __init__(self) -> None:
        torch_autograd: Any = torch.autograd
        self._enable, self._disable = torch_autograd._enable_profiler_legacy, torch_autograd._disable_profiler_legacy
        given = {"input_shapes": False, "memory": True, "stack": False, "flops": False, "modules": False}
        self._config = torch_autograd.ProfilerConfig(
            torch_autograd.ProfilerState.CPU, *given.values(), torch._C._profiler._ExperimentalConfig()
        )

    def begin(self) -> bool:
        """Start profiling; False if a profiler of the script's own is running."""
        try:
            self._enable(self._config)
        except RuntimeError:
            return False
        return True

    def end(self) -> int:
        """Stop profiling; the highest running sum of the bytes allocated and freed since :meth:`begin`."""
        events = (e for events in self._disable() for e in events if e.kind() == "memory_alloc")
        return int(max(itertools.accumulate((e.cpu_memory_usage() for e in events), initial=0)))


@final
class LedgerMeter(Meter):
    """Counts the storages that the dispatch mode saw, and uses torch's profiler to see inside operators.

    It serves where the heap counter is not loaded. The profiler is on for one observed operator at a time. No other means can
    be switched as fast: 20 microseconds per window, where a whole ``torch.profiler`` takes a thousand times as long. It does
    not see the buffers that LAPACK and MKL allocate themselves.
    """

    exact = False
    capped = False
    device = HOST

    def __init__(self, tracked: Callable[[], int]) -> None:
        """Read live bytes from the ledger: ``tracked`` returns them."""
        self._tracked = tracked
        self._op_peak = 0
        self._span_peak = 0
        self._profiler: _Profiler | None = None
        with contextlib.suppress(AttributeError, TypeError):
            self._profiler = _Profiler()
        self._depth = 0
        self._open_at: int | None = None

    def begin_operator(self) -> None:
        """Begin a new window for :meth:`op_peak` and profile the operator; a nested operator is part of the outer one."""
        self._depth += 1
        if self._depth > 1:
            return
        self.reset_op_peak()
        if self._profiler is not None and self._profiler.begin():
            self._open_at = self._op_peak

    def end_operator(self) -> None:
        """Raise the peaks by what the operator allocated and freed inside."""
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
        """Peak bytes since :meth:`reset_op_peak`."""
        self.live()
        return self._op_peak

    def reset_op_peak(self) -> None:
        """Begin a new window for :meth:`op_peak`."""
        self._op_peak = self._tracked()

    def span_peak(self) -> int:
        """Peak bytes since :meth:`begin_span`."""
        self.live()
        return self._span_peak

    def begin_span(self) -> None:
        """Begin a new window for :meth:`span_peak`."""
        self._span_peak = self._tracked()

    def counts(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage has bytes: every storage that was seen is counted."""
        return storage.nbytes() > 0
