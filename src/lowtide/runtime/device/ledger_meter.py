"""Where no counter is loaded: the storages that the dispatch mode has seen, and what torch's profiler sees in an operator."""

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


@final
class LedgerMeter(Meter):
    """Where no counter is loaded: the storages that the dispatch mode has seen, and what torch's profiler sees in an operator.

    The profiler is on for one observed operator at a time. Nothing else is as quick to switch: 20 microseconds for a window,
    where a whole ``torch.profiler`` takes a thousand times as long. What it does not see: LAPACK's and MKL's own buffers.
    """

    exact = False
    capped = False
    device = HOST

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

    def counts(self, storage: torch.UntypedStorage) -> bool:
        """All that was seen is counted."""
        return storage.nbytes() > 0
