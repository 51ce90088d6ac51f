"""The second board: where values wait that are moved out of the device's memory.

For the CPU it is a file without a name, so that it is gone with the process; for a CUDA device it is pinned host memory,
written and read on a stream of its own.
"""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any, Protocol, final

import torch
from lowtide.pebble.problem import Bandwidth

_PROBE_BYTES = 8 << 20
"""Bytes written and read to measure a board."""


class Ticket(Protocol):
    """One value's place on a second board; it is given back with the last reference to the ticket."""

    def fetch(self) -> torch.UntypedStorage:
        """A new storage on the device with the value's bytes."""


class Board(Protocol):
    """A second board of one device."""

    def put(self, storage: torch.UntypedStorage) -> Ticket:
        """Copy a storage's bytes; the storage may be let go afterwards."""


def _bytes_of(storage: torch.UntypedStorage) -> memoryview:
    flat = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)  # type: ignore[call-overload]
    return memoryview(torch._C.TensorBase.numpy(flat))  # type: ignore[arg-type]


@final
class FileBoard:
    """The CPU's second board: one unlinked temporary file (in ``TMPDIR``)."""

    def __init__(self) -> None:
        """Open the file; it takes no space until something is put."""
        self._file = tempfile.TemporaryFile(prefix="lowtide-")  # noqa: SIM115 - lives as long as the board
        self._end = 0
        self._free: dict[int, list[int]] = {}

    def put(self, storage: torch.UntypedStorage) -> Ticket:
        """Write a storage's bytes."""
        size = storage.nbytes()
        places = self._free.get(size)
        at = places.pop() if places else self._end
        if at == self._end:
            self._end += size
        view, done = _bytes_of(storage), 0
        while done < size:
            done += os.pwrite(self._file.fileno(), view[done:], at + done)
        return _FileTicket(self, at, size)

    def read(self, at: int, size: int) -> torch.UntypedStorage:
        """A new storage with the bytes at a place."""
        storage = torch.UntypedStorage(size, device="cpu")
        view, done = _bytes_of(storage), 0
        while done < size:
            got = os.preadv(self._file.fileno(), [view[done:]], at + done)
            if got == 0:
                raise OSError(f"lowtide's second board was cut short at {at + done} bytes")
            done += got
        return storage

    def give_back(self, at: int, size: int) -> None:
        """A place may be used again."""
        self._free.setdefault(size, []).append(at)

    def measure(self) -> Bandwidth:
        """Bytes per second each way, by writing and reading some megabytes (outside torch's allocator)."""
        probe = bytearray(b"\1") * _PROBE_BYTES
        start = time.perf_counter()
        os.pwrite(self._file.fileno(), probe, self._end)
        written = time.perf_counter()
        os.preadv(self._file.fileno(), [probe], self._end)
        read = time.perf_counter()
        return Bandwidth(write=_PROBE_BYTES / (written - start), read=_PROBE_BYTES / (read - written))


@final
class _FileTicket:
    __slots__ = ("_at", "_board", "_size")

    def __init__(self, board: FileBoard, at: int, size: int) -> None:
        self._board, self._at, self._size = board, at, size

    def fetch(self) -> torch.UntypedStorage:
        return self._board.read(self._at, self._size)

    def __del__(self) -> None:
        self._board.give_back(self._at, self._size)


@final
class PinnedBoard:
    """A CUDA device's second board: pinned host memory, on a stream of its own.

    A storage that is put is marked as used by the copying stream (``record_stream``), so that the caching allocator gives
    its memory out again only after the copy; a fetch makes the asking stream wait for its copy.
    """

    def __init__(self, device: torch.device) -> None:
        """Make the copying stream."""
        self.device = device
        self.stream: Any = torch.cuda.Stream(device)

    def put(self, storage: torch.UntypedStorage) -> Ticket:
        """Copy to pinned memory without waiting."""
        source = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)  # type: ignore[call-overload]
        host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            host.copy_(source, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self.stream)
        source.record_stream(self.stream)
        return _PinnedTicket(self, host, done)

    def measure(self) -> Bandwidth:
        """Bytes per second each way, by copying some megabytes."""
        probe = torch.zeros(_PROBE_BYTES, dtype=torch.uint8, device=self.device)
        torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        ticket = self.put(probe.untyped_storage())
        torch.cuda.synchronize(self.device)
        written = time.perf_counter()
        ticket.fetch()  # pinned blocks are recycled by the caching host allocator once its recorded events have passed
        torch.cuda.synchronize(self.device)
        read = time.perf_counter()
        return Bandwidth(write=_PROBE_BYTES / (written - start), read=_PROBE_BYTES / (read - written))


@final
class _PinnedTicket:
    __slots__ = ("_board", "_done", "_host")

    def __init__(self, board: PinnedBoard, host: torch.Tensor, done: Any) -> None:
        self._board, self._host, self._done = board, host, done

    def fetch(self) -> torch.UntypedStorage:
        board = self._board
        asking = torch.cuda.current_stream(board.device)
        # The block is taken on the asking stream, which may still have work queued on its former contents.
        target = torch.empty(self._host.numel(), dtype=torch.uint8, device=board.device)
        board.stream.wait_stream(asking)
        board.stream.wait_event(self._done)
        with torch.cuda.stream(board.stream):
            target.copy_(self._host, non_blocking=True)
        target.record_stream(board.stream)
        asking.wait_stream(board.stream)
        return target.untyped_storage()
