"""Writes messages to standard error if it is open: scripts close it, and shells may start without it."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any, TextIO, cast

_DRAWN = "█░▒■▁▂▃▄▅▆▇…±⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_LETTERS = r"#.-*.,-=+*%~~|/-\|/-\|/"
_PLAIN = str.maketrans(_DRAWN, _LETTERS)
"""ASCII replacements for drawing characters, for terminals without them; equally wide, so that columns stay aligned."""


class LenientStream:
    """A text stream for people: drawing characters that it cannot encode become ASCII, and a failed write is ignored.

    Only :class:`BrokenPipeError` is passed on.
    """

    def __init__(self, stream: TextIO) -> None:
        """Wrap a stream."""
        self._stream = stream
        self._plain = _PLAIN
        with contextlib.suppress(UnicodeError, LookupError):
            "█▁…".encode(getattr(stream, "encoding", None) or "utf-8")
            self._plain = {}

    def write(self, text: str) -> int:
        """Write text in the form that the stream can show; return the text's length."""
        try:
            self._stream.write(readable(text).translate(self._plain))
        except BrokenPipeError:
            raise
        except OSError:  # a log on a full disk
            pass
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            raise
        except OSError:
            pass

    def __getattr__(self, name: str) -> Any:
        """Delegate everything else to the stream."""
        return getattr(self._stream, name)


def shown(stream: TextIO) -> TextIO:
    """Wrap any stream so that reports can draw on it."""
    return cast("TextIO", LenientStream(stream))


def readable(text: str) -> str:
    """Text that can be encoded as UTF-8, and so be written to Lowtide's files.

    File names can contain bytes that the locale cannot decode (surrogate escapes): they are decoded as UTF-8, and replaced if
    they are not UTF-8 either.
    """
    if text.isascii():
        return text
    return text.encode("utf-8", "surrogateescape" if not _lone(text) else "replace").decode("utf-8", "replace")


def named_here(text: str) -> str:
    """Convert text read from one of Lowtide's files to this locale's form of file names, arguments and variables."""
    return text if text.isascii() else os.fsdecode(text.encode("utf-8", "surrogateescape" if not _lone(text) else "replace"))


def _lone(text: str) -> bool:
    """Whether the text contains a surrogate that does not stand for an undecodable byte."""
    return any("\ud800" <= c <= "\udfff" and not "\udc80" <= c <= "\udcff" for c in text)


def stream() -> TextIO:
    """Standard error; a buffer that is thrown away if standard error is closed."""
    found = sys.stderr
    return io.StringIO() if found is None or found.closed else shown(found)


def tell(line: str) -> None:
    """Write a line to standard error, and ignore it if that fails."""
    with contextlib.suppress(OSError, ValueError):
        stream().write(f"{readable(line)}\n")
