"""Meters: live and peak bytes of a device, behind one interface."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch


class Meter(ABC):
    """Bytes of one device; what is defined here is what a meter does that cannot cap, or does not see libraries apart."""

    exact: bool
    """Whether memory inside operators is seen."""

    capped: bool
    """Whether :meth:`cap` makes a request that would cross it fail."""

    device: torch.device
    """Whose bytes are counted."""

    @abstractmethod
    def live(self) -> int:
        """Bytes live now."""

    @abstractmethod
    def op_peak(self) -> int:
        """Highest point since :meth:`reset_op_peak`."""

    @abstractmethod
    def reset_op_peak(self) -> None:
        """Begin a new window for :meth:`op_peak`."""

    @abstractmethod
    def span_peak(self) -> int:
        """Highest point since :meth:`begin_span`."""

    @abstractmethod
    def begin_span(self) -> None:
        """Begin a new window for :meth:`span_peak`."""

    @abstractmethod
    def begin_operator(self) -> None:
        """An operator begins that is observed, in a window of its own for :meth:`op_peak`."""

    def end_operator(self) -> None:  # noqa: B027 - most count at all times
        """It ended, or failed; in the thread that began it."""

    def cap(self, limit_bytes: int) -> None:  # noqa: B027
        """Cap the calling thread; 0 lifts the cap."""

    def denied(self) -> int:
        """How many requests were refused so far."""
        return 0

    def denied_bytes(self) -> int:
        """Size of the last request refused."""
        return 0

    def begin_library_window(self) -> None:  # noqa: B027
        """Begin a new window for :meth:`library_rise`."""

    def library_rise(self) -> int:
        """How far the bytes that cannot be refused (workspaces of libraries) rose in the window."""
        return 0

    def library_live(self) -> int:
        """How many such bytes are live now: what libraries keep."""
        return 0

    @abstractmethod
    def counts(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage's bytes are among those counted: memory of numpy or of a file is not."""

    def close(self) -> None:  # noqa: B027
        """Count no more: what was changed in torch for it is put back."""
