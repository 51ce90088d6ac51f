"""Objects between two processes: pickled, their arrays through a piece of shared memory that is used again and again."""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import mmap
import os
import pickle
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any, Final, final

import cloudpickle

from lowtide.base.files import reserve, why
from lowtide.checkpoint.parts import random_state

_LEAST: Final = 1 << 20
_ALIGNED: Final = 64
"""Bytes to whose multiples arrays are aligned."""


@final
class Slot:
    """Shared memory that grows as needed: an unnamed file of the kernel's, which goes when both ends have."""

    def __init__(self, file: int | None = None) -> None:
        """Make one, or take the one that the other end made."""
        self.file = os.memfd_create("lowtide") if file is None else file
        self._map: mmap.mmap | None = None
        self._placed: list[tuple[int, int, int]] = []
        self._used = 0
        self._held = 0

    def room(self, size: int) -> mmap.mmap:
        """The memory, at least so large."""
        if self._map is None or len(self._map) < size:
            if os.fstat(self.file).st_size < size:
                with _named(size):
                    os.ftruncate(self.file, max(_LEAST, 1 << (size - 1).bit_length()))
            # What was mapped before goes with the last array on it: NumPy holds the mapping, but no buffer that keeps it open.
            self._map = mmap.mmap(self.file, os.fstat(self.file).st_size)
        return self._map

    def _own(self, size: int) -> mmap.mmap:
        """The memory, of which so much is there to be written: where there is none, writing would end the process.

        Raises:
            MemoryError: if there is none.
        """
        found = self.room(size)
        if size > self._held:
            with _named(size):
                reserve(self.file, size, since=self._held)
            self._held = size
        return found

    def begin(self) -> None:
        """What lies in it is of no use any more."""
        self._placed.clear()
        self._used = 0

    def array(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """A new array in it, which need not be copied to be sent."""
        import numpy as np  # readers of other things need none

        size, at = math.prod(shape) * np.dtype(dtype).itemsize, -(-self._used // _ALIGNED) * _ALIGNED
        made = np.ndarray(shape, dtype, buffer=self._own(at + size), offset=at)
        self._placed.append((made.ctypes.data, size, at))
        self._used = at + size
        return made

    def place(self, view: memoryview) -> int:
        """Where the bytes of a view lie; they are put there, if they do not yet."""
        address: int = getattr(view.obj, "__array_interface__", {}).get("data", (0,))[0]
        for start, size, at in self._placed:
            if start <= address and address + view.nbytes <= start + size:
                return at + address - start
        at = self._used
        room = self._own(at + view.nbytes)
        self._used = at + view.nbytes
        room[at : self._used] = view
        return at

    def lend(self, places: list[tuple[int, int]]) -> list[memoryview]:
        """What lies in it, piece by piece (where, bytes), as it is: who has a piece keeps it from being written again."""
        room = memoryview(self.room(max(at + size for at, size in places)))
        return [room[at : at + size] for at, size in places]

    def free(self) -> bool:
        """Whether nobody has a piece of it any more: only then can it be made another size, if only the one that it has."""
        if self._map is not None:
            try:
                self._map.resize(os.fstat(self.file).st_size)
            except BufferError:
                return False
        return True

    def close(self) -> None:
        """Give it back; arrays on it stay good for as long as they are held."""
        self._map = None
        file, self.file = self.file, -1  # once only: the number may be another file's by now
        if file >= 0:
            os.close(file)


@contextlib.contextmanager
def _named(size: int) -> Iterator[None]:
    """What the system says of memory that is shared sounds as if it were of a file or a connection."""
    try:
        yield
    except OSError as error:
        raise MemoryError(f"no room for {size} bytes of shared memory: {why(error)}") from None


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles tensors as arrays, so that they go through shared memory too."""

    def reducer_override(self, value: Any) -> Any:
        """How a value is made again."""
        torch = sys.modules.get("torch")
        if torch is not None and type(value) is torch.Tensor and _plain(torch, value):
            flat = value.contiguous().flatten().view(torch.uint8).numpy()
            return _tensor, (flat, str(value.dtype).removeprefix("torch."), tuple(value.shape))
        return super().reducer_override(value)


def _plain(torch: Any, value: Any) -> bool:
    """Whether a tensor is nothing but its numbers."""
    dense = value.device.type == "cpu" and value.layout is torch.strided and not value.is_quantized and value.numel() > 0
    return dense and not (value.requires_grad or value.is_conj() or value.is_neg())


def _tensor(flat: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    torch = importlib.import_module("torch")
    return torch.from_numpy(flat).view(getattr(torch, dtype)).reshape(shape)


def send(connection: Connection, slot: Slot | None, value: Any) -> None:
    """Send an object; without a slot its arrays go with it."""
    buffers: list[pickle.PickleBuffer] = []
    head = io.BytesIO()
    _Pickler(head, protocol=5, buffer_callback=None if slot is None else buffers.append).dump(value)
    places = []
    if slot is not None and buffers:
        views = [buffer.raw() for buffer in buffers]
        slot.room(sum(view.nbytes for view in views))
        places = [(slot.place(view), view.nbytes) for view in views]
    connection.send_bytes(pickle.dumps((places, head.getvalue())))


def fetch(connection: Connection, slot: Slot | None, *, lent: bool = False) -> tuple[bytes, list[Any]]:
    """What was sent, not unpickled yet: its arrays in memory of their own, or where they lie.

    Args:
        connection: to the other end.
        slot: in which it put the arrays.
        lent: whether they stay there; it must not be written again before it is `Slot.free`.

    Raises:
        EOFError: if the other end has gone.
    """
    places, head = pickle.loads(connection.recv_bytes())  # noqa: S301 - from our own process
    buffers: list[Any] = [] if slot is None or not places else slot.lend(places)
    return head, buffers if lent else list(map(bytearray, buffers))


def receive(connection: Connection, slot: Slot | None) -> Any:
    """An object.

    Raises:
        EOFError: if the other end has gone.
    """
    head, buffers = fetch(connection, slot)
    return pickle.loads(head, buffers=buffers)  # noqa: S301 - from our own process


def generators() -> dict[str, Any]:
    """The states of this process's generators on the host, torch's as an array."""
    found = random_state()
    found.pop("cuda", None)
    return {key: value.numpy() if key == "torch" else value for key, value in found.items()}
