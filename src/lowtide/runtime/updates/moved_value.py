"""A gradient or an optimizer state while it is offloaded, and what the memory optimizations that offload them share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import cast

import torch
from lowtide.runtime.device.offload import SlicedTicket, Ticket
from lowtide.runtime.monkeypatch import Wraps
from lowtide.runtime.storage.views import Meta, view_on
from lowtide.runtime.tensors import beneath_autograd
from lowtide.runtime.updates.gradient_access import Counts, KnownAddresses
from lowtide.runtime.updates.streamed_values import Place


class MovedValue:
    """Where a tensor's bytes are, and what view of its storage it is.

    Attributes:
        ticket: its place on the offload tier.
        meta: its view metadata.
        bytes: of its storage.
    """

    __slots__ = ("bytes", "meta", "ticket")

    def __init__(self, ticket: Ticket, meta: Meta, size: int) -> None:
        """Keep a ticket for ``size`` bytes."""
        self.ticket, self.meta, self.bytes = ticket, meta, size

    def fetch(self) -> torch.Tensor:
        """The tensor, resident again."""
        with beneath_autograd():
            return view_on(self.ticket.fetch(), self.meta)

    def place(self) -> Place:
        """Where the first element is, on a tier of sliced tickets."""
        return Place(cast("SlicedTicket", self.ticket), self.meta[2] * self.meta[3].itemsize)

    def own(self) -> None:
        """Make sure that the bytes may be overwritten.

        Raises:
            OSError: if that takes a copy for which the tier has no room.
        """
        self.ticket = cast("SlicedTicket", self.ticket).own()


class Offloading:
    """A memory optimization that offloads values, and has properties in their place that bring them back to who reads them.

    Attributes:
        engaged: whether values are offloaded.
        moved: number of values offloaded so far.
        lock: held while values leave or come back.
    """

    def __init__(
        self, put: Callable[[torch.UntypedStorage], Ticket | None], make_room: Callable[[int], object] = lambda _: None
    ) -> None:
        """Offload nothing yet.

        Args:
            put: offloads a storage's bytes; returns None if they stay, for example because the offload tier has no room.
            make_room: called with the bytes of a value that is about to come back.
        """
        self.engaged = False
        self.moved = 0
        self.lock = threading.RLock()
        self._put, self._make_room = put, make_room
        self._wraps = Wraps()
        self._addresses = KnownAddresses()
        self._unheld = Counts(0, 0, 0)

    def forked(self) -> None:
        """This process is a forked child: what it offloaded would overwrite the parent's bytes, whose file it shares."""
        self.engaged = False
