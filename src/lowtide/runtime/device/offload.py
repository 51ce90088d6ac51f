"""Interface of the offload tiers, which hold values moved out of a device's memory, and what they share.

The CPU's tier is a file (:mod:`.file_tier`); an accelerator's is pinned host memory (:mod:`.pinned_tier`).
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable
from typing import Final, Protocol, final, runtime_checkable

import torch

PROBE_BYTES: Final = 8 << 20
"""Bytes written and read to measure a tier's speed."""
PROBES: Final = 3
"""Timed copies of the probe in each direction."""


class Ticket(Protocol):
    """One value's place on an offload tier; dropping the last reference to the ticket releases the place."""

    def begin(self) -> None:
        """Allocate a block on the device and start the copy back, ahead of :meth:`fetch`."""

    def fetch(self) -> torch.UntypedStorage:
        """A new storage on the device with the value's bytes; it completes the copy that :meth:`begin` started, if any."""


@runtime_checkable
class SlicedTicket(Ticket, Protocol):
    """A ticket whose value can be read and written slice by slice, so that it need not be resident as a whole."""

    def read(self, at: int, target: torch.Tensor) -> None:
        """Read the value's bytes from byte ``at`` on into a contiguous uint8 tensor on the device.

        Raises:
            OSError: if the tier fails.
        """

    def write(self, at: int, source: torch.Tensor) -> None:
        """Write a contiguous uint8 tensor over the value's bytes from byte ``at`` on.

        Raises:
            OSError: if the tier fails.
        """

    def expect(self, at: int, size: int) -> None:
        """Announce that ``size`` bytes from byte ``at`` on will be read soon."""

    def own(self) -> SlicedTicket:
        """This ticket if its bytes may be overwritten, or a copy's: a forked child reads what there was when it was forked.

        Raises:
            OSError: if the tier has no room for a copy.
        """


@runtime_checkable
class SlicedTier(Protocol):
    """An offload tier all of whose tickets are sliced ones."""

    def empty(self, size: int) -> SlicedTicket:
        """A place for a value of ``size`` bytes, which are undefined until they are written.

        Raises:
            OSError: if the tier has no room.
        """


class OffloadTier(Protocol):
    """An offload tier of one device.

    Attributes:
        overlaps: whether copies run concurrently with the device's work.
    """

    overlaps: bool

    def put(self, storage: torch.UntypedStorage) -> Ticket:
        """Copy a storage's bytes to the tier; the caller may free the storage afterwards.

        Raises:
            OSError: if the tier has no room.
        """


@final
class Shared:
    """A ticket with several users: they get the same storage as long as any of them holds it."""

    def __init__(self, ticket: Ticket, room: Callable[[], object] | None = None) -> None:
        """Share ``ticket``; nothing has been fetched yet. ``room`` is called before bytes are allocated to fetch it."""
        self._ticket = ticket
        self._room = room
        self._there: weakref.ref[torch.UntypedStorage] | None = None

    def begin(self) -> None:
        """Start the copy back, unless a fetched storage is still alive."""
        if self._there is None or self._there() is None:
            self._ticket.begin()

    def fetch(self) -> torch.UntypedStorage:
        """The fetched storage if a user still holds it, otherwise a new one."""
        storage = None if self._there is None else self._there()
        if storage is None:
            if self._room is not None:
                self._room()
            storage = self._ticket.fetch()
            self._there = weakref.ref(storage)
        return storage


def flat(storage: torch.UntypedStorage) -> torch.Tensor:
    """A one-dimensional uint8 tensor over all bytes of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]


def fastest(copy: Callable[[], object]) -> float:
    """Bytes per second of a copy of the probe: the best of `PROBES` runs.

    A core that is busy elsewhere for a moment would make offloading look expensive. A value that is never offloaded is never
    timed again, whereas the first transfers correct a speed that was measured too high.
    """
    best = math.inf
    for _ in range(PROBES):
        start = time.perf_counter()
        copy()
        best = min(best, time.perf_counter() - start)
    return PROBE_BYTES / best
