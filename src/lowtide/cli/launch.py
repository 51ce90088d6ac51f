"""Replacing this process by one that runs a script under the agent, with the heap counter preloaded."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from lowtide.disk import write_file
from lowtide.errors import UsageError
from lowtide.live.task import Task, agent_command, environment_of, runs_here
from lowtide.tell import readable, tell


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


def check_target(target: str, *, module: bool) -> None:
    """Refuse a script or module that is not there.

    Raises:
        UsageError: naming it.
    """
    if not module:
        if not Path(target).is_file():
            raise UsageError(f"no such script: {target}")
        return
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = importlib.util.find_spec(target)
    except ImportError:
        found = None
    finally:
        sys.path.pop(0)
    if found is None:
        raise UsageError(f"no such module: {target}")


def check_alone() -> None:
    """Refuse to start inside a process that another verb of Lowtide runs already.

    Raises:
        UsageError: in that case.
    """
    if runs_here():
        raise UsageError("this process is run by Lowtide already (`lowtide run` or `record`): use one of them only")


def check_folder(file: str | None, remedy: str = "give another file") -> None:
    """Refuse a file that cannot be written: its folder is not there, or may not be written to.

    Raises:
        UsageError: naming it.
    """
    if file is None:
        return
    if not Path(file).resolve().parent.is_dir():
        raise UsageError(f"the folder of {file} does not exist: make it first")
    if Path(file).is_dir():
        raise UsageError(f"{file} is a folder: give a file")
    if not os.access(file if Path(file).exists() else Path(file).resolve().parent, os.W_OK):
        raise UsageError(f"{file} cannot be written: {remedy}")


def absolute(file: str | None) -> str | None:
    """Where a file lies, wherever the script goes before it is written."""
    return None if file is None else str(Path(file).resolve())


def become(task: Task) -> NoReturn:
    """Replace this process by the agent: its id, its terminal and its exit code stay."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # a shell may start us without
            stream.flush()
    os.execve(sys.executable, agent_command(), environment_of(task))  # noqa: S606 - no shell is wanted
