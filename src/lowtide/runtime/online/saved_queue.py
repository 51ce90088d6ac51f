"""Saved tensors of units whose operators are not recorded, in the order in which they were saved.

Without records nothing can be recomputed, so these tensors can only be offloaded. Backward asks first for what was saved last,
so what was saved first leaves first.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, Protocol, final

import torch
from lowtide.runtime.device.offload import Ticket
from lowtide.runtime.online.holders import Holder
from lowtide.runtime.online.lineage import held_alone
from lowtide.runtime.storage.arguments import PLAIN_TYPES

SMALL_BYTES: Final = 64 << 10
"""Storages below this size leave after all others: a transfer takes some 50 microseconds, whatever it moves."""


class Keeper(Holder, Protocol):
    """A saved tensor that keeps a storage in memory or, once it has left, has a ticket for its bytes."""

    tensor: torch.Tensor | None
    ticket: Ticket | None

    def unpack(self) -> torch.Tensor:
        """The tensor, fetched if it was offloaded."""

    def check(self) -> None:
        """Raise a RuntimeError if it was changed in place since it was saved, or fetched."""


@final
class Queued:
    """A storage, and the saved tensors that keep it; all of them weakly."""

    __slots__ = ("bytes", "keepers", "storage")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        """Begin without saved tensors."""
        self.bytes = storage.nbytes()
        self.storage: Callable[[], torch.UntypedStorage | None] = weakref.ref(storage)
        self.keepers: list[weakref.ref[Keeper]] = []

    def held(self) -> list[Holder]:
        """The saved tensors that keep the storage in memory and may leave it; not those that were given other data since."""
        storage = self.storage()
        found = [(kept, kept.held) for kept in self.alive()]
        return [kept for kept, held in found if held is not None and held.untyped_storage() is storage]

    def alive(self) -> list[Keeper]:
        """The saved tensors that autograd still holds."""
        return [kept for ref in self.keepers if (kept := ref()) is not None]


@final
class UnitInputs:
    """The storages that existed before a unit and that it was given.

    No plan moves these, and the reported floor counts them, so neither does the queue.
    """

    def __init__(self) -> None:
        """Begin without a unit."""
        self._storages: dict[int, Callable[[], torch.UntypedStorage | None]] = {}

    def clear(self) -> None:
        """A unit begins."""
        self._storages = {}

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Tensors are passed to the first root call; or the first is saved, where there is no root call."""
        for tensor in tensors:
            if type(tensor) not in PLAIN_TYPES:  # the loss may be given logits that are not computed yet
                continue
            with contextlib.suppress(NotImplementedError):  # a wrapper of torch.func has no storage
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = weakref.ref(storage)

    def has(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage is one of them."""
        found = self._storages.get(storage._cdata)
        return found is not None and found() is storage


@final
class SavedTensorQueue:
    """What can be offloaded of units whose operators are not recorded."""

    def __init__(self, move: Callable[[list[Holder]], int]) -> None:
        """Start empty.

        Args:
            move: offloads a storage, given all saved tensors that keep it, if nothing else does; returns the bytes freed, 0 if
                something else keeps it, -1 if the offload tier has no room.
        """
        self._move = move
        self._by_address: dict[int, Queued] = {}
        self._large: deque[Queued] = deque()
        self._small: deque[Queued] = deque()
        self._offloaded: list[Queued] = []

    def there_bytes(self) -> int:
        """Bytes in memory that only these saved tensors hold."""
        keepers = (kept for saved in (*self._large, *self._small) for kept in saved.held())
        return sum(storage.nbytes() for storage, _ in held_alone(keepers))

    def away_bytes(self) -> int:
        """Bytes that were offloaded and that autograd may still ask for."""
        return sum({
            id(kept.ticket): saved.bytes for saved in self._offloaded for kept in saved.alive() if kept.tensor is None
        }.values())

    def add(self, kept: Keeper, storage: torch.UntypedStorage) -> Queued:
        """Autograd saved a tensor on a storage; returns what keeps that storage."""
        found = self._by_address.get(storage._cdata)
        if found is None or found.storage() is not storage:  # another storage may have had the address before
            found = self._by_address[storage._cdata] = Queued(storage)
            (self._large if storage.nbytes() >= SMALL_BYTES else self._small).append(found)
        found.keepers.append(weakref.ref(kept))
        return found

    def fetch(self, kept: Keeper, queued: Queued) -> Queued:
        """Bring a saved tensor back that had left, with all others on its storage; returns what keeps the new storage.

        All of them hold it, as in a run without Lowtide: autograd adds in place to a gradient that nothing else holds, and one
        of the saved tensors may be that gradient.
        """
        ticket, storage = kept.ticket, kept.unpack().untyped_storage()
        found = self.add(kept, storage)
        for other in queued.alive():
            if other is not kept and other.tensor is None and other.ticket is ticket:
                other.unpack()
                found.keepers.append(weakref.ref(other))
        return found

    def move(self, needed: int) -> int:
        """Offload ``needed`` bytes if possible; returns the bytes freed."""
        freed = self._move_some(self._large, needed)
        return freed if freed >= needed else freed + self._move_some(self._small, needed - freed)

    def _move_some(self, queue: deque[Queued], needed: int) -> int:
        """Offload from one queue. What something else keeps too stays in the queue, behind the others."""
        freed = 0
        for _ in range(len(queue)):
            if freed >= needed:
                break
            saved = queue.popleft()
            held = saved.held()
            if not held:
                continue  # autograd has released all
            size = self._move(held)
            freed += max(0, size)
            (self._offloaded if size > 0 else queue).append(saved)
            if size < 0:
                break
        return freed

    def forget_the_dead(self) -> None:
        """Drop what nothing keeps any more; called between units."""
        self._by_address = {address: saved for address, saved in self._by_address.items() if saved.alive()}
        self._offloaded = [saved for saved in self._offloaded if saved.alive()]
        self._large = deque(saved for saved in self._large if saved.alive())
        self._small = deque(saved for saved in self._small if saved.alive())
