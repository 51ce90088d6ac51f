"""Objects between two processes: pickled, their arrays through a piece of shared memory that is used again and again."""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import mmap
import os
import pickle
import sys
from multiprocessing.connection import Connection
from typing import Any, Final, final

import cloudpickle

from lowtide.checkpoint.parts import random_state

_LEAST: Final = 1 << 20


@final
class Slot:
    """Shared memory that grows as needed: an unnamed file of the kernel's, which goes when both ends have."""

    def __init__(self, file: int | None = None) -> None:
        """Make one, or take the one that the other end made."""
        self.file = os.memfd_create("lowtide") if file is None else file
        self._map: mmap.mmap | None = None

    def room(self, size: int) -> mmap.mmap:
        """The memory, at least so large."""
        if self._map is None or len(self._map) < size:
            if os.fstat(self.file).st_size < size:
                os.ftruncate(self.file, max(_LEAST, 1 << (size - 1).bit_length()))
            if self._map is not None:
                with contextlib.suppress(BufferError):
                    self._map.close()
            self._map = mmap.mmap(self.file, os.fstat(self.file).st_size)
        return self._map

    def lend(self, sizes: list[int]) -> list[memoryview]:
        """What lies in it, piece by piece, as it is: whoever has a piece keeps it from being written again."""
        room, ends = memoryview(self.room(sum(sizes))), list(itertools.accumulate(sizes))
        return [room[end - size : end] for size, end in zip(sizes, ends, strict=True)]

    def free(self) -> bool:
        """Whether nobody has a piece of it any more: only then can it be made another size, if only the one that it has."""
        if self._map is not None:
            try:
                self._map.resize(os.fstat(self.file).st_size)
            except BufferError:
                return False
        return True

    def close(self) -> None:
        """Give it back."""
        if self._map is not None:
            with contextlib.suppress(BufferError):
                self._map.close()
        file, self.file = self.file, -1  # once only: the number may be another file's by now
        if file >= 0:
            os.close(file)


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
    views = [buffer.raw() for buffer in buffers]
    sizes = [view.nbytes for view in views]
    if slot is not None and views:
        room = slot.room(sum(sizes))
        at = 0
        for view, size in zip(views, sizes, strict=True):
            room[at : at + size] = view
            at += size
    connection.send_bytes(pickle.dumps((sizes, head.getvalue())))


def fetch(connection: Connection, slot: Slot | None, *, lent: bool = False) -> tuple[bytes, list[Any]]:
    """What was sent, not unpickled yet: its arrays in memory of their own, or where they lie.

    Args:
        connection: to the other end.
        slot: in which it put the arrays.
        lent: whether they stay there; it must not be written again before it is `Slot.free`.

    Raises:
        EOFError: if the other end has gone.
    """
    sizes, head = pickle.loads(connection.recv_bytes())  # noqa: S301 - from our own process
    buffers: list[Any] = []
    if slot is not None and sizes and lent:
        return head, slot.lend(sizes)
    if slot is not None and sizes:
        room = memoryview(slot.room(sum(sizes)))
        at = 0
        for size in sizes:
            buffers.append(bytearray(room[at : at + size]))
            at += size
        room.release()
    return head, buffers


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
