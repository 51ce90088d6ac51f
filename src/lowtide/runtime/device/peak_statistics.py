"""Lets Lowtide reset an accelerator's peak counters without changing what the script reads from them.

The caching allocator keeps one high-water mark per statistic, which must be reset to measure a window. Lowtide's resets would
change what the script's own ``torch.cuda.max_memory_allocated()`` returns. So this module keeps the peaks from before each of
them, and the script's reads return the higher of the two. It replaces the functions of ``torch._C`` that ``torch.cuda`` and
``torch.accelerator`` call (``torch/cuda/memory.py``, ``torch/accelerator/memory.py``).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Final, final

import torch
from lowtide.runtime.monkeypatch import Wraps

_READERS: Final = ("_cuda_memoryStats", "_xpu_memoryStats", "_accelerator_getDeviceStats")
_RESETTERS: Final = ("_cuda_resetPeakMemoryStats", "_xpu_resetPeakMemoryStats", "_accelerator_resetPeakStats")
_FUNCTIONS: Final = {"cuda": ("_cuda_memoryStats", "_cuda_resetPeakMemoryStats")}
_FUNCTIONS_OF_OTHERS: Final = ("_accelerator_getDeviceStats", "_accelerator_resetPeakStats")


@final
class PeakStatistics:
    """The peak statistics of one device, shared between Lowtide and the script.

    Example:
        >>> statistics = PeakStatistics(0, before_reset=lambda: None)
        >>> statistics.install()
        >>> statistics.reset()  # the script's max_memory_allocated() stays what it was
        >>> statistics.remove()
    """

    def __init__(
        self, index: int, before_reset: Callable[[], None], library: Any = torch._C, *, kind: str = "cuda"
    ) -> None:
        """Prepare to read a device's statistics; no function of torch is replaced yet.

        Args:
            index: index of the device.
            kind: type of the device, as in ``torch.device.type``.
            before_reset: called before each reset by the script, which discards the current window's peak.
            library: object that has the allocator's functions; tests pass their own.
        """
        self._index = index
        self._before_reset = before_reset
        self._library = library
        read, reset = _FUNCTIONS.get(kind, _FUNCTIONS_OF_OTHERS)
        self._read, self._reset = getattr(library, read), getattr(library, reset)
        self._earlier: dict[Any, Any] = {}
        self._wraps = Wraps()

    def install(self) -> None:
        """Replace torch's functions: from here on the script reads its own peaks."""
        for name in _READERS:
            if hasattr(self._library, name):
                self._wraps.put(self._library, name, self._reading)
        for name in _RESETTERS:
            if hasattr(self._library, name):
                self._wraps.put(self._library, name, self._resetting)

    def remove(self) -> None:
        """Put torch's functions back; the script no longer sees peaks from before Lowtide's last reset."""
        self._wraps.undo()

    def allocated(self) -> tuple[int, int]:
        """Bytes allocated now, and their peak since the last reset."""
        found = self._read(self._index).get("allocated_bytes", {}).get("all", {})  # empty before the first allocation
        return int(found.get("current", 0)), int(found.get("peak", 0))

    def reset(self) -> None:
        """Begin a new window for Lowtide; the script's peaks are kept."""
        _raise_peaks(self._earlier, self._read(self._index))
        self._reset(self._index)

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Hide memory that is allocated and freed within the block (Lowtide's own) from the script's peaks."""
        _raise_peaks(self._earlier, self._read(self._index))
        try:
            yield
        finally:
            self._reset(self._index)

    def _reading(self, original: Any) -> Any:
        @functools.wraps(original)
        def read(index: int) -> Any:
            found = original(index)
            if index == self._index:
                _raise_peaks(found, self._earlier, add=False)
            return found

        return read

    def _resetting(self, original: Any) -> Any:
        @functools.wraps(original)
        def reset(index: int) -> Any:
            if index == self._index:
                self._before_reset()
                self._earlier = {}
            return original(index)

        return reset


def _raise_peaks(found: dict[Any, Any], other: dict[Any, Any], *, add: bool = True) -> None:
    """Raise every peak in nested statistics to the peak in others, where that one is higher.

    Args:
        found: the statistics to change, in place.
        other: the statistics to compare with.
        add: whether to add statistics that only ``other`` has.
    """
    for name, value in other.items():
        if isinstance(value, dict):
            inner = found.setdefault(name, {}) if add else found.get(name)
            if inner is not None:
                _raise_peaks(inner, value, add=add)
        elif name == "peak" and (add or name in found):
            found[name] = max(found.get(name, 0), value)
