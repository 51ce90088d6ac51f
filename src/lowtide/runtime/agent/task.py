"""The task of an agent process, and the command and environment that start it."""

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
"""Environment variable that holds the id of the process in which the agent runs a script."""
PRELOAD: Final = "LD_PRELOAD"


def runs_here() -> bool:
    """Whether this process is an agent's: a second watcher in it would count the first one's tensors."""
    return os.environ.get(ACTIVE) == str(os.getpid())


LIBRARY_CACHES: Final = (
    (("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY"), 256),
    (("LRU_CACHE_CAPACITY",), 16),
)
"""Entries of oneDNN's cache of prepared kernels, and of ideep's caches in front of it, by environment variable.

Both keep 1,024 by default: one for each kernel and shape, with its buffers, never freed. Where lengths change between steps,
a small network in bfloat16 keeps 200 MiB after 60 lengths, and with these limits 65 MiB, in the same time. A network with more
than 256 different kernels in a step prepares some of them again, which takes 0.7 ms each.
"""


class RunOptions(msgspec.Struct, frozen=True, kw_only=True, tag="run"):
    """The options of ``lowtide run``.

    Attributes:
        budget: the budget as the user wrote it.
        keep: modules whose values are never dropped.
        offload: whether values may be offloaded.
        allow, without: memory optimizations, by name, that are allowed or excluded.
        plan, save_plan, json: paths of the plan to follow, of the plan to write and of the figures; None if not asked for.
        quiet: whether to show no summary.
        keep_going: if true, a budget that cannot be held neither ends the script nor changes its exit code.
        cache: whether to use, and keep for later runs, what runs of the script recorded.
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
    cache: bool = True


class RecordOptions(msgspec.Struct, frozen=True, kw_only=True, tag="record"):
    """The options of ``lowtide record``.

    Attributes:
        output: path of the recording.
        operators: whether to record operators, or only phases.
        cap_bytes: cap beyond which torch's CPU allocator refuses requests; 0 for no cap.
        steps: number of steps after which to end the script; 0 for never.
        sizes: the sizes that are varied, by name, for `lowtide predict`.
        json: path of the figures; None if not asked for.
        quiet: whether to show no summary.
    """

    output: str
    operators: bool
    cap_bytes: int
    steps: int = 0
    sizes: dict[str, float] = {}
    json: str | None
    quiet: bool


class TrialOptions(msgspec.Struct, frozen=True, kw_only=True, tag="trial"):
    """The options of a short run that is measured (``lowtide min``, ``lowtide batch`` and other trials).

    Attributes:
        steps: number of steps after which to end the script.
        budget_bytes: budget to hold, as by ``lowtide run``; 0 for the plain run.
        cap_bytes: cap beyond which torch's allocator refuses requests; 0 for no cap of its own.
        allow, without: memory optimizations, by name, that are allowed or excluded.
        offload: whether values may be offloaded.
        json: path of the result.
    """

    steps: int
    budget_bytes: int
    cap_bytes: int
    allow: tuple[str, ...]
    without: tuple[str, ...]
    offload: bool
    json: str


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """A task of the agent.

    Attributes:
        target: script path or module name.
        module: whether the target is a module name.
        arguments: the script's own arguments.
        preload: the user's own ``LD_PRELOAD``, which the agent restores; None if it was not set.
        options: the command's options; their type says which command it is.
        constants: Python expressions by name, for constants that the script assigns at its top level and that are to have
            other values.
    """

    target: str
    module: bool
    arguments: tuple[str, ...]
    preload: str | None
    options: RunOptions | RecordOptions | TrialOptions
    constants: dict[str, str] = {}


def read_task(text: str) -> Task:
    """Decode the task from the text in :data:`TASK`."""
    return msgspec.convert(json.loads(text), Task)


def agent_command() -> list[str]:
    """The command of an agent process: this interpreter with its own options."""
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # the interpreter's own -X, -W, -O
    return [sys.executable, *flags, "-m", "lowtide.runtime.agent.start"]


def environment_of(task: Task) -> dict[str, str]:
    """The environment of an agent process: this one, with the task, and with the heap counter preloaded.

    Under a budget, oneDNN's caches are limited (:data:`LIBRARY_CACHES`), unless the user has set a limit.
    """
    environment = dict(os.environ)
    if isinstance(task.options, RunOptions) or (isinstance(task.options, TrialOptions) and task.options.budget_bytes):
        for names, entries in LIBRARY_CACHES:
            if not any(name in environment for name in names):
                environment[names[0]] = str(entries)
    environment[TASK] = json.dumps(msgspec.to_builtins(task))  # ASCII only: the locale may not encode file names
    library = library_path()
    if library is not None:
        environment[PRELOAD] = f"{library}:{task.preload}" if task.preload else str(library)
    return environment
