"""The Python API: ``lowtide.budget`` and ``lowtide.record``, for scripts and notebooks."""

from __future__ import annotations

import contextlib
import html
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Literal

from lowtide.base.errors import UsageError
from lowtide.base.lever_catalogue import check_levers
from lowtide.base.messages import tell
from lowtide.base.units import Size, as_budget
from lowtide.planning.unit.plan_file import Plan
from lowtide.recording.reader import Recording, read
from lowtide.recording.writer import Writer
from lowtide.runtime.agent.task import runs_here
from lowtide.runtime.control.runtime import Runtime
from lowtide.runtime.control.settings import BudgetSettings
from lowtide.runtime.record import run_recorder
from lowtide.runtime.run_figures import RunOutcome
from lowtide.runtime.torch_state import within_transform

_running: list[Runtime | run_recorder.RunRecorder] = []


class Budgeted:
    """The value of ``with lowtide.budget(...) as run``: figures of the run so far."""

    def __init__(self, runtime: Runtime) -> None:
        """Take the figures from a runtime."""
        self._runtime = runtime

    @property
    def outcome(self) -> RunOutcome:
        """Figures of the run so far: budget, steps, plan."""
        return self._runtime.outcome()

    @property
    def plan(self) -> Plan | None:
        """The plan in force, which names values by site; None while there is none."""
        return self._runtime.plan


@contextlib.contextmanager
def budget(
    size: str | float | Size | None,
    *,
    keep: str | tuple[str, ...] = (),
    plan: Plan | None = None,
    offload: bool = True,
    allow: str | tuple[str, ...] = (),
    without: str | tuple[str, ...] = (),
    keep_going: bool = False,
) -> Iterator[Budgeted]:
    """Train within a memory budget; works as a context manager and as a decorator.

    In a process started by ``lowtide run``, ``record``, ``min`` or ``batch``, the command decides: the block trains with the
    command's settings instead of these arguments, one line on standard error says so, and the figures are the command's.

    Args:
        size: the budget: ``"6 GiB"``, bytes, ``"50%"`` (of what training adds to parameters, buffers and optimizer states),
            ``"minimum"`` (the lowest peak that plans reach), ``"slowdown 10%"`` (the least memory that is predicted to take so
            much more time; ``"slowdown 10% within 6GiB"`` never takes more than that size), or ``"auto"`` (CUDA only). Without
            a budget: ``"rescue"`` (steps that fit into memory are left alone, larger ones evict what is in their way), or None
            (no limit; every step is intercepted, and an operator that runs out of memory is retried).
        keep: paths of modules (``"blocks.0"``) whose saved values are never dropped.
        plan: a plan to start with (``lowtide.planning.unit.plan_file.load_plan``).
        offload: whether activations may be offloaded (to a file in ``TMPDIR``; for CUDA, to pinned host memory).
        allow: memory optimizations that may be used (:mod:`lowtide.base.lever_catalogue`). The automatic ones
            (``move-gradients``, ``move-states``, ``sliced-update``) are used wherever a budget needs them, without being
            named.
        without: memory optimizations that must not be used.
        keep_going: whether to continue training even if the first steps show that the budget cannot be held;
            ``outcome.held`` says whether it was.

    Raises:
        SizeError: if the size cannot be parsed, or is ``"auto"`` and there is no CUDA device.
        UsageError: if a budget or a recording is active already, a function transform is, or a memory optimization does not
            exist.
        BudgetError: at the beginning of the second or third step, if the budget cannot be held; never later.
    """
    _check_free()
    asked = as_budget(size)
    allowed, excluded = check_levers(allow, without)
    kept = (keep,) if isinstance(keep, str) else tuple(keep)
    runtime = Runtime(BudgetSettings(
        budget=asked, keep=kept, plan=plan, offload=offload, allow=allowed, without=excluded, keep_going=keep_going
    ))
    if runs_here():
        tell("lowtide: lowtide.budget in the script is ignored: the lowtide command that runs it takes precedence")
        yield Budgeted(Runtime.of_command or runtime)
        return
    runtime.start()
    _running.append(runtime)
    try:
        yield Budgeted(runtime)
    finally:
        try:
            runtime.stop()
        finally:
            _running.remove(runtime)


def _check_free() -> None:
    """Refuse to begin where another block is active, or where torch allows no saved-tensor hooks.

    Raises:
        UsageError: if so.
    """
    if _running:
        raise UsageError("a budget or a recording is already active: leave it before starting another")
    if within_transform():
        raise UsageError("a budget or a recording cannot start inside a torch.func transform: start it around the call")


class Recorded:
    """The value of ``with lowtide.record(...) as run``: the recording, once the block has ended."""

    def __init__(self, path: Path) -> None:
        """Note the path; the recording is read on first access."""
        self.path = path

    @cached_property
    def recording(self) -> Recording:
        """The contents of the recording.

        Raises:
            RecordingError: if it cannot be read.
        """
        return read(self.path)

    def __repr__(self) -> str:
        """The path of the recording, and the command that shows it."""
        return f"<recording {self.path}: view it with `lowtide report {self.path}`>"

    def _repr_html_(self) -> str:
        """The HTML page of the recording, for a notebook."""
        from lowtide.recording.explanation.explanation import explain
        from lowtide.report.html import page

        shown = html.escape(page(explain(self.recording)))
        return f'<iframe srcdoc="{shown}" style="width:100%;height:900px;border:0"></iframe>'


@contextlib.contextmanager
def record(path: str | Path = "recording.lowtide", *, level: Literal["ops", "phases"] = "ops") -> Iterator[Recorded]:
    """Record the memory of the block; works as a context manager and as a decorator.

    In a process started by ``lowtide run``, ``record``, ``min`` or ``batch``, nothing is recorded here, and one line on
    standard error says so.

    Args:
        path: the file to write; an earlier recording there is replaced, unless the block fails before its first step.
        level: ``"ops"`` records every operator, ``"phases"`` only the beginnings and ends of phases.

    Raises:
        UsageError: if a budget or a recording is active already, a function transform is, or the level does not exist.
        RecordingError: if the file cannot be written, or exists and is not a recording.
    """
    if level not in ("ops", "phases"):
        raise UsageError(f"unknown level {level!r}: use 'ops' or 'phases'")
    _check_free()
    file = Path(path)
    if runs_here():
        tell(f"lowtide: lowtide.record in the script is ignored ({file} is not written): the lowtide command takes precedence")
        yield Recorded(file)
        return
    writer = Writer(file, {"script": sys.argv[0], "arguments": sys.argv[1:]})
    watcher = run_recorder.begin(writer, operators=level == "ops")
    _running.append(watcher)
    failed: BaseException | None = None
    try:
        yield Recorded(file)
    except BaseException as error:
        failed = error
        raise
    finally:
        run_recorder.end(watcher, complete=failed is None)
        writer.close(code=int(failed is not None), error=failed)
        _running.remove(watcher)
