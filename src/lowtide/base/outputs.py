"""Files that a user asked for: figures as JSON, pages, several of them at once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from lowtide.base.files import write_file
from lowtide.base.messages import readable, tell


def write_json(file: str, found: Any) -> None:
    """Write figures to a file, for people too."""
    try:
        encoded = msgspec.json.encode(found)
    except UnicodeEncodeError:  # bytes of a command line or a message that are no text in this locale
        encoded = readable(json.dumps(msgspec.to_builtins(found), ensure_ascii=False)).encode()
    write(file, msgspec.json.format(encoded, indent=1))


def replace_json(file: str, found: Any) -> None:
    """Write figures to a file as a whole: whoever reads it, or ends this process meanwhile, finds the old ones or the new."""
    partial = f"{file}.{os.getpid()}.partial"
    try:
        write_json(partial, found)
        Path(partial).replace(file)
    except OSError as error:
        Path(partial).unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, file) from None


def write(file: str, text: str | bytes) -> None:
    """Write what a user asked for.

    Raises:
        OSError: naming the file, if it cannot be written.
    """
    write_file(file, readable(text).encode() if isinstance(text, str) else text)


class Written:
    """Several files that a user asked for: one that cannot be written does not keep the others from it."""

    def __init__(self) -> None:
        """None yet."""
        self._failed: OSError | None = None

    def attempt(self, writes: Callable[..., object], *arguments: Any, **options: Any) -> None:
        """Write one of them."""
        try:
            writes(*arguments, **options)
        except OSError as error:
            self._failed = self._failed or OSError(error.errno, error.strerror, error.filename or "standard output")

    def say(self) -> None:
        """Name the first that could not be written, where the exit code says something else."""
        if self._failed is not None:
            tell(f"lowtide: error: {self._failed.filename}: {self._failed.strerror}")

    def check(self) -> None:
        """When all is done.

        Raises:
            OSError: naming the first that could not be written.
        """
        if self._failed is not None:
            raise self._failed
