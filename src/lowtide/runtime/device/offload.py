"""The second board: where values wait that are moved out of the device's memory, and what is common to all kinds of it.

For the CPU it is a file (:mod:`.file_tier`); for an accelerator it is pinned host memory (:mod:`.pinned_tier`).
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable
from typing import Final, Protocol, final

import torch

PROBE_BYTES: Final = 8 << 20
"""Bytes written and read to measure a board ..."""
PROBES: Final = 3
"""... so many times each way."""


class Ticket(Protocol):
    """One value's place on a second board; it is given back with the last reference to the ticket."""

    def begin(self) -> None:
        """Take a block on the device now, and let the copy run until :meth:`fetch` asks for it."""

    def fetch(self) -> torch.UntypedStorage:
        """A new storage on the device with the value's bytes: the one that was begun, if one was."""


class OffloadTier(Protocol):
    """A second board of one device.

    Attributes:
        overlaps: whether its copies run beside the device's work.
    """

    overlaps: bool

    def put(self, storage: torch.UntypedStorage) -> Ticket:
        """Copy a storage's bytes; the storage may be let go afterwards.

        Raises:
            OSError: if the board has no room.
        """


@final
class Shared:
    """A ticket for several who ask: they get the same storage while any of them has it."""

    def __init__(self, ticket: Ticket) -> None:
        """Nobody has it."""
        self._ticket = ticket
        self._there: weakref.ref[torch.UntypedStorage] | None = None

    def begin(self) -> None:
        """Begin to copy, unless it is there."""
        if self._there is None or self._there() is None:
            self._ticket.begin()

    def fetch(self) -> torch.UntypedStorage:
        """The storage that somebody has, or a new one."""
        storage = None if self._there is None else self._there()
        if storage is None:
            storage = self._ticket.fetch()
            self._there = weakref.ref(storage)
        return storage


def flat(storage: torch.UntypedStorage) -> torch.Tensor:
    """All bytes of a storage, as a tensor on it."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]


def fastest(copy: Callable[[], object]) -> float:
    """Bytes per second of a copy of the probe, at the best of several times.

    A core that is busy elsewhere for a moment would make moving look dear. What is never moved is never timed again, whereas
    what looks too cheap is set right by the first transfers.
    """
    best = math.inf
    for _ in range(PROBES):
        start = time.perf_counter()
        copy()
        best = min(best, time.perf_counter() - start)
    return PROBE_BYTES / best
