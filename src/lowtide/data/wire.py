"""Objects between two processes: pickled, their arrays through a piece of shared memory that is used again and again."""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
from multiprocessing.connection import Connection
from typing import Any, Final, final

import cloudpickle

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

    def close(self) -> None:
        """Give it back."""
        if self._map is not None:
            with contextlib.suppress(BufferError):
                self._map.close()
        with contextlib.suppress(OSError):
            os.close(self.file)


def send(connection: Connection, slot: Slot, value: Any) -> None:
    """Send an object."""
    buffers: list[pickle.PickleBuffer] = []
    head = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    views = [buffer.raw() for buffer in buffers]
    sizes = [view.nbytes for view in views]
    if views:
        room = slot.room(sum(sizes))
        at = 0
        for view, size in zip(views, sizes, strict=True):
            room[at : at + size] = view
            at += size
    connection.send((sizes, head))


def receive(connection: Connection, slot: Slot) -> Any:
    """An object, its arrays in memory of their own.

    Raises:
        EOFError: if the other end has gone.
    """
    sizes, head = connection.recv()
    buffers = []
    if sizes:
        room = memoryview(slot.room(sum(sizes)))
        at = 0
        for size in sizes:
            buffers.append(bytearray(room[at : at + size]))
            at += size
        room.release()
    return pickle.loads(head, buffers=buffers)  # noqa: S301 - from our own process
