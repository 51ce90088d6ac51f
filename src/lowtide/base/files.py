"""Files that are written while somebody's training runs: a disk that is full must not end it. Standard library only."""

from __future__ import annotations

import errno
import os

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_SQLITE_IO, _SQLITE_FULL = 10, 13
ROOM_FOR_TEMPORARY_FILES = "make room there, or set TMPDIR to a folder that has it"
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
_ZEROS = bytes(1 << 16)


def reserve(file: int, size: int, *, since: int = 0) -> None:
    """Have the disk hold so many bytes of a file, of which it holds the first `since` already.

    Whoever writes to a mapping of bytes that the disk turns out not to have is ended by SIGBUS.

    Raises:
        OSError: if there is no room.
    """
    allocate = getattr(os, "posix_fallocate", None)  # macOS has none
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


def write(file: int, data: bytes | memoryview) -> None:
    """Write all of it: a disk that is nearly full takes a part, and complains only of the next.

    Raises:
        OSError: if there is no room.
    """
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


def write_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a whole file.

    Raises:
        OSError: naming it, which one of a full disk does not by itself.
    """
    try:
        with open(path, "wb") as file:  # noqa: PTH123 - pathlib is not imported for it
            file.write(data)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None


def is_full(error: BaseException) -> bool:
    """Whether it is room that is missing, or the disk that fails: nothing that whoever started us could have known."""
    code = getattr(error, "sqlite_errorcode", None)
    if code is not None:
        return code & 0xFF in (_SQLITE_IO, _SQLITE_FULL)
    return isinstance(error, OSError) and error.errno in _FULL


def why(error: BaseException) -> str:
    """What a system's error says, for the middle of a sentence."""
    if getattr(error, "sqlite_errorcode", None) == _SQLITE_FULL:
        text = os.strerror(errno.ENOSPC)
    else:
        text = str(getattr(error, "strerror", None) or error)
    return text[:1].lower() + text[1:]
