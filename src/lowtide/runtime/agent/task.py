"""What the process of a verb that runs a script is to do, and how it is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Final

import msgspec

from lowtide.runtime.device.heap_counters import library_path

TASK: Final = "LOWTIDE_TASK"
"""Environment variable that carries the task to the agent; the agent removes it."""
ACTIVE: Final = "LOWTIDE_ACTIVE"
"""Environment variable that holds the id of the process in which a budget is in force."""
PRELOAD: Final = "LD_PRELOAD"


def runs_here() -> bool:
    """Whether a verb of the command line runs this very process: a second watcher would count the first one's tensors."""
    return os.environ.get(ACTIVE) == str(os.getpid())


class RunOptions(msgspec.Struct, frozen=True, kw_only=True, tag="run"):
    """What ``lowtide run`` was asked.

    Attributes:
        budget: as the user wrote it.
        keep: modules whose values are never dropped.
        offload: whether values may be moved.
        allow, without: levers, by name.
        plan, save_plan, json: files; None where not asked for.
        quiet: no summary.
        keep_going: whether a budget that cannot be held never ends the script or changes its exit code.
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
    keep_going: bool = False


class RecordOptions(msgspec.Struct, frozen=True, kw_only=True, tag="record"):
    """What ``lowtide record`` was asked.

    Attributes:
        output: the recording.
        operators: whether operators are recorded, or phases only.
        cap_bytes: torch's CPU allocator refuses what would go beyond; 0 for no cap.
        steps: after which the script is ended; 0 for never.
        sizes: what was varied, by name, for `lowtide predict`.
        json: file; None where not asked for.
        quiet: no summary.
    """

    output: str
    operators: bool
    cap_bytes: int
    steps: int = 0
    sizes: dict[str, float] = {}
    json: str | None
    quiet: bool


class TrialOptions(msgspec.Struct, frozen=True, kw_only=True, tag="trial"):
    """A short run that is measured.

    Attributes:
        steps: after which the script is ended.
        budget_bytes: held as by ``lowtide run``; 0 for the plain run.
        cap_bytes: torch's allocator refuses what would go beyond; 0 for no cap.
        allow, without: levers, by name.
        offload: whether values may be moved.
        json: the result.
    """

    steps: int
    budget_bytes: int
    cap_bytes: int
    allow: tuple[str, ...]
    without: tuple[str, ...]
    offload: bool
    json: str


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent is to do.

    Attributes:
        target: script path or module name.
        module: whether the target is a module name.
        arguments: the script's own.
        preload: the user's own LD_PRELOAD, to be put back.
        constants: of the script (names at the top of it), to have other values, as Python writes them.
    """

    target: str
    module: bool
    arguments: tuple[str, ...]
    preload: str | None
    options: RunOptions | RecordOptions | TrialOptions
    constants: dict[str, str] = {}


def read_task(text: str) -> Task:
    """The task that an environment carries."""
    return msgspec.convert(json.loads(text), Task)


def agent_command() -> list[str]:
    """The command of such a process: this interpreter with its options."""
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # the interpreter's own -X, -W, -O
    return [sys.executable, *flags, "-m", "lowtide.runtime.agent.start"]


def environment_of(task: Task) -> dict[str, str]:
    """Its environment: the task, and the heap counter preloaded."""
    environment = dict(os.environ)
    environment[TASK] = json.dumps(msgspec.to_builtins(task))  # letters alone: names of files may be no text in this locale
    library = library_path()
    if library is not None:
        environment[PRELOAD] = f"{library}:{task.preload}" if task.preload else str(library)
    return environment
