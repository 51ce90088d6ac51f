"""A gradient or an optimizer state while it is offloaded."""

from __future__ import annotations

from typing import cast

import torch
from lowtide.runtime.device.offload import SlicedTicket, Ticket
from lowtide.runtime.storage.views import Meta, view_on
from lowtide.runtime.tensors import beneath_autograd
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
