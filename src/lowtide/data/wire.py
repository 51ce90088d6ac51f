"""Sends objects between two processes: pickled, with their arrays in shared memory that is reused."""

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
"""Arrays start at multiples of this many bytes."""


@final
class Slot:
    """Shared memory that grows as needed: an unnamed file (``memfd_create``), which goes when both ends have closed it."""

    def __init__(self, file: int | None = None) -> None:
        """Create one, or take over the descriptor of the one that the other end created."""
        self.file = os.memfd_create("lowtide") if file is None else file
        self._map: mmap.mmap | None = None
        self._placed: list[tuple[int, int, int]] = []
        self._used = 0
        self._held = 0

    def room(self, size: int) -> mmap.mmap:
        """The mapping, at least ``size`` bytes long."""
        if self._map is None or len(self._map) < size:
            if os.fstat(self.file).st_size < size:
                with _named(size):
                    os.ftruncate(self.file, max(_LEAST, 1 << (size - 1).bit_length()))
            # The last array on the old mapping frees it: NumPy references the mapping, but exports no buffer that pins it.
            self._map = mmap.mmap(self.file, os.fstat(self.file).st_size)
        return self._map

    def _own(self, size: int) -> mmap.mmap:
        """The mapping, with its first ``size`` bytes reserved: a write to memory that the system lacks would kill the process.

        Raises:
            MemoryError: if the system has no room for them.
        """
        found = self.room(size)
        if size > self._held:
            with _named(size):
                reserve(self.file, size, since=self._held)
            self._held = size
        return found

    def begin(self) -> None:
        """Discard the contents, and place new arrays from the beginning."""
        self._placed.clear()
        self._used = 0

    def array(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """A new array in the slot, which `send` need not copy."""
        import numpy as np  # not needed to read data without arrays

        size, at = math.prod(shape) * np.dtype(dtype).itemsize, -(-self._used // _ALIGNED) * _ALIGNED
        made = np.ndarray(shape, dtype, buffer=self._own(at + size), offset=at)
        self._placed.append((made.ctypes.data, size, at))
        self._used = at + size
        return made

    def place(self, view: memoryview) -> int:
        """Offset of a view's bytes in the slot; copies them there unless they are there already."""
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
        """Views of the pieces at ``places`` (offset, bytes), without a copy; the slot is not `free` while one is alive."""
        room = memoryview(self.room(max(at + size for at, size in places)))
        return [room[at : at + size] for at, size in places]

    def free(self) -> bool:
        """Whether no view from `lend` is alive: `mmap` refuses any resize, even to its own size, while one is."""
        if self._map is not None:
            try:
                self._map.resize(os.fstat(self.file).st_size)
            except BufferError:
                return False
        return True

    def close(self) -> None:
        """Close the file; arrays on the mapping stay valid as long as they are referenced."""
        self._map = None
        file, self.file = self.file, -1  # close only once: the descriptor may be another file's by now
        if file >= 0:
            os.close(file)


@contextlib.contextmanager
def _named(size: int) -> Iterator[None]:
    """Turn an OSError into a MemoryError: the system's own text would point to a file or a connection, not to memory."""
    try:
        yield
    except OSError as error:
        raise MemoryError(f"no room for {size} bytes of shared memory: {why(error)}") from None


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles tensors as arrays, so that they go through shared memory too."""

    def reducer_override(self, value: Any) -> Any:
        """Reduce a plain tensor to an array; leave other values to cloudpickle."""
        torch = sys.modules.get("torch")
        if torch is not None and type(value) is torch.Tensor and _plain(torch, value):
            flat = value.contiguous().flatten().view(torch.uint8).numpy()
            return _tensor, (flat, str(value.dtype).removeprefix("torch."), tuple(value.shape))
        return super().reducer_override(value)


def _plain(torch: Any, value: Any) -> bool:
    """Whether bytes, dtype and shape describe a tensor: strided, on the CPU, not empty; not quantized, grad, conj or neg."""
    dense = value.device.type == "cpu" and value.layout is torch.strided and not value.is_quantized and value.numel() > 0
    return dense and not (value.requires_grad or value.is_conj() or value.is_neg())


def _tensor(flat: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    torch = importlib.import_module("torch")
    return torch.from_numpy(flat).view(getattr(torch, dtype)).reshape(shape)


def send(connection: Connection, slot: Slot | None, value: Any) -> None:
    """Send an object, its arrays through the slot; without a slot they are part of the pickle."""
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
    """Receive an object without unpickling it: the pickle, and the buffers of its arrays, copied or in place.

    Args:
        connection: to the other end.
        slot: where the other end put the arrays.
        lent: whether the arrays stay in the slot, which must then not be written before it is `Slot.free`.

    Raises:
        EOFError: if the other end has closed the connection.
    """
    places, head = pickle.loads(connection.recv_bytes())  # noqa: S301 - from our own process
    buffers: list[Any] = [] if slot is None or not places else slot.lend(places)
    return head, buffers if lent else list(map(bytearray, buffers))


def receive(connection: Connection, slot: Slot | None) -> Any:
    """Receive an object; its arrays are copied out of the slot.

    Raises:
        EOFError: if the other end has closed the connection.
    """
    head, buffers = fetch(connection, slot)
    return pickle.loads(head, buffers=buffers)  # noqa: S301 - from our own process


def generators() -> dict[str, Any]:
    """States of this process's random generators on the CPU, torch's as an array."""
    found = random_state()
    found.pop("cuda", None)
    return {key: value.numpy() if key == "torch" else value for key, value in found.items()}
