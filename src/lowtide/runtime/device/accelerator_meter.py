"""Meter of an accelerator: the allocated bytes that its caching allocator counts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import final

import torch
from lowtide.runtime.device.accelerator import Accelerator
from lowtide.runtime.device.memory_meter import Meter
from lowtide.runtime.device.peak_statistics import PeakStatistics


@final
class AcceleratorMeter(Meter):
    """Counts one accelerator's allocated bytes by its caching allocator's statistics.

    It cannot cap them: the allocator's own limit applies to reserved bytes, not to allocated ones.
    """

    exact = True
    capped = False

    def __init__(self, device: torch.device) -> None:
        """Read the allocator of one device; until :meth:`close`, the script still reads its own peak statistics.

        Args:
            device: an accelerator that counts peaks (:attr:`.Accelerator.counts_peaks`).
        """
        self._accelerator = accelerator = Accelerator(device)
        self.device = accelerator.device
        self._span_peak = 0
        self._op_peak = 0
        self._statistics = PeakStatistics(self.device.index, self._before_reset, kind=device.type)
        self._statistics.install()

    def close(self) -> None:
        """Give the allocator's statistics back to the script."""
        self._statistics.remove()

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Hide memory that Lowtide allocates and frees for itself within the block from the meter's and the script's peaks."""
        self._op_peak = self.op_peak()
        with self._statistics.hidden():
            yield

    def _before_reset(self) -> None:
        """The script is about to reset the allocator's peaks: carry the current peak over to the open window."""
        self._op_peak = self.op_peak()

    def live(self) -> int:
        """Bytes allocated now."""
        return self._statistics.allocated()[0]

    def op_peak(self) -> int:
        """Peak bytes since :meth:`reset_op_peak`."""
        return max(self._op_peak, self._statistics.allocated()[1])

    def reset_op_peak(self) -> None:
        """Begin a new window for :meth:`op_peak`; the peak so far still counts for :meth:`span_peak`."""
        self._span_peak = max(self._span_peak, self.op_peak())
        self._statistics.reset()
        self._op_peak = 0

    def span_peak(self) -> int:
        """Peak bytes since :meth:`begin_span`."""
        return max(self._span_peak, self.op_peak())

    def begin_span(self) -> None:
        """Begin a new window for :meth:`span_peak`."""
        self._statistics.reset()
        self._span_peak = self._op_peak = 0

    def begin_operator(self) -> None:
        """Begin a new window for :meth:`op_peak`."""
        self.reset_op_peak()

    def denied(self) -> int:
        """Number of out-of-memory errors that the allocator has raised so far."""
        return int(self._accelerator.statistics().get("num_ooms", 0))

    def cache(self) -> dict[str, int | str]:
        """The caching allocator's peaks of reserved, allocated and inactive split bytes, its retries, and its settings."""
        stats = self._accelerator.statistics()
        keys = {"reserved_bytes": "reserved_bytes.all.peak", "allocated_bytes": "allocated_bytes.all.peak",
                "split_bytes": "inactive_split_bytes.all.peak", "retries": "num_alloc_retries"}
        settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
        return {**{name: int(stats.get(key, 0)) for name, key in keys.items()}, "settings": settings}

    def counts(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage is on the device."""
        return storage.device == self.device
