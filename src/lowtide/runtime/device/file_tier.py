"""The CPU's second board: a file without a name, so that it is gone with the process."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import tempfile
from collections.abc import Iterator
from typing import IO, Final, final

import torch
from lowtide.base.files import ROOM_FOR_TEMPORARY_FILES, reserve, why
from lowtide.base.messages import tell
from lowtide.planning.unit.problem import Bandwidth
from lowtide.runtime.device.accelerator import HOST
from lowtide.runtime.device.available_memory import groups, is_in_memory
from lowtide.runtime.device.offload import PROBE_BYTES, PROBES, Ticket, fastest, flat

_SEGMENT_BYTES: Final = 64 << 20
"""The file grows by at least so much at a time."""
_PIECE_BYTES: Final = 16 << 20
"""Values are copied in pieces of so much, and each piece's pages are unmapped before the next is copied."""
_ALIGNED_BYTES: Final = 64
"""Places begin at cache lines, as torch's own blocks do."""
_CLASS_BITS: Final = 4
"""Leading bits of a size that places tell apart: they are an eighth larger at most than what they are made for."""
_ROOMY: Final = 1.5
"""A place is used again for what is smaller by this factor at most."""


@final
class FileTier:
    """The CPU's second board: an unlinked temporary file (in ``TMPDIR``), mapped, so that copies run on all threads.

    Under pressure the kernel writes its pages to disk; until then they are page cache, which it can take back. They are not
    counted as resident in the process: each is unmapped as soon as it is written or read (``MADV_DONTNEED``, which keeps what
    a shared mapping of a file holds). In a control group that has a limit their write-back is begun at once, too
    (``POSIX_FADV_DONTNEED``), so that the group never waits for it at its limit.
    """

    overlaps: bool = False  # a copy keeps the very cores busy that compute

    def __init__(self) -> None:
        """There is no file until something is put."""
        self._file: IO[bytes] | None = None
        self._told = False
        self._end = 0
        self._rest = torch.empty(0, dtype=torch.uint8)
        self._free: dict[int, list[torch.Tensor]] = {}
        self._maps: list[tuple[int, int, int, mmap.mmap]] = []
        self._limited = any(True for _ in groups())

    def put(self, storage: torch.UntypedStorage) -> Ticket:
        """Write a storage's bytes."""
        size = storage.nbytes()
        place = self._place(size)
        source = flat(storage)
        for piece in _pieces(size):
            place[piece].copy_(source[piece])
            self.leave(place[piece])
        return _FileTicket(self, place, size)

    def leave(self, place: torch.Tensor, _read: torch.Tensor | None = None) -> None:
        """Bytes were written or read (into another tensor): the process need not have their pages."""
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
        """Mapped bytes, as many or a few more, that nothing else uses; those that were used before are warm.

        Sizes are rounded up: where they are others in every step, places would be used once, and the file would grow for ever.
        """
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
        """More of the file, by a segment where the disk has one.

        Raises:
            OSError: where the disk has no room, which is said once.
        """
        try:
            if size < _SEGMENT_BYTES:
                with contextlib.suppress(OSError):
                    return self._map(_SEGMENT_BYTES)
            return self._map(size)
        except OSError as error:
            if not self._told:
                self._told = True
                where = "" if tempfile.tempdir is None else f" in {tempfile.tempdir}"  # else it says where it has looked
                trouble = f"{why(error)}{where}: {ROOM_FOR_TEMPORARY_FILES}"
                tell(f"lowtide: nothing more is offloaded: {trouble}; training goes on")
            raise

    def _map(self, size: int) -> torch.Tensor:
        """More of the file.

        Raises:
            OSError: where the disk has no room: found out here, as a write to a mapping that it cannot hold ends the process.
        """
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="lowtide-", dir=_folder())  # noqa: SIM115 - lives as long as the board
        at, number = self._end, self._file.fileno()
        try:
            reserve(number, at + size, since=at)
            mapped = mmap.mmap(number, size, offset=at)
            found = torch.frombuffer(mapped, dtype=torch.uint8)
            self._maps.append((found.data_ptr(), size, at, mapped))
        except BaseException:
            with contextlib.suppress(OSError):
                os.ftruncate(number, at)  # some systems keep what they had found
            raise
        self._end += -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        return found

    def give_back(self, place: torch.Tensor) -> None:
        """A place may be used again."""
        self._free.setdefault(place.numel(), []).append(place)

    def measure(self) -> Bandwidth:
        """Bytes per second each way, by writing and reading some megabytes (outside torch's allocator)."""
        with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
            place = self._place(PROBE_BYTES)
            probe = torch.frombuffer(bytearray(PROBE_BYTES), dtype=torch.uint8)
            place.copy_(probe)  # a place is written for the first time once, and used many times
            write = fastest(lambda: self.leave(place.copy_(probe)))
            read = fastest(lambda: self.leave(place, probe.copy_(place)))
            maps = [torch.frombuffer(mmap.mmap(-1, PROBE_BYTES), dtype=torch.uint8) for _ in range(PROBES)]
            read_fresh = fastest(lambda: self.leave(place, maps.pop().copy_(place)))
        self.give_back(place)
        return Bandwidth(write=write, read=read, read_fresh=read_fresh)


def _pieces(size: int) -> Iterator[slice]:
    """Ranges of at most `_PIECE_BYTES` that cover so many bytes."""
    for start in range(0, size, _PIECE_BYTES):
        yield slice(start, min(start + _PIECE_BYTES, size))


def _folder() -> str | None:
    """Where the file goes: the temporary folder, or another one that is on a disk; None for the default.

    Raises:
        OSError: where there is none on a disk: what is moved to a file in memory is not freed.
    """
    default = tempfile.gettempdir()
    if not is_in_memory(default):
        return None
    for folder in (f"{os.sep}var{os.sep}tmp", os.path.expanduser("~"), os.getcwd()):  # noqa: PTH109, PTH111
        if os.access(folder, os.W_OK) and not is_in_memory(folder):
            tell(f"lowtide: {default} is in memory itself: activations are offloaded to {folder} instead (TMPDIR says where)")
            return folder
    raise OSError(errno.ENOSPC, f"{default} is in memory itself: set TMPDIR to a folder on a disk")


@final
class _FileTicket:
    __slots__ = ("_begun", "_board", "_place", "_size")

    def __init__(self, board: FileTier, place: torch.Tensor, size: int) -> None:
        self._board, self._place, self._size = board, place, size
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
            self._board.leave(self._place[piece])
        return storage

    def __del__(self) -> None:
        self._board.give_back(self._place)
