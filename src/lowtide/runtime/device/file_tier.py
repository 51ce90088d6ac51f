"""Offload tier of the CPU: an unnamed file, which disappears with the process."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator
from typing import IO, Final, final

import torch
from lowtide.base.files import ROOM_FOR_TEMPORARY_FILES, reserve, why
from lowtide.base.forks import weakly
from lowtide.base.messages import tell
from lowtide.planning.unit.problem import Bandwidth
from lowtide.runtime.device.accelerator import HOST
from lowtide.runtime.device.available_memory import groups, is_in_memory
from lowtide.runtime.device.offload import PROBE_BYTES, PROBES, Ticket, fastest, flat

_SEGMENT_BYTES: Final = 64 << 20
"""The file grows by at least this much at a time, if the disk has that much room."""
_PIECE_BYTES: Final = 16 << 20
"""Values are copied in pieces of this size; each piece's pages are unmapped before the next piece is copied."""
_ALIGNED_BYTES: Final = 64
"""Places start at cache lines, like torch's own blocks."""
_CLASS_BITS: Final = 4
"""Leading bits of a size that size classes distinguish: a place is at most an eighth larger than the value it was made for."""
_ROOMY: Final = 1.5
"""A free place is reused for a value if it is at most this many times as large as the value."""


@final
class FileTier:
    """An unlinked temporary file (in ``TMPDIR``), mapped into memory so that torch copies with all threads.

    Under memory pressure the kernel writes the file's pages to disk; until then they are page cache, which it can reclaim.
    They do not count as resident in the process: each page is unmapped as soon as it has been written or read
    (``MADV_DONTNEED``, which keeps the contents of a shared file mapping). In a control group with a limit, their write-back
    also starts at once (``POSIX_FADV_DONTNEED``), so that the group never waits for it at its limit.
    """

    overlaps: bool = False  # copies run on the cores that compute

    def __init__(self) -> None:
        """Create no file until the first :meth:`put`."""
        self._file: IO[bytes] | None = None
        self._told = False
        self._end = 0
        self._rest = torch.empty(0, dtype=torch.uint8)
        self._free: dict[int, list[torch.Tensor]] = {}
        self._maps: list[tuple[int, int, int, mmap.mmap]] = []
        self._limited = any(True for _ in groups())
        self._tickets: weakref.WeakSet[_FileTicket] = weakref.WeakSet()
        self._shared: list[tuple[torch.Tensor, tuple[_Children, ...]]] = []
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
        self._is_childs = True
        if self._pipe is not None:
            os.close(self._pipe[0])

    def put(self, storage: torch.UntypedStorage) -> Ticket:
        """Write a storage's bytes to the file.

        Raises:
            OSError: if the disk has no room.
        """
        if self._is_childs:
            raise OSError(errno.EROFS, "the file belongs to the parent process")
        size = storage.nbytes()
        place = self._place(size)
        source = flat(storage)
        for piece in _pieces(size):
            place[piece].copy_(source[piece])
            self.leave(place[piece])
        ticket = _FileTicket(self, place, size)
        self._tickets.add(ticket)
        return ticket

    def leave(self, place: torch.Tensor, _read: torch.Tensor | None = None) -> None:
        """Unmap the pages of a place that was just written, or read into another tensor (``_read``)."""
        start = place.data_ptr()
        for base, length, offset, mapped in self._maps:
            if base <= start < base + length:
                first = -(-(start - base) // mmap.PAGESIZE) * mmap.PAGESIZE
                size = (start - base + place.numel()) // mmap.PAGESIZE * mmap.PAGESIZE - first
                if size > 0:
                    mapped.madvise(mmap.MADV_DONTNEED, first, size)
                    if self._limited and self._file is not None:
                        os.posix_fadvise(self._file.fileno(), offset + first, size, os.POSIX_FADV_DONTNEED)
                return

    def _place(self, size: int) -> torch.Tensor:
        """Unused mapped bytes, ``size`` or a few more. Places that were used before are preferred: they are warm.

        Sizes are rounded up to size classes. With exact sizes, a script whose sizes differ in every step would use each place
        only once, and the file would grow without bound.
        """
        if self._shared:
            shared, self._shared = self._shared, []
            for place, children in shared:
                self.give_back(place, children)
        step = max(_ALIGNED_BYTES, 1 << max(0, size.bit_length() - _CLASS_BITS))
        size = -(-size // step) * step
        fitting = min((free for free, places in self._free.items() if places and size <= free <= _ROOMY * size), default=0)
        if fitting:
            return self._free[fitting].pop()
        if self._rest.numel() < size:
            self._rest = self._more(size)
        place = self._rest[:size]
        self._rest = self._rest[-(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES :]
        return place

    def _more(self, size: int) -> torch.Tensor:
        """Extend the file by a segment if the disk has room for one, otherwise by ``size`` bytes.

        Raises:
            OSError: if the disk has no room; the user is told once.
        """
        try:
            if size < _SEGMENT_BYTES:
                with contextlib.suppress(OSError):
                    return self._map(_SEGMENT_BYTES)
            return self._map(size)
        except OSError as error:
            if not self._told:
                self._told = True
                where = "" if tempfile.tempdir is None else f" in {tempfile.tempdir}"  # else the error names the folders
                trouble = f"{why(error)}{where}: {ROOM_FOR_TEMPORARY_FILES}"
                tell(f"lowtide: offloading stops: {trouble}; training goes on")
            raise

    def _map(self, size: int) -> torch.Tensor:
        """Extend the file by ``size`` bytes and map them.

        Raises:
            OSError: if the disk has no room. The bytes are reserved here, because a write to a mapping that the disk cannot
                hold ends the process.
        """
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="lowtide-", dir=_folder())  # noqa: SIM115 - lives as long as the tier
        at, number = self._end, self._file.fileno()
        try:
            reserve(number, at + size, since=at)
            mapped = mmap.mmap(number, size, offset=at)
            with torch.inference_mode(mode=False):
                found = torch.frombuffer(mapped, dtype=torch.uint8)
            self._maps.append((found.data_ptr(), size, at, mapped))
        except BaseException:
            with contextlib.suppress(OSError):
                os.ftruncate(number, at)  # some systems keep the blocks allocated before the failure
            raise
        self._end += -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        return found

    def give_back(self, place: torch.Tensor, children: tuple[_Children, ...] = ()) -> None:
        """Mark a place as free for reuse, as soon as no ``children`` are left that may read it."""
        if not all(group.have_ended() for group in children):
            self._shared.append((place, children))
            return
        self._free.setdefault(place.numel(), []).append(place)

    def measure(self) -> Bandwidth:
        """Bytes per second each way, measured by copying `PROBE_BYTES` several times (outside torch's allocator).

        Raises:
            OSError: if the disk has no room.
            OutOfMemoryError: if the process may not take the bytes that are copied.
        """
        with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
            place = self._place(PROBE_BYTES)
            try:
                probe, *maps = (torch.frombuffer(mmap.mmap(-1, PROBE_BYTES), dtype=torch.uint8) for _ in range(1 + PROBES))
            except (OSError, MemoryError) as error:
                self.give_back(place)
                raise torch.OutOfMemoryError("no memory to measure the offload tier's speed with") from error
            probe.zero_()
            place.copy_(probe)  # not timed: a place has only one first write, but is used many times
            write = fastest(lambda: self.leave(place.copy_(probe)))
            read = fastest(lambda: self.leave(place, probe.copy_(place)))
            read_fresh = fastest(lambda: self.leave(place, maps.pop().copy_(place)))
        self.give_back(place)
        return Bandwidth(write=write, read=read, read_fresh=read_fresh)


def _pieces(size: int) -> Iterator[slice]:
    """Slices of at most `_PIECE_BYTES` that cover ``size`` bytes."""
    for start in range(0, size, _PIECE_BYTES):
        yield slice(start, min(start + _PIECE_BYTES, size))


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

    def __init__(self, tier: FileTier, place: torch.Tensor, size: int) -> None:
        self._tier, self._place, self._size = tier, place, size
        self.children: tuple[_Children, ...] = ()
        self._begun: torch.UntypedStorage | None = None

    def begin(self) -> None:
        if self._begun is None:
            self._begun = self._copy()

    def fetch(self) -> torch.UntypedStorage:
        begun, self._begun = self._begun, None
        return self._copy() if begun is None else begun

    def _copy(self) -> torch.UntypedStorage:
        storage = torch.UntypedStorage(self._size, device=HOST)
        target = flat(storage)
        for piece in _pieces(self._size):
            target[piece].copy_(self._place[piece])
            self._tier.leave(self._place[piece])
        return storage

    def __del__(self) -> None:
        self._tier.give_back(self._place, self.children)
