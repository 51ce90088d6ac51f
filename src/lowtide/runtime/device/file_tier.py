"""Offload tier of the CPU: an unnamed file, which disappears with the process."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Final, final

import torch
from lowtide.base.files import ROOM_FOR_TEMPORARY_FILES, read_memory, reserve, why, write_memory
from lowtide.base.forks import weakly
from lowtide.base.messages import tell
from lowtide.planning.unit.problem import Bandwidth
from lowtide.runtime.device.accelerator import HOST
from lowtide.runtime.device.available_memory import groups, is_in_memory
from lowtide.runtime.device.offload import PROBE_BYTES, PROBES, SlicedTicket, Ticket, fastest, flat

_SEGMENT_BYTES: Final = 64 << 20
"""The file grows by at least this much at a time, if the disk has that much room."""
_PIECE_BYTES: Final = 16 << 20
"""Values are copied in pieces of this size; in a control group, the write-back of each begins before the next is copied."""
_COPIED_BYTES: Final = 1 << 20
"""Places are copied within the file in pieces of this size."""
_ALIGNED_BYTES: Final = 64
"""Places start at cache lines, like torch's own blocks."""
_CLASS_BITS: Final = 4
"""Leading bits of a size that size classes distinguish: a place is at most an eighth larger than the value it was made for."""
_ROOMY: Final = 1.5
"""A free place is reused for a value if it is at most this many times as large as the value."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Bytes of the file: where they begin, and how many there are."""

    at: int
    bytes: int


