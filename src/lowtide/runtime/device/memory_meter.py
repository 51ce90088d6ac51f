"""Interface of the memory meters: live and peak bytes of one device."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch


class Meter(ABC):
    """Counts the bytes of one device.

    The defaults suit a meter that cannot cap allocations and does not count libraries' memory separately.
    """

    exact: bool
    """Whether the meter counts memory that is allocated and freed within an operator."""

    capped: bool
    """Whether :meth:`cap` makes requests that would exceed the cap fail."""

    device: torch.device
    """The device whose bytes are counted."""

    @abstractmethod
    def live(self) -> int:
        """Bytes live now."""

    @abstractmethod
    def op_peak(self) -> int:
        """Peak bytes since :meth:`reset_op_peak`."""

    @abstractmethod
    def reset_op_peak(self) -> None:
        """Begin a new window for :meth:`op_peak`."""

    @abstractmethod
    def span_peak(self) -> int:
        """Peak bytes since :meth:`begin_span`."""

    @abstractmethod
    def begin_span(self) -> None:
        """Begin a new window for :meth:`span_peak`."""

    @abstractmethod
    def begin_operator(self) -> None:
        """Begin to observe an operator, in a new window for :meth:`op_peak`."""

    def end_operator(self) -> None:  # noqa: B027 - most meters count all the time
        """The observed operator has returned or failed. Call it in the thread that called :meth:`begin_operator`."""

    def cap(self, limit_bytes: int) -> None:  # noqa: B027
        """Cap the calling thread's allocations at ``limit_bytes`` live bytes; 0 lifts the cap."""

    def denied(self) -> int:
        """Number of requests refused so far."""
        return 0

    def denied_bytes(self) -> int:
        """Bytes of the last request refused."""
        return 0

    def begin_library_window(self) -> None:  # noqa: B027
        """Begin a new window for :meth:`library_rise`."""

    def library_rise(self) -> int:
        """Bytes by which the memory of libraries (workspaces, which cannot be refused) rose within the window."""
        return 0

    def library_live(self) -> int:
        """Bytes that libraries hold now."""
        return 0

    @abstractmethod
    def counts(self, storage: torch.UntypedStorage) -> bool:
        """Whether the meter counts a storage's bytes; memory that belongs to numpy or to a mapped file is not counted."""

    def close(self) -> None:  # noqa: B027
        """Stop counting and undo the meter's patches of torch."""
