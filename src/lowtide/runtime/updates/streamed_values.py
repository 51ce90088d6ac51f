"""Gradients and optimizer states as seen slice by slice: what is offloaded is read into a buffer, and written back from it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, Protocol, final

import torch
from lowtide.runtime.device.accelerator import HOST
from lowtide.runtime.device.offload import SlicedTicket
from lowtide.runtime.tensors import beneath_autograd, is_dense

SLICE_BYTES: Final = 1 << 20
"""Bytes of a parameter that are updated at a time (chosen so that all that an update touches stays in the core's cache)."""

_DATA: Any = torch._C.TensorBase.data


def flat_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor in the order of its storage, as a one-dimensional view with a version of its own."""
    with beneath_autograd():
        return torch.as_strided(_DATA.__get__(tensor), (tensor.numel(),), (1,))


def can_be_sliced(tensor: torch.Tensor) -> bool:
    """Whether slices of a tensor's storage are slices of the tensor."""
    return tensor.dtype in (torch.float32, torch.float64) and is_dense(tensor) and tensor.numel() > 0


@final
class Buffers:
    """Memory for the slices in use: one buffer for each value that an update reads, used again for the next slice."""

    def __init__(self, make_room: Callable[[int], object]) -> None:
        """Allocate nothing yet; ``make_room`` is called with the bytes that are about to be allocated."""
        self._make_room = make_room
        self._buffers: dict[int, torch.Tensor] = {}

    def take(self, number: int, size: int) -> torch.Tensor:
        """The first ``size`` bytes of a buffer, as uint8; what it had may be lost."""
        buffer = self._buffers.get(number)
        if buffer is None or buffer.nbytes < size:
            buffer = None
            self._buffers.pop(number, None)
            self._make_room(size)
            with beneath_autograd():
                buffer = self._buffers[number] = torch.empty(size, dtype=torch.uint8, device=HOST)
        with beneath_autograd():
            return buffer[:size]


class Sliced(Protocol):
    """A value of as many elements as the parameter: its gradient, or a state."""

    def read(self, start: int, end: int) -> torch.Tensor:
        """Elements from ``start`` to ``end``; valid until the next call."""

    def write(self, start: int, new: torch.Tensor) -> None:
        """Elements from ``start`` on are now ``new``, which is usually what :meth:`read` returned, written to."""


@final
class Resident:
    """A value in memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """Look at a dense tensor."""
        self._flat = flat_of(tensor)

    def read(self, start: int, end: int) -> torch.Tensor:
        """A view."""
        with beneath_autograd():
            return self._flat[start:end]

    def write(self, start: int, new: torch.Tensor) -> None:
        """Copy, unless ``new`` is a view of this value."""
        with beneath_autograd():
            own = self._flat[start : start + new.numel()]
            if own.untyped_storage()._cdata != new.untyped_storage()._cdata or own.storage_offset() != new.storage_offset():
                own.copy_(new)


@final
class SliceReader:
    """Reads and writes slices of what is offloaded.

    Attributes:
        buffers: memory for the slices in use.
    """

    def __init__(self, make_room: Callable[[int], object], transferred: Callable[[float, int], object]) -> None:
        """Read nothing yet.

        Args:
            make_room: called with the bytes of a buffer that is about to be allocated.
            transferred: called with the seconds of each transfer, and with the bytes that it wrote.
        """
        self.buffers = Buffers(make_room)
        self._transferred = transferred

    def read(self, ticket: SlicedTicket, at: int, target: torch.Tensor) -> None:
        """Read from a ticket's byte ``at`` on, and announce what follows."""
        start = time.perf_counter()
        ticket.read(at, target)
        ticket.expect(at + target.nbytes, target.nbytes)
        self._transferred(time.perf_counter() - start, 0)

    def write(self, ticket: SlicedTicket, at: int, source: torch.Tensor) -> None:
        """Write from a ticket's byte ``at`` on."""
        start = time.perf_counter()
        ticket.write(at, source)
        self._transferred(time.perf_counter() - start, source.nbytes)


@dataclass(frozen=True, slots=True)
class Place:
    """A value's place on the offload tier: a ticket, and at which byte of it the first element is."""

    ticket: SlicedTicket
    at: int


@final
class Offloaded:
    """A value on the offload tier, one slice of which at a time is in a buffer.

    A signal's handler, or another thread, may bring the value back or offload it anew at any moment.
    """

    def __init__(
        self, reader: SliceReader, number: int, where: Callable[[], Place | torch.Tensor], dtype: torch.dtype,
        lock: AbstractContextManager[object],
    ) -> None:
        """Read nothing yet.

        Args:
            reader: reads and writes tickets.
            number: of the buffer, which no other value in use may have.
            where: the value's place now, or the value if it is resident by now.
            dtype: type of its elements.
            lock: held while no other thread can bring it back.
        """
        self._reader, self._number, self._where, self._dtype, self._lock = reader, number, where, dtype, lock

    def read(self, start: int, end: int) -> torch.Tensor:
        """A copy in the buffer."""
        with self._lock:
            place = self._where()
            if not isinstance(place, Place):
                return Resident(place).read(start, end)
            buffer = self._reader.buffers.take(self._number, (end - start) * self._dtype.itemsize)
            self._reader.read(place.ticket, place.at + start * self._dtype.itemsize, buffer)
        with beneath_autograd():
            return buffer.view(self._dtype)

    def write(self, start: int, new: torch.Tensor) -> None:
        """Write to the tier, or where the value is now."""
        with beneath_autograd():
            source = new.contiguous().view(torch.uint8)
        with self._lock:
            now = self._where()
            while True:
                if isinstance(now, Place):
                    self._reader.write(now.ticket, now.at + start * self._dtype.itemsize, source)
                else:
                    Resident(now).write(start, new)
                written, now = now, self._where()
                if _is_same(written, now):  # no handler has moved it before it was written
                    return


def _is_same(a: Place | torch.Tensor, b: Place | torch.Tensor) -> bool:
    if isinstance(a, Place) and isinstance(b, Place):
        return a.ticket is b.ticket
    return a is b
