"""What a unit that left its plan still holds, so that the evictor can make room there, too."""

from __future__ import annotations

from typing import Protocol, final

import torch
from lowtide.runtime.device.offload import Ticket
from lowtide.runtime.storage.value import Value


class Holder(Protocol):
    """A saved tensor, an anchor or a value that keeps a storage in memory."""

    @property
    def held(self) -> torch.Tensor | None:
        """The tensor by which it does; None if it does not, or must go on doing so."""

    def leave(self, ticket: Ticket) -> None:
        """Let go of the storage: ``ticket`` is the place of its bytes on the offload tier."""


class LeftPlan(Protocol):
    """A plan that the running unit has left."""

    def holders(self) -> dict[int, list[Holder]]:
        """By address, what holds a storage for autograd and replays and can leave it to the offload tier."""


@final
class HeldValue:
    """A value that the plan holds."""

    __slots__ = ("_value",)

    def __init__(self, value: Value) -> None:
        """Refer to the value."""
        self._value = value

    @property
    def held(self) -> torch.Tensor | None:
        """Lowtide's own reference to its bytes."""
        return self._value.tensor

    def leave(self, ticket: Ticket) -> None:
        """Let go of the bytes."""
        self._value.ticket, self._value.tensor = ticket, None