@final
class FileTier:
    """An unlinked temporary file (in ``TMPDIR``).

    Under memory pressure the kernel writes the file's pages to disk; until then they are page cache, which it can reclaim.
    They are never mapped, so they do not count as resident in the process, and cost no page faults: in a mapping, each page
    that is touched costs one, which takes several times as long as copying it. In a control group with a limit, their
    write-back starts at once (``POSIX_FADV_DONTNEED``), so that the group never waits for it at its limit.
    """

    overlaps: bool = False  # copies run on the cores that compute

    def __init__(self) -> None:
        """Create no file until the first :meth:`put`."""
        self._file: IO[bytes] | None = None
        self._told = False
        self._lock = threading.Lock()
        self._end = 0
        self._rest = _Place(0, 0)
        self._free: dict[int, list[_Place]] = {}
        self._limited = any(True for _ in groups())
        self._tickets: weakref.WeakSet[_FileTicket] = weakref.WeakSet()
        self._shared: list[tuple[_Place, tuple[_Children, ...]]] = []
        self._pipe: tuple[int, int] | None = None
        self._is_childs = False
        os.register_at_fork(
            before=weakly(self.before_fork), after_in_parent=weakly(self.in_parent), after_in_child=weakly(self.in_child)
        )

    # --- forks -------------------------------------------------------------------------------------------------------
    # A forked child shares the file. It must read what was there when it was forked, and must not write.

    def before_fork(self) -> None:
        """This process is about to fork: a pipe will show when no child is left."""
        self._pipe = os.pipe() if self._tickets else None

    def in_parent(self) -> None:
        """The fork has happened: what is in the file now stays where it is until the children have ended."""
        if self._pipe is not None:
            os.close(self._pipe[1])
            children, self._pipe = _Children(self._pipe[0]), None
            for ticket in self._tickets:
                ticket.children = (*ticket.children, children)

    def in_child(self) -> None:
        """This process is the child: keep the pipe's end open as long as it lives, and write nothing."""
        self._is_childs, self._lock = True, threading.Lock()
        if self._pipe is not None:
            os.close(self._pipe[0])

    def put(self, storage: torch.UntypedStorage) -> Ticket:
        """Write a storage's bytes to the file.

        Raises:
            OSError: if the disk has no room, or fails.
        """
        if self._is_childs:
            raise OSError(errno.EROFS, "the file belongs to the parent process")
        size = storage.nbytes()
        place = self._place(size)
        try:
            self.write(_address(flat(storage)), size, place)
        except OSError as error:
            self.give_back(place)
            self._tell(error)
            raise
        return self._ticket(place, size)

    def empty(self, size: int) -> SlicedTicket:
        """A place for a value of ``size`` bytes, which are undefined until they are written.

        Raises:
            OSError: if the disk has no room.
        """
        if self._is_childs:
            raise OSError(errno.EROFS, "the file belongs to the parent process")
        return self._ticket(self._place(size), size)

    def _ticket(self, place: _Place, size: int) -> _FileTicket:
        ticket = _FileTicket(self, place, size)
        self._tickets.add(ticket)
        return ticket

    def copy(self, size: int, source: _Place, target: _Place) -> None:
        """Copy bytes from one place to another.

        Raises:
            OSError: if the disk fails.
        """
        piece = ctypes.create_string_buffer(min(size, _COPIED_BYTES))
        for done in range(0, size, _COPIED_BYTES):
            part = min(size - done, _COPIED_BYTES)
            self.read(ctypes.addressof(piece), part, source, done)
            self.write(ctypes.addressof(piece), part, target, done)

    def expect(self, place: _Place, at: int, size: int) -> None:
        """Bytes of a place will be read soon: in a control group with a limit, they may have left the page cache."""
        if self._limited and self._file is not None:
            os.posix_fadvise(self._file.fileno(), place.at + at, size, os.POSIX_FADV_WILLNEED)

    def write(self, address: int, size: int, place: _Place, at: int = 0) -> None:
        """Copy bytes of the process's memory to a place, from its byte ``at`` on.

        Raises:
            OSError: if the disk has no room after all, or fails.
        """
        self._copy(write_memory, address, size, place.at + at)

    def read(self, address: int, size: int, place: _Place, at: int = 0) -> None:
        """Copy bytes of a place, from its byte ``at`` on, to the process's memory.

        Raises:
            OSError: if the disk fails.
        """
        self._copy(read_memory, address, size, place.at + at)

    def _copy(self, copy: Callable[[int, int, int, int], None], address: int, size: int, at: int) -> None:
        for done in range(0, size, _PIECE_BYTES):
            assert self._file is not None
            number = self._file.fileno()
            piece = min(size - done, _PIECE_BYTES)
            copy(number, address + done, piece, at + done)
            if self._limited:
                os.posix_fadvise(number, at + done, piece, os.POSIX_FADV_DONTNEED)

    def _place(self, size: int) -> _Place:
        """Unused bytes, ``size`` or a few more. Places that were used before are preferred: they are in the page cache.

        Sizes are rounded up to size classes. With exact sizes, a script whose sizes differ in every step would use each place
        only once, and the file would grow without bound.
        """
        with self._lock:  # not in give_back(), which the garbage collector may call while it is held
            return self._unused(size)

    def _unused(self, size: int) -> _Place:
        if self._shared:
            shared, self._shared = self._shared, []
            for place, children in shared:
                self.give_back(place, children)
        step = max(_ALIGNED_BYTES, 1 << max(0, size.bit_length() - _CLASS_BITS))
        size = -(-size // step) * step
        free = list(self._free.items())  # what the garbage collector gives back meanwhile may add sizes
        fitting = min((has for has, places in free if places and size <= has <= _ROOMY * size), default=0)
        if fitting:
            return self._free[fitting].pop()
        if self._rest.bytes < size:
            self._rest = self._more(size)
        place, used = _Place(self._rest.at, size), -(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES
        self._rest = _Place(self._rest.at + used, max(0, self._rest.bytes - used))
        return place

    def _more(self, size: int) -> _Place:
        """Extend the file by a segment if the disk has room for one, otherwise by ``size`` bytes.

        Raises:
            OSError: if the disk has no room; the user is told once.
        """
        try:
            if size < _SEGMENT_BYTES:
                with contextlib.suppress(OSError):
                    return self._extend(_SEGMENT_BYTES)
            return self._extend(size)
        except OSError as error:
            self._tell(error)
            raise

    def _tell(self, error: OSError) -> None:
        """Tell the user, once, why nothing more is offloaded."""
        if not self._told:
            self._told = True
            where = "" if tempfile.tempdir is None else f" in {tempfile.tempdir}"  # else the error names the folders
            trouble = f"{why(error)}{where}: {ROOM_FOR_TEMPORARY_FILES}"
            tell(f"lowtide: offloading stops: {trouble}; training goes on")

    def _extend(self, size: int) -> _Place:
        """Extend the file by ``size`` bytes.

        Raises:
            OSError: if the disk has no room. The bytes are reserved here, before any value depends on them.
        """
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="lowtide-", dir=_folder())  # noqa: SIM115 - lives as long as the tier
        at, number = self._end, self._file.fileno()
        try:
            reserve(number, at + size, since=at)
        except BaseException:
            with contextlib.suppress(OSError):
                os.ftruncate(number, at)  # some systems keep the blocks allocated before the failure
            raise
        self._end += -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        return _Place(at, size)

    def give_back(self, place: _Place, children: tuple[_Children, ...] = ()) -> None:
        """Mark a place as free for reuse, as soon as no ``children`` are left that may read it."""
        if not all(group.have_ended() for group in children):
            self._shared.append((place, children))
            return
        self._free.setdefault(place.bytes, []).append(place)

    def measure(self) -> Bandwidth:
        """Bytes per second each way, measured by copying `PROBE_BYTES` several times (outside torch's allocator).

        Raises:
            OSError: if the disk has no room.
            OutOfMemoryError: if the process may not take the bytes that are copied.
        """
        place = self._place(PROBE_BYTES)
        try:
            with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
                probe, *fresh = (torch.frombuffer(mmap.mmap(-1, PROBE_BYTES), dtype=torch.uint8) for _ in range(1 + PROBES))
        except (OSError, MemoryError) as error:
            self.give_back(place)
            raise torch.OutOfMemoryError("no memory to measure the offload tier's speed with") from error

        def write() -> None:
            self.write(probe.untyped_storage().data_ptr(), PROBE_BYTES, place)

        def read(target: torch.Tensor) -> None:
            self.read(target.untyped_storage().data_ptr(), PROBE_BYTES, place)

        ctypes.memset(probe.untyped_storage().data_ptr(), 0, PROBE_BYTES)
        write()  # not timed: a place has only one first write, but is used many times
        found = Bandwidth(
            write=fastest(write), read=fastest(lambda: read(probe)), read_fresh=fastest(lambda: read(fresh.pop())),
        )
        self.give_back(place)
        return found


def _folder() -> str | None:
    """The folder for the file: None for the temporary folder, or another folder if that one is in memory (tmpfs).

    Raises:
        OSError: if no writable folder is on a disk. Moving bytes to a file in memory would free nothing.
    """
    default = tempfile.gettempdir()
    if not is_in_memory(default):
        return None
    for folder in (f"{os.sep}var{os.sep}tmp", os.path.expanduser("~"), os.getcwd()):  # noqa: PTH109, PTH111
        if os.access(folder, os.W_OK) and not is_in_memory(folder):
            tell(
                f"lowtide: {default} is a file system in memory: activations are offloaded to {folder} instead "
                "(set TMPDIR to choose another folder)"
            )
            return folder
    raise OSError(errno.ENOSPC, f"{default} is a file system in memory: set TMPDIR to a folder on a disk")


def _address(tensor: torch.Tensor) -> int:
    """Address of a tensor's bytes; ``data_ptr()`` would end a lazy copy."""
    storage: int = torch._C._data_address(tensor)  # type: ignore[attr-defined]
    return storage + int(tensor.storage_offset()) * tensor.element_size()


@final
class _Children:
    """The children of one fork, and theirs: none is left once the pipe's other end is closed everywhere."""

    def __init__(self, end: int) -> None:
        self._end = end
        os.set_blocking(end, False)

    def have_ended(self) -> bool:
        if self._end >= 0:
            with contextlib.suppress(BlockingIOError):
                os.read(self._end, 1)
                os.close(self._end)
                self._end = -1
        return self._end < 0

    def __del__(self) -> None:
        if self._end >= 0:
            os.close(self._end)


@final
class _FileTicket:
    __slots__ = ("__weakref__", "_begun", "_place", "_size", "_tier", "children")

    def __init__(self, tier: FileTier, place: _Place, size: int) -> None:
        self._tier, self._place, self._size = tier, place, size
        self.children: tuple[_Children, ...] = ()
        self._begun: torch.UntypedStorage | None = None

    def begin(self) -> None:
        if self._begun is None:
            self._begun = self._read()

    def fetch(self) -> torch.UntypedStorage:
        begun, self._begun = self._begun, None
        return self._read() if begun is None else begun

    def read(self, at: int, target: torch.Tensor) -> None:
        self._tier.read(_address(target), target.nbytes, self._place, at)

    def write(self, at: int, source: torch.Tensor) -> None:
        self._begun = None
        self._tier.write(_address(source), source.nbytes, self._place, at)

    def expect(self, at: int, size: int) -> None:
        self._tier.expect(self._place, at, size)

    def own(self) -> SlicedTicket:
        if all(group.have_ended() for group in self.children):
            return self
        copied = self._tier.empty(self._size)
        assert isinstance(copied, _FileTicket)
        self._tier.copy(self._size, self._place, copied._place)
        return copied

    def _read(self) -> torch.UntypedStorage:
        storage = torch.UntypedStorage(self._size, device=HOST)
        self._tier.read(storage.data_ptr(), self._size, self._place)
        return storage

    def __del__(self) -> None:
        self._tier.give_back(self._place, self.children)
