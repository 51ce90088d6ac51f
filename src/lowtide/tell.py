"""A line for people on standard error, where there is one: scripts close it, and shells start without it."""

from __future__ import annotations

import contextlib
import io
import sys
from typing import TextIO


def stream() -> TextIO:
    """Standard error; where it is closed, something that nobody reads."""
    found = sys.stderr
    return io.StringIO() if found is None or found.closed else found


def tell(line: str) -> None:
    """Write a line."""
    with contextlib.suppress(OSError, ValueError):
        stream().write(f"{line}\n")
