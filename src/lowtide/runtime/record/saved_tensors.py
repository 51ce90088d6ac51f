"""Saved-tensor hooks: what autograd keeps in place of the tensors that it saves, and how they are unpacked."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol, final

import torch
from lowtide.runtime import gate
from lowtide.runtime.device.offload import Ticket
from lowtide.runtime.intercept.data_swaps import Origin
from lowtide.runtime.online.eviction import Evictor
from lowtide.runtime.online.saved_queue import Queued, UnitInputs
from lowtide.runtime.storage.arguments import NO_DISPATCH, PLAIN_TYPES
from lowtide.runtime.storage.ledger import Ledger
from lowtide.runtime.storage.value import Value
from lowtide.runtime.storage.views import Meta, meta_of, version_probe, view_on, view_watched
from lowtide.runtime.tensors import beneath_autograd, node_of, on_storage


def modified_in_place(meta: Meta, found: int, expected: int) -> RuntimeError:
    """The error that autograd raises if a saved tensor was changed in place; saved-tensor hooks disable its own check.

    Args:
        meta: view metadata of the saved tensor.
        found: its version now.
        expected: its version when it was saved.
    """
    size, _, _, dtype, *_ = meta
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{dtype} {list(size)}] is at version {found}; expected version {expected} instead. Hint: enable anomaly "
        "detection to find the operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True)."
    )


class Packed(Protocol):
    """What a pack hook gave autograd in place of a tensor."""

    def unpack(self) -> torch.Tensor:
        """The tensor."""


@final
class Kept:
    """A saved tensor that Lowtide keeps: in memory or, after :meth:`leave`, on the offload tier."""

    __slots__ = ("__weakref__", "data", "leaf", "meta", "origin", "tensor", "ticket", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        """Hold a tensor: a parameter itself, any other detached.

        A detached alias does not keep autograd's graph alive, and counts as an owner of its own beside the script's tensor,
        its views and its base. Data is given back as the script's own tensor while that lives. Where an alias would not do
        (other types, inference tensors, attributes of the script's), the tensor itself stays for good.
        """
        self.leaf = node_of(tensor) is None and (tensor.requires_grad or not _has_alias(tensor))
        self.data = not self.leaf and not tensor.requires_grad
        self.tensor: torch.Tensor | None = None
        self._show(tensor)
        self.origin = None if self.leaf else Origin.of(tensor, self)
        self.version = -1 if tensor.is_inference() else tensor._version
        self.ticket: Ticket | None = None
        self.meta: Meta | None = None

    @property
    def held(self) -> torch.Tensor | None:
        """The tensor, if it may be offloaded; None for one that must stay the same object."""
        return None if self.leaf else self.tensor

    def leave(self, ticket: Ticket) -> None:
        """Drop the tensor; ``ticket`` is the place of its bytes on the offload tier."""
        assert self.tensor is not None
        if self.origin is None:
            self.origin = Origin.of(self.tensor, self)
        self.meta = meta_of(self.tensor)
        self.ticket = ticket
        self.tensor = None

    def exchanged(self, tensor: torch.Tensor) -> None:
        """Keep the new data after an assignment to the saved tensor's ``.data``."""
        self.ticket = None
        self._show(tensor)

    def _show(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor if self.leaf else detached(tensor)

    def unpack(self) -> torch.Tensor:
        """The tensor, fetched if it was offloaded.

        Raises:
            RuntimeError: if it was changed in place since it was saved.
        """
        if self.tensor is None:
            assert self.ticket is not None
            assert self.meta is not None
            with beneath_autograd():
                self.tensor = view_on(self.ticket.fetch(), self.meta)
            self.version = self.tensor._version
        self.check()
        its_own = self.origin() if self.data and self.origin is not None else None
        return self.tensor if its_own is None else its_own

    def check(self) -> None:
        """Raise a RuntimeError if the tensor is in memory and was changed in place since it was saved, or fetched."""
        if self.tensor is not None and self.version >= 0 and self.tensor._version != self.version:
            raise modified_in_place(meta_of(self.tensor), self.tensor._version, self.version)


class _Awaited:
    """A handle that counts as awaited until a backward has asked for it, or none can any more."""

    __slots__ = ("__weakref__", "asked", "saver")

    def __init__(self, saver: SavedTensors) -> None:
        self.saver = saver
        self.asked = False
        saver.awaited += 1

    def _met(self) -> None:
        """Count the handle as no longer awaited."""
        if not self.asked:
            self.asked = True
            self.saver.awaited -= 1


@final
class Handle(_Awaited):
    """A saved tensor whose value may be evicted."""

    __slots__ = ("instead", "meta", "origin", "value", "version", "watched")

    def __init__(self, saver: SavedTensors, value: Value, tensor: torch.Tensor) -> None:
        """Refer to the value; of the tensor itself, only the version counter is watched, and no bytes are held."""
        super().__init__(saver)
        self.value = value
        self.meta: Meta = meta_of(tensor)
        self.watched = version_probe(tensor)
        self.version = tensor._version
        self.origin = Origin.of(tensor, self)
        self.instead: torch.Tensor | None = None

    def __del__(self) -> None:
        """Release the value: autograd has released the saved tensor."""
        self._met()
        if self.instead is None:
            self.saver.released(self.value.latest())

    def exchanged(self, tensor: torch.Tensor) -> None:
        """Keep the new data after an assignment to the tensor's ``.data``: backward no longer needs the old value here."""
        if self.instead is None:
            self.saver.released(self.value.latest())
        self.instead = detached(tensor)

    def unpack(self) -> torch.Tensor:
        """The tensor, recomputed or fetched if its value was evicted.

        Raises:
            RuntimeError: if it was changed in place since it was saved.
        """
        if self.watched._version != self.version:
            raise modified_in_place(self.meta, self.watched._version, self.version)
        self._met()
        if self.instead is not None:
            return self.instead
        storage = self.saver.ask(self.value.latest())
        return view_watched(self.watched, storage, self.meta)


@final
class QueuedHandle(_Awaited):
    """A saved tensor of a unit whose operators are not recorded: it can be offloaded."""

    __slots__ = ("kept", "queued")

    def __init__(self, saver: SavedTensors, kept: Kept, queued: Queued) -> None:
        """Keep the tensor, in memory for now."""
        super().__init__(saver)
        self.kept, self.queued = kept, queued
        saver.outstanding += 1

    def __del__(self) -> None:
        """Autograd has released the saved tensor."""
        self._met()
        self.saver.outstanding -= 1

    def unpack(self) -> torch.Tensor:
        """The tensor, fetched if it was offloaded; it can be offloaded again, as another backward may ask for it later.

        Raises:
            RuntimeError: if it was changed in place since it was saved.
        """
        self._met()
        if self.kept.tensor is None:
            evictor = self.saver.evictor
            start = time.perf_counter()
            self.queued = evictor.queue.fetch(self.kept, self.queued)
            evictor.tally.offload_seconds += time.perf_counter() - start
        for other in self.queued.alive():
            if other.ticket is not None:  # those that were fetched have versions of their own
                other.check()
        return self.kept.unpack()


@final
class SavedTensors:
    """Saved-tensor hooks of the full interception.

    Attributes:
        keep_only: whether every tensor is packed as a :class:`Kept`, so that its value cannot be evicted.
        queue_only: whether operators leave no records, so that saved tensors can be offloaded, but not recomputed.
        inputs: what existed before the running unit and was given to it: it stays in memory.
        outstanding: number of handles that autograd holds.
        awaited: number of these that no backward has asked for yet.
    """

    def __init__(self, ledger: Ledger, evictor: Evictor) -> None:
        """Share the runtime's ledger and evictor."""
        self.ledger = ledger
        self.evictor = evictor
        self.keep_only = False
        self.queue_only = False
        self.inputs = UnitInputs()
        self.outstanding = 0
        self.awaited = 0
        self.on_first: Callable[[], Callable[[torch.Tensor], Any] | None] | None = None

    def pack(self, tensor: torch.Tensor) -> Any:
        """The object that autograd keeps in the tensor's place (pack hook)."""
        if self.keep_only:
            return Kept(tensor)
        if not self.evictor.recorder.active and self.on_first is not None:
            instead = self.on_first()
            if self.evictor.recorder.active:
                self.inputs.add((tensor,))
            if instead is not None:
                return instead(tensor)
        followed = _followed(tensor) and tensor.device == self.evictor.meter.device  # the budget limits no other device
        if followed and self.queue_only:
            return self._queue(tensor)
        value = self.ledger.find(tensor.untyped_storage()) if followed else None
        if value is None or not self._ours(value) or _is_marked(tensor):
            if self.evictor.recorder.active:
                self.evictor.recorder.packed(-1)
            return Kept(tensor)
        return self._handle(value, tensor, tensor.untyped_storage())

    def _ours(self, value: Value) -> bool:
        """Whether a value may be evicted: it can be recomputed, or was made within this unit and can be offloaded."""
        if value.record is not None and not value.tainted:
            return True
        recorder = self.evictor.recorder
        return value.unit is recorder and recorder.lives[value.number].counted

    def _handle(self, value: Value, tensor: torch.Tensor, storage: torch.UntypedStorage) -> Handle:
        handle = Handle(self, value, tensor)
        self.outstanding += 1
        self.evictor.saved(value, storage)
        self.evictor.recorder.saved(value)
        return handle

    def _queue(self, tensor: torch.Tensor) -> Kept | QueuedHandle:
        kept, storage = Kept(tensor), tensor.untyped_storage()
        if kept.held is None or not self.evictor.meter.counts(storage):  # memory of others may be written unseen
            return kept
        if kept.data and self.inputs.has(storage):
            return kept
        return QueuedHandle(self, kept, self.evictor.queue.add(kept, storage))

    def unpack(self, packed: Packed) -> torch.Tensor:
        """The tensor that autograd gets back (unpack hook)."""
        return packed.unpack()

    def ask(self, value: Value) -> torch.UntypedStorage:
        """Record that backward asks for a value; return its storage, recomputed or fetched if the value was evicted."""
        self.evictor.recorder.need(value)
        storage = self.evictor.resident(value)
        self.evictor.recorder.begin_window()  # the plain run has no replays
        return storage

    def released(self, value: Value) -> None:
        """Record that autograd released one saved tensor of a value."""
        self.outstanding -= 1
        self.evictor.released(value)
        self.evictor.recorder.released(value)


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """A detached alias that shares the tensor's version counter, made without dispatch modes seeing it.

    A tensor subclass with its own ``__torch_dispatch__`` makes the alias itself.
    """
    if type(tensor).__torch_dispatch__ is not NO_DISPATCH:
        with torch._C.DisableTorchFunctionSubclass():
            return tensor.detach()
    return gate.detached(tensor)


def _has_alias(tensor: torch.Tensor) -> bool:
    """Whether a detached alias stands for a tensor in all that a script can see."""
    return type(tensor) in PLAIN_TYPES and on_storage(tensor) and not tensor.is_inference() and not _is_marked(tensor)


def _is_marked(tensor: torch.Tensor) -> bool:
    """Whether a tensor is data with attributes of the script's, which autograd gives back with it."""
    return node_of(tensor) is None and bool(tensor.__dict__)


def _followed(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in PLAIN_TYPES
        and on_storage(tensor)
        and not tensor.is_inference()
        and tensor.device.type != "meta"
    )
