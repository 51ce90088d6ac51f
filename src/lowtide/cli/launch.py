"""Replacing this process by one that runs a script under the agent, with the heap counter preloaded."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec

from lowtide.errors import UsageError
from lowtide.live.native import library_path

TASK: Final = "LOWTIDE_TASK"
"""Environment variable that carries the task to the agent; the agent removes it."""
ACTIVE: Final = "LOWTIDE_ACTIVE"
"""Environment variable that holds the id of the process in which a budget is in force."""
PRELOAD: Final = "LD_PRELOAD"


class RunOptions(msgspec.Struct, frozen=True, kw_only=True, tag="run"):
    """What ``lowtide run`` was asked.

    Attributes:
        budget: as the user wrote it.
        keep: modules whose values are never dropped.
        offload: whether values may be moved.
        allow, without: levers, by name.
        plan, save_plan, json: files; None where not asked for.
        quiet: no summary.
    """

    budget: str
    keep: tuple[str, ...]
    offload: bool
    allow: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    plan: str | None
    save_plan: str | None
    json: str | None
    quiet: bool


class RecordOptions(msgspec.Struct, frozen=True, kw_only=True, tag="record"):
    """What ``lowtide record`` was asked.

    Attributes:
        output: the recording.
        operators: whether operators are recorded, or phases only.
        cap_bytes: torch's CPU allocator refuses what would go beyond; 0 for no cap.
        json: file; None where not asked for.
        quiet: no summary.
    """

    output: str
    operators: bool
    cap_bytes: int
    json: str | None
    quiet: bool


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent is to do.

    Attributes:
        target: script path or module name.
        module: whether the target is a module name.
        arguments: the script's own.
        preload: the user's own LD_PRELOAD, to be put back.
    """

    target: str
    module: bool
    arguments: tuple[str, ...]
    preload: str | None
    options: RunOptions | RecordOptions


def write_json(file: str, found: Any) -> None:
    """Write figures to a file, for people too."""
    try:
        text = msgspec.json.format(msgspec.json.encode(found), indent=1)
    except UnicodeEncodeError:  # bytes of a command line or a message that are no text
        text = json.dumps(msgspec.to_builtins(found), indent=1).encode()
    Path(file).write_bytes(text)


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
    """Refuse to start inside a process in which a budget is in force.

    Raises:
        UsageError: in that case.
    """
    if os.environ.get(ACTIVE) == str(os.getpid()):
        raise UsageError("a budget is in force in this process already: use one `lowtide run` only")


def check_folder(file: str | None) -> None:
    """Refuse a file that cannot be written because its folder is not there.

    Raises:
        UsageError: naming it.
    """
    if file is None:
        return
    if not Path(file).resolve().parent.is_dir():
        raise UsageError(f"the folder of {file} does not exist: make it first")
    if Path(file).is_dir():
        raise UsageError(f"{file} is a folder: give a file")


def become(task: Task) -> NoReturn:
    """Replace this process by the agent: its id, its terminal and its exit code stay."""
    environment = dict(os.environ)
    environment[TASK] = msgspec.json.encode(task).decode()
    library = library_path()
    if library is not None:
        environment[PRELOAD] = f"{library}:{task.preload}" if task.preload else str(library)
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # the interpreter's own -X, -W, -O
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *flags, "-m", "lowtide.live.agent"], environment)  # noqa: S606 - no shell is wanted
