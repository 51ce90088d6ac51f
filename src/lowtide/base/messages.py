"""A line for people on standard error, where there is one: scripts close it, and shells start without it."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any, TextIO, cast

_DRAWN = "█░▒■▁▂▃▄▅▆▇…±⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_LETTERS = r"#.-*.,-=+*%~~|/-\|/-\|/"
_PLAIN = str.maketrans(_DRAWN, _LETTERS)
"""What stands for what is drawn, where a terminal has letters alone: as wide, so that columns stay columns."""


class LenientStream:
    """A stream for people: it gets letters for what it cannot show, and where it takes no more, that ends nothing."""

    def __init__(self, stream: TextIO) -> None:
        """Write to a stream."""
        self._stream = stream
        self._plain = _PLAIN
        with contextlib.suppress(UnicodeError, LookupError):
            "█▁…".encode(getattr(stream, "encoding", None) or "utf-8")
            self._plain = {}

    def write(self, text: str) -> int:
        """Write what the stream can show."""
        try:
            self._stream.write(readable(text).translate(self._plain))
        except BrokenPipeError:
            raise
        except OSError:  # a log on a full disk
            pass
        return len(text)

    def flush(self) -> None:
        """Write what waits."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            raise
        except OSError:
            pass

    def __getattr__(self, name: str) -> Any:
        """All else is the stream's."""
        return getattr(self._stream, name)


def shown(stream: TextIO) -> TextIO:
    """A stream on which reports can draw, whatever it is."""
    return cast("TextIO", LenientStream(stream))


def readable(text: str) -> str:
    """Text as UTF-8 has it: names of files come with bytes that are no text in the locale, and no file of ours takes those."""
    if text.isascii():
        return text
    return text.encode("utf-8", "surrogateescape" if not _lone(text) else "replace").decode("utf-8", "replace")


def named_here(text: str) -> str:
    """Text out of a file of ours, as this locale has names of files, arguments and variables."""
    return text if text.isascii() else os.fsdecode(text.encode("utf-8", "surrogateescape" if not _lone(text) else "replace"))


def _lone(text: str) -> bool:
    """Whether it holds half a character that stands for no byte."""
    return any("\ud800" <= c <= "\udfff" and not "\udc80" <= c <= "\udcff" for c in text)


def stream() -> TextIO:
    """Standard error; where it is closed, something that nobody reads."""
    found = sys.stderr
    return io.StringIO() if found is None or found.closed else shown(found)


def tell(line: str) -> None:
    """Write a line."""
    with contextlib.suppress(OSError, ValueError):
        stream().write(f"{readable(line)}\n")
