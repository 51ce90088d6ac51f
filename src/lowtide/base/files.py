"""Writes files while the user's training runs, which a full disk must not end. Standard library only."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from typing import Final

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_SQLITE_IO, _SQLITE_FULL = 10, 13
ROOM_FOR_TEMPORARY_FILES = "make room there, or set TMPDIR to a folder with free space"
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
_ZEROS = bytes(1 << 16)
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_AT_PLACE: Final = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)  # file, address, bytes, place in the file
_LIBC.pwrite.argtypes = _LIBC.pread.argtypes = _AT_PLACE
_LIBC.pwrite.restype = _LIBC.pread.restype = ctypes.c_ssize_t


def reserve(file: int, size: int, *, since: int = 0) -> None:
    """Allocate disk space for the first `size` bytes of a file; the first `since` bytes already have it.

    Without it, writing to a mapping of the file kills the process with SIGBUS once the disk is full.

    Raises:
        OSError: if there is no room.
    """
    allocate = getattr(os, "posix_fallocate", None)  # missing on macOS
    if allocate is not None:
        try:
            allocate(file, since, size - since)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
        else:
            return
    at = since
    while at < size:
        at += os.pwrite(file, _ZEROS[: size - at], at)


def write_memory(file: int, address: int, size: int, at: int) -> None:
    """Write ``size`` bytes of the process's memory to a file, ``at`` bytes from its beginning; other threads run meanwhile.

    Raises:
        OSError: if they could not all be written.
    """
    _transfer(_LIBC.pwrite, file, address, size, at)


def read_memory(file: int, address: int, size: int, at: int) -> None:
    """Read ``size`` bytes of a file into the process's memory, ``at`` bytes from its beginning; other threads run meanwhile.

    Raises:
        OSError: if they could not all be read.
    """
    _transfer(_LIBC.pread, file, address, size, at)


def _transfer(call: Callable[[int, int, int, int], int], file: int, address: int, size: int, at: int) -> None:
    done = 0
    while done < size:
        moved = call(file, address + done, size - done, at + done)
        if moved > 0:
            done += moved
            continue
        error = ctypes.get_errno() if moved < 0 else errno.EIO  # 0: the file ends here
        if error != errno.EINTR:
            raise OSError(error, os.strerror(error))


def write(file: int, data: bytes | memoryview) -> None:
    """Write all of `data`: on a nearly full disk a write succeeds partially, and only the next one fails.

    Raises:
        OSError: if there is no room.
    """
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


def write_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a whole file.

    Raises:
        OSError: with the file's name, which the system's own error for a full disk lacks.
    """
    try:
        with open(path, "wb") as file:  # noqa: PTH123 - not worth importing pathlib
            file.write(data)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None


def is_full(error: BaseException) -> bool:
    """Whether the disk is full or failing (an ``OSError`` or an SQLite error), which the user could not have foreseen."""
    code = getattr(error, "sqlite_errorcode", None)
    if code is not None:
        return code & 0xFF in (_SQLITE_IO, _SQLITE_FULL)
    return isinstance(error, OSError) and error.errno in _FULL


def why(error: BaseException) -> str:
    """A system error's message, in lower case for the middle of a sentence."""
    if getattr(error, "sqlite_errorcode", None) == _SQLITE_FULL:
        text = os.strerror(errno.ENOSPC)
    else:
        text = str(getattr(error, "strerror", None) or error)
    return text[:1].lower() + text[1:]
