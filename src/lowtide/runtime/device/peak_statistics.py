"""Peak counters of an accelerator's caching allocator, used by Lowtide without changing what the script reads from them.

The allocator has one high-water mark per statistic, and whoever measures a window has to reset it. Resets of ours would change
what the script's own ``torch.cuda.max_memory_allocated()`` returns, so the peaks up to each of them are kept here, and the
script's reads get the higher of the two. The functions replaced are those of ``torch._C`` that ``torch.cuda`` and
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
    """The peak statistics of one device, shared with the script.

    Example:
        >>> statistics = PeakStatistics(0, before_reset=lambda: None)
        >>> statistics.install()
        >>> statistics.reset()  # the script's max_memory_allocated() stays what it was
        >>> statistics.remove()
    """

    def __init__(
        self, index: int, before_reset: Callable[[], None], library: Any = torch._C, *, kind: str = "cuda"
    ) -> None:
        """Read a device's statistics; nothing is replaced yet.

        Args:
            index: of the device.
            kind: of the device, as ``torch.device.type``.
            before_reset: called before a reset of the script's own, which loses the current window's peak.
            library: where the allocator's functions are; tests give their own.
        """
        self._index = index
        self._before_reset = before_reset
        self._library = library
        read, reset = _FUNCTIONS.get(kind, _FUNCTIONS_OF_OTHERS)
        self._read, self._reset = getattr(library, read), getattr(library, reset)
        self._earlier: dict[Any, Any] = {}
        self._wraps = Wraps()

    def install(self) -> None:
        """Give the script its own peaks from here on."""
        for name in _READERS:
            if hasattr(self._library, name):
                self._wraps.put(self._library, name, self._reading)
        for name in _RESETTERS:
            if hasattr(self._library, name):
                self._wraps.put(self._library, name, self._resetting)

    def remove(self) -> None:
        """Put torch's functions back; peaks from before the last reset are lost to the script from here on."""
        self._wraps.undo()

    def allocated(self) -> tuple[int, int]:
        """Bytes allocated now, and the most since the last reset."""
        found = self._read(self._index).get("allocated_bytes", {}).get("all", {})  # empty before the first allocation
        return int(found.get("current", 0)), int(found.get("peak", 0))

    def reset(self) -> None:
        """Begin another window of ours."""
        _raise_peaks(self._earlier, self._read(self._index))
        self._reset(self._index)

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """What is allocated and freed meanwhile is Lowtide's own: the script's peaks do not show it."""
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
    """Raise every peak in nested statistics to the other's, where that is higher.

    Args:
        found: what is changed.
        other: what it is compared with.
        add: whether statistics that are only in the other are added.
    """
    for name, value in other.items():
        if isinstance(value, dict):
            inner = found.setdefault(name, {}) if add else found.get(name)
            if inner is not None:
                _raise_peaks(inner, value, add=add)
        elif name == "peak" and (add or name in found):
            found[name] = max(found.get(name, 0), value)
