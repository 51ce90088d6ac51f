"""Replacing this process by one that runs a script under the agent, with the heap counter preloaded."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import NoReturn

from lowtide.base.errors import UsageError
from lowtide.runtime.agent.task import Task, agent_command, environment_of, runs_here


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
