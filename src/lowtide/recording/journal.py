"""The journal: entries of the running step, in a memory-mapped file that outlives the process."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from lowtide.base import files
from lowtide.recording.file_format import ENTRY, PACK

HEADER: Final = struct.Struct("<8sqddqqq")
"""Magic, step, its start in seconds, (unused), live bytes at its start, the run's peak by then, number of carried blocks."""
MAGIC: Final = b"lowtide\x01"
_FIRST_BYTES: Final = 1 << 16
_MOST_GROWTH_BYTES: Final = 1 << 24
"""The journal's file doubles in size when it is full, but grows by at most this many bytes at a time."""
_LEAST_BYTES: Final = 1 << 12
"""Initial size to accept if a nearly full disk has no room for ``_FIRST_BYTES``."""
_MOST_BYTES: Final = 1 << 28
"""Maximum size of a journal (5.6 million entries in one step): further entries of that step are lost."""


@final
class Journal:
    """Entries of the running step, in a memory-mapped file.

    Attributes:
        silent: whether nothing is written any more: this process is a forked child, the disk is full, or the recording is
            over.
    """

    def __init__(self, path: Path | None, failed: Callable[[OSError], None] | None = None) -> None:
        """Create the file.

        Args:
            path: the file's path; None for a journal that is silent from the start.
            failed: called with the error when the file cannot grow; without it, that error is raised.

        Raises:
            OSError: if the disk has no room for the file.
        """
        self.silent = path is None
        self._path = path
        if path is None:
            return
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self._failed = failed
        self._growing = threading.RLock()  # reentrant: a weak-reference callback may add an entry meanwhile
        self._size = 0
        try:
            self._size = self._reserved(_LEAST_BYTES, _FIRST_BYTES)
            self._map = mmap.mmap(self._file, self._size)
        except BaseException:
            os.close(self._file)
            path.unlink(missing_ok=True)
            raise
        self._start = HEADER.size
        self._next = itertools.count().__next__

    def begin(self, step: int, start: float, live_bytes: int, high_water_bytes: int, carried: NDArray[np.void]) -> None:
        """Start a new step, and discard the entries of the previous one: they are in the recording by now, or are not kept."""
        if self.silent or not self._whole():
            return
        used = min(self._start + self._next() * ENTRY.itemsize, self._size)
        first = HEADER.size + carried.nbytes
        if not self._grow(first + ENTRY.itemsize):
            return
        self._start = first
        if used > self._start:
            self._map[self._start : used] = bytes(used - self._start)
        self._map[HEADER.size : self._start] = carried.tobytes()
        HEADER.pack_into(self._map, 0, MAGIC, step, start, 0.0, live_bytes, high_water_bytes, len(carried))
        self._next = itertools.count().__next__

    def add(self, *entry: Any) -> None:
        """Append one entry, given field by field as in :data:`ENTRY`; a weak-reference callback may add another meanwhile."""
        if self.silent:
            return
        at = self._start + self._next() * ENTRY.itemsize
        if at + ENTRY.itemsize > self._size and not self._grow(at + ENTRY.itemsize):
            return
        PACK.pack_into(self._map, at, *entry)

    def _grow(self, needed: int) -> bool:
        with self._growing:
            if needed <= self._size:
                return True
            if needed > _MOST_BYTES or self.silent or not self._whole():
                return False
            try:
                size = self._reserved(needed, min(2 * self._size, self._size + _MOST_GROWTH_BYTES))
                if size > self._size:
                    self._map.resize(size)
                    self._size = size
            except OSError as error:
                self._stop(error)
                return False
            return True

    def _reserved(self, needed: int, wished: int) -> int:
        """Grow the file to the wished size or, if the disk has no room for that, to the needed one; the new size in bytes."""
        page = mmap.ALLOCATIONGRANULARITY
        least = -(-needed // page) * page
        for size in (max(wished, least), least):
            try:
                files.reserve(self._file, size, since=self._size)
            except OSError:
                if size == least:
                    raise
            else:
                return size
        raise AssertionError

    def _whole(self) -> bool:
        """Whether the file still has its full size, so that the whole mapping may be touched; stops the journal if not."""
        if os.fstat(self._file).st_size >= self._size:
            return True
        self._stop(OSError(errno.EIO, "another process truncated the file"))
        return False

    def _stop(self, error: OSError) -> None:
        self.silent = True
        if self._failed is None:
            raise error
        self._failed(error)

    def entries(self) -> NDArray[np.void]:
        """A copy of the step's entries so far; empty if the journal is silent."""
        if self.silent or not self._whole():
            return np.zeros(0, dtype=ENTRY)
        count = self._next()
        self._next = itertools.count(count).__next__
        return entries_in(self._map[self._start : min(self._start + count * ENTRY.itemsize, self._size)])

    def close(self, *, keep: bool = False) -> None:
        """Unmap and remove the file; ``keep`` leaves it on disk, as the only copy of a step that could not be stored."""
        self.silent = True
        if self._path is None:
            return
        self._map.close()
        os.close(self._file)
        if not keep:
            self._path.unlink(missing_ok=True)


def entries_in(data: bytes) -> NDArray[np.void]:
    """The entries at the beginning of some bytes, up to the first empty one."""
    found: NDArray[np.void] = np.frombuffer(data[: len(data) // ENTRY.itemsize * ENTRY.itemsize], dtype=ENTRY)
    empty = np.flatnonzero(found["kind"] == 0)
    return found[: empty[0]].copy() if len(empty) else found.copy()
