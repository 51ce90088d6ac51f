"""One interface for CUDA, XPU and MPS accelerators, which also reports what a device lacks.

Built on ``torch.accelerator`` and the device's own module (``torch.get_device_module``: ``torch.cuda``, ``torch.xpu``,
``torch.mps``). Nothing else in Lowtide names a kind of accelerator.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Final, final

import torch

HOST: Final = torch.device("cpu")
"""The device of tensors that are on no accelerator."""
_NO_ACCELERATOR: Final = frozenset({"cpu", "meta"})


def is_accelerator(device: torch.device) -> bool:
    """Whether a device has memory of its own."""
    return device.type not in _NO_ACCELERATOR


def counted_device_of(tensors: Iterable[torch.Tensor]) -> torch.device | None:
    """The device of the first tensor on an accelerator; None if there is no such tensor or the device counts no peaks."""
    if in_use() is None:
        return None
    found = next((t.device for t in tensors if is_accelerator(t.device)), None)
    return found if found is not None and Accelerator(found).counts_peaks else None


def is_there() -> bool:
    """Whether the machine has an accelerator that torch can use."""
    return torch.accelerator.is_available()


def in_use() -> Accelerator | None:
    """The process's accelerator if the script has initialized it, otherwise None; this call does not initialize it."""
    kind = torch.accelerator.current_accelerator()
    if kind is None:
        return None
    module = torch.get_device_module(kind)
    begun = getattr(module, "is_initialized", module.is_available)  # MPS has no such state
    return Accelerator(kind) if begun() else None


def current() -> Accelerator:
    """The process's accelerator.

    Raises:
        RuntimeError: if there is none.
    """
    kind = torch.accelerator.current_accelerator()
    if kind is None:
        raise RuntimeError("this torch has no accelerator")
    return Accelerator(kind)


def default_generators() -> list[torch.Generator]:
    """The host's default random generator, and those of the devices if the script has initialized them."""
    found = in_use()
    return [torch.default_generator, *([] if found is None else found.generators())]


@final
class Accelerator:
    """One accelerator.

    Attributes:
        device: the device, with its index.

    Example:
        >>> found = in_use()
        >>> None if found is None else found.free_bytes()
    """

    def __init__(self, device: torch.device, module: Any = None) -> None:
        """Find a device's module.

        Args:
            device: an accelerator; without an index, the current one of its kind.
            module: the device's module; None for torch's, tests pass their own.
        """
        self._module = torch.get_device_module(device) if module is None else module
        current = getattr(self._module, "current_device", lambda: 0)  # MPS has one device and no `current_device`
        self.device = torch.device(device.type, current() if device.index is None else device.index)

    # --- memory ------------------------------------------------------------------------------------------------------

    @property
    def counts_peaks(self) -> bool:
        """Whether the device's allocator counts peaks; MPS's does not."""
        return hasattr(self._module, "memory_stats") and hasattr(self._module, "reset_peak_memory_stats")

    def statistics(self) -> dict[str, Any]:
        """The caching allocator's statistics by torch's names; empty if it counts no peaks."""
        return dict(self._module.memory_stats(self.device)) if self.counts_peaks else {}

    def allocated_bytes(self) -> int:
        """Bytes that tensors occupy on the device."""
        return int(self._module.memory_allocated(self.device))

    def free_bytes(self) -> int:
        """Free bytes of the device, available to any process."""
        free, _ = self._module.mem_get_info(self.device)
        return int(free)

    def idle_bytes(self) -> int:
        """Bytes that torch's allocator has reserved and no tensor uses."""
        return int(self._module.memory_reserved(self.device)) - self.allocated_bytes()

    def limit(self, size: int) -> None:
        """Make torch's allocator refuse requests beyond ``size`` bytes in total, by setting the process's share of memory."""
        total = self._module.get_device_properties(self.device).total_memory
        self._module.set_per_process_memory_fraction(min(1.0, size / total), self.device)

    def empty_cache(self) -> None:
        """Return reserved memory that no tensor uses to the device."""
        self._module.empty_cache()

    # --- streams -----------------------------------------------------------------------------------------------------

    def stream(self) -> Any:
        """A new stream."""
        return self._module.Stream(self.device)

    def current_stream(self) -> Any:
        """The stream on which operators run now."""
        return self._module.current_stream(self.device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Context manager: operators within it run on ``stream``."""
        return self._module.stream(stream)  # type: ignore[no-any-return]

    def event(self) -> Any:
        """A new event."""
        return self._module.Event()

    def synchronize(self) -> None:
        """Wait until the device has finished all work queued so far."""
        self._module.synchronize(self.device)

    # --- generators --------------------------------------------------------------------------------------------------

    def generators(self) -> tuple[Any, ...]:
        """The default random generators of all devices of its kind; empty if torch does not expose them (MPS)."""
        return tuple(getattr(self._module, "default_generators", None) or ())

    def generator(self) -> Any:
        """The device's default random generator; None if torch does not expose it (MPS)."""
        found = self.generators()
        return found[self.device.index] if found else None
