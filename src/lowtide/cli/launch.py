"""Replaces this process by one that runs a script under the agent, with the heap counter preloaded."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import NoReturn

from lowtide.base.errors import UsageError
from lowtide.runtime.agent.task import Task, agent_command, environment_of, runs_here


def check_target(target: str, *, module: bool) -> None:
    """Check that a script or module exists.

    Raises:
        UsageError: if it does not; names it.
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
    """Check that this process is not run by another verb of Lowtide already.

    Raises:
        UsageError: if it is.
    """
    if runs_here():
        raise UsageError("Lowtide already runs this process (`lowtide run` or `lowtide record`): use only one of them")


def check_folder(file: str | None, remedy: str = "give another file") -> None:
    """Check that a file can be written: its folder exists and is writable, and the file itself is not a folder.

    Args:
        file: its path; None passes.
        remedy: advice at the end of the message.

    Raises:
        UsageError: if it cannot; names it.
    """
    if file is None:
        return
    if not Path(file).resolve().parent.is_dir():
        raise UsageError(f"the folder of {file} does not exist: create it first")
    if Path(file).is_dir():
        raise UsageError(f"{file} is a folder: give a file")
    if not os.access(file if Path(file).exists() else Path(file).resolve().parent, os.W_OK):
        raise UsageError(f"{file} cannot be written: {remedy}")


def absolute(file: str | None) -> str | None:
    """Absolute path of a file, because the script may change its working directory before the file is written."""
    return None if file is None else str(Path(file).resolve())


def become(task: Task) -> NoReturn:
    """Replace this process by the agent, which keeps the process id and the terminal; the exit code becomes the agent's."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # a shell may start us with closed streams
            stream.flush()
    os.execve(sys.executable, agent_command(), environment_of(task))  # noqa: S606 - no shell is wanted
