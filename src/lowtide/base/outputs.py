"""Writes the files that the user asked for: figures as JSON, pages, several files at once."""

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
    """Write figures to a file as indented JSON."""
    try:
        encoded = msgspec.json.encode(found)
    except UnicodeEncodeError:  # a command line or a message contains bytes that this locale cannot decode
        encoded = readable(json.dumps(msgspec.to_builtins(found), ensure_ascii=False)).encode()
    write(file, msgspec.json.format(encoded, indent=1))


def replace_json(file: str, found: Any) -> None:
    """Replace a JSON file atomically: a reader sees the old figures or the new ones, even if this process is killed.

    Raises:
        OSError: with the file's name, if it cannot be written; the old file is intact.
    """
    partial = f"{file}.{os.getpid()}.partial"
    try:
        write_json(partial, found)
        Path(partial).replace(file)
    except OSError as error:
        Path(partial).unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, file) from None


def write(file: str, text: str | bytes) -> None:
    """Write a file that the user asked for.

    Raises:
        OSError: with the file's name, if it cannot be written.
    """
    write_file(file, readable(text).encode() if isinstance(text, str) else text)


class Written:
    """Writes several files that the user asked for: if one fails, the others are still written."""

    def __init__(self) -> None:
        """Start without failures."""
        self._failed: OSError | None = None

    def attempt(self, writes: Callable[..., object], *arguments: Any, **options: Any) -> None:
        """Write one file by calling `writes`; remember the first failure."""
        try:
            writes(*arguments, **options)
        except OSError as error:
            self._failed = self._failed or OSError(error.errno, error.strerror, error.filename or "standard output")

    def say(self) -> None:
        """Report the first file that could not be written, for use when the exit code must say something else."""
        if self._failed is not None:
            tell(f"lowtide: error: {self._failed.filename}: {self._failed.strerror}")

    def check(self) -> None:
        """Raise the first failure; call it after the last file.

        Raises:
            OSError: naming the first file that could not be written.
        """
        if self._failed is not None:
            raise self._failed
