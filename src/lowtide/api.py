"""The facade: ``lowtide.budget`` and ``lowtide.record`` for scripts and notebooks."""

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

_running: list[Runtime | run_recorder.RunRecorder] = []


class Budgeted:
    """What ``with lowtide.budget(...) as run`` gives: figures of the run so far."""

    def __init__(self, runtime: Runtime) -> None:
        """Look at a runtime."""
        self._runtime = runtime

    @property
    def outcome(self) -> RunOutcome:
        """Budget, steps and plan."""
        return self._runtime.outcome()

    @property
    def plan(self) -> Plan | None:
        """The plan in force, by site."""
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
    """Train within so many bytes: a context manager, and a decorator.

    In a process that the command line runs (``lowtide run``, ``record``, ``min``, ``batch``), the command decides: the
    block is trained as the command says, one line says so, and figures are the command's.

    Args:
        size: ``"6 GiB"``, ``"50%"``, bytes, ``"auto"`` (CUDA), or None: no limit, only rescue from out-of-memory.
        keep: paths of modules (``"blocks.0"``) whose saved values are never dropped.
        plan: a plan to begin with (``lowtide.planning.unit.plan_file.load_plan``).
        offload: whether activations may be offloaded (to a file in ``TMPDIR``; to pinned host memory for CUDA).
        allow: memory optimizations that may be used (:mod:`lowtide.base.lever_catalogue`); those that
            are exact are used where they are needed anyhow.
        without: memory optimizations that must not be used.
        keep_going: whether training goes on even where the first steps show that the budget cannot be held; ``outcome.held``
            says whether it was.

    Raises:
        SizeError: if the size cannot be read, or is ``"auto"`` and there is no CUDA device.
        UsageError: if a budget is in force already, or there is no such memory optimization.
        BudgetError: at the beginning of the second or third step, if the budget cannot be held; never later.
    """
    if _running:
        raise UsageError("a budget is in force already (or a recording is made): leave it before another begins")
    asked = as_budget(size)
    allowed, excluded = check_levers(allow, without)
    kept = (keep,) if isinstance(keep, str) else tuple(keep)
    runtime = Runtime(BudgetSettings(
        budget=asked, keep=kept, plan=plan, offload=offload, allow=allowed, without=excluded, keep_going=keep_going
    ))
    if runs_here():
        tell("lowtide: the script's own lowtide.budget is not used: the command that runs it decides")
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


class Recorded:
    """What ``with lowtide.record(...) as run`` gives: the recording, once the block has ended."""

    def __init__(self, path: Path) -> None:
        """Nothing is read yet."""
        self.path = path

    @cached_property
    def recording(self) -> Recording:
        """The recording, read.

        Raises:
            RecordingError: if it cannot be read.
        """
        return read(self.path)

    def __repr__(self) -> str:
        """Where it is, and what shows it."""
        return f"<recording {self.path}: `lowtide report {self.path}` shows it>"

    def _repr_html_(self) -> str:
        """The page, in a notebook."""
        from lowtide.recording.explanation.explanation import explain
        from lowtide.report.html import page

        shown = html.escape(page(explain(self.recording)))
        return f'<iframe srcdoc="{shown}" style="width:100%;height:900px;border:0"></iframe>'


@contextlib.contextmanager
def record(path: str | Path = "recording.lowtide", *, level: Literal["ops", "phases"] = "ops") -> Iterator[Recorded]:
    """Record what happens in the block: a context manager, and a decorator.

    In a process that the command line runs (``lowtide run``, ``record``, ``min``, ``batch``), nothing is recorded here, and
    one line says so.

    Args:
        path: the file to write; what was there is replaced.
        level: every operator, or only where phases begin and end.

    Raises:
        UsageError: if a budget is in force or a recording is made already, or the level is none.
        RecordingError: if the file cannot be written, or is there and is no recording.
    """
    if level not in ("ops", "phases"):
        raise UsageError(f"no level {level!r}: there are ops and phases")
    if _running:
        raise UsageError("a budget is in force already (or a recording is made): leave it before another begins")
    file = Path(path)
    if runs_here():
        tell(f"lowtide: the script's own lowtide.record writes no {file}: the command that runs it decides")
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
