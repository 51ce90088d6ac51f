"""``lowtide leak``: whether a program leaks, what leaks, and where."""

from __future__ import annotations

import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import click

from lowtide.base.errors import UsageError
from lowtide.base.files import ROOM_FOR_TEMPORARY_FILES
from lowtide.base.messages import tell
from lowtide.base.outputs import Written, write, write_json
from lowtide.base.processes import end_on_sigterm
from lowtide.base.units import parse_bytes
from lowtide.cli.launch import check_alone, check_folder
from lowtide.cli.script import Finite, ScriptOrCommand, command_of, takes_script
from lowtide.studies.leak.watch import Progress, Watch, Watched

LEAST_STEPS: Final = 50
"""Fewer steps never give a verdict."""
_LEAST_ROOM: Final = 1 << 20
"""With less free disk space than this, bytes, samples may have had no room."""


def tolerance_of(tolerance: str | None, memory_left: str | None, planned_steps: int | None) -> float:
    """Tolerated growth, bytes per step.

    Raises:
        UsageError: if the options do not go together.
    """
    from lowtide.studies.leak.verdict import TOLERANCE

    if (memory_left is None) != (planned_steps is None):
        raise UsageError("give --memory-left and --planned-steps together: the tolerance is the one divided by the other")
    if memory_left is not None and planned_steps is not None:
        if tolerance is not None:
            raise UsageError("give --tolerance, or --memory-left with --planned-steps, not both")
        return parse_bytes(memory_left) / planned_steps
    return TOLERANCE if tolerance is None else float(parse_bytes(tolerance))


@click.command(cls=ScriptOrCommand, context_settings={"allow_interspersed_args": False})
@click.option("--steps", type=click.IntRange(min=LEAST_STEPS), default=300, show_default=True, help="Steps per process.")
@click.option(
    "--processes",
    type=click.IntRange(min=1, max=20),
    default=2,
    show_default=True,
    help="Fresh processes that must agree; one more runs if they do not.",
)
@click.option("--tolerance", metavar="SIZE", help="Growth per step that is not a leak.  [default: 1KiB]")
@click.option("--memory-left", metavar="SIZE", help="With --planned-steps: memory that the whole job may fill.")
@click.option("--planned-steps", type=click.IntRange(min=1), help="With --memory-left: steps of the whole job.")
@click.option("--step-line", metavar="REGEX", help="A step ends at each line of standard output that matches.")
@click.option(
    "--every",
    type=Finite(min=0.001),
    default=0.1,
    show_default=True,
    metavar="SECONDS",
    help="Length of a step if nothing else marks steps.",
)
@click.option(
    "--samples-per-step", type=Finite(min=0, min_open=True), default=1.0, help="Batch size, for the rate."
)
@click.option(
    "--who/--no-who", default=True, help="Find the lines, types and tensors of a leak, in one more process."
)
@click.option("--deep", is_flag=True, help="Find native stacks too, with memray.")
@click.option(
    "--ablate",
    is_flag=True,
    help="Find the part that grows, by experiment: switch off parts and layers of the model, in about twenty more processes.",
)
@click.option(
    "--timeout", type=Finite(min=0, min_open=True), metavar="SECONDS", help="Kill a process that runs longer."
)
@click.option("--fail", is_flag=True, help="Exit with code 1 if the program leaks.")
@click.option("--json", "json_file", metavar="FILE", help="Write all results as JSON.")
@click.option("--html", "html_file", metavar="FILE", help="Write an HTML page with plots.")
@click.option("--quiet", is_flag=True, help="Show no summary, no progress, and none of the program's output.")
@takes_script
def leak(
    *,
    steps: int,
    processes: int,
    tolerance: str | None,
    memory_left: str | None,
    planned_steps: int | None,
    step_line: str | None,
    every: float,
    samples_per_step: float,
    who: bool,
    deep: bool,
    ablate: bool,
    timeout: float | None,
    fail: bool,
    json_file: str | None,
    html_file: str | None,
    quiet: bool,
    module: bool,
    script: str,
    arguments: tuple[str, ...],
) -> int:
    """Test whether SCRIPT (or, after `--`, any COMMAND) leaks memory.

    The verdict is leak, clean, or inconclusive. The program runs in fresh processes, each of which is ended after --steps
    steps. A step is an optimizer step of torch, a batch of Keras or of a torch data loader, a call of lowtide.step(), a line
    that matches --step-line, or a tick of the clock. The memory that the program holds is measured after each step; growth
    that is certainly above the tolerance is a leak. What the first process prints goes to standard output.
    """
    check_alone()
    end_on_sigterm()
    command = command_of(script, arguments, module=module)
    allowed = tolerance_of(tolerance, memory_left, planned_steps)
    for file in (json_file, html_file):
        check_folder(file)
    if step_line is not None:
        try:
            re.compile(step_line)
        except re.error as error:
            raise UsageError(f"--step-line {step_line!r} is not a regular expression: {error}") from None
    if deep:
        _check_memray()
    from lowtide.report.leak import page, show
    from lowtide.studies.leak.findings import explain_study, suspects_of, to_json
    from lowtide.studies.leak.study import audits_of, study
    from lowtide.studies.leak.verdict import Verdict, threshold_of

    watch = Watch(steps=steps, lines=step_line or "", every_seconds=every, timeout_seconds=timeout or 0.0)
    with _progress(steps, quiet=quiet) as told:
        found = study(command, watch, tolerance=allowed, processes=processes, progress=told, quiet=quiet)
        last = found.runs[-1]
        suspects: tuple[Any, ...] = ()
        culprit = found.verdict.culprit
        elsewhere = culprit is not None and culprit.name == "workers"  # child processes are not searched
        if deep or (who and found.verdict.verdict is Verdict.LEAK and not elsewhere):
            told.began("looking for what grows")
            rate = 0.0 if culprit is None else culprit.trend.rate
            looking = replace(watch, census=True, census_kind=last.kind, audits=audits_of(watch.steps))
            suspects = suspects_of(_looked(command, looking, told), rate)
            if deep:
                native = suspects_of(_looked(command, replace(looking, deep=True), told), rate)
                suspects = (*suspects, *(s for s in native if s.kind == "native"))
        counter = culprit.name if culprit is not None and found.verdict.verdict is Verdict.LEAK else "held"
        limit = threshold_of(counter, allowed, found.run.children)
        parts = _ablated(command, watch, limit, counter, told) if ablate and last.steps and not last.code else None
    explained = explain_study(command, found, suspects, parts, samples_per_step=samples_per_step)
    written = Written()
    if json_file is not None:
        written.attempt(write_json, json_file, to_json(explained))
    if html_file is not None:
        written.attempt(write, html_file, page(explained))
    if last.code or last.ended == "timeout" or not last.steps:
        written.say()
        return _failed(last, command)
    if not quiet:
        show(explained)
    written.check()
    return int(fail and found.verdict.verdict is Verdict.LEAK)


def _looked(command: list[str], watch: Watch, told: LeakProgress) -> Any:
    with Watched(command, watch, quiet=True) as process:
        return process.wait(told)


def _ablated(command: list[str], watch: Watch, tolerance: float, counter: str, told: LeakProgress) -> Any:
    from lowtide.studies.leak.ablate import Failed, ablate

    try:
        return ablate(command, watch, tolerance=tolerance, counter=counter, progress=told)
    except Failed as error:
        tell(f"lowtide: no ablation: {error}")
        return None


def _check_memray() -> None:
    import importlib.util

    if importlib.util.find_spec("memray") is None:
        raise UsageError("--deep needs memray: pip install memray")


def _failed(run: Any, command: list[str]) -> int:
    """Print why there is no verdict; returns the exit code."""
    if run.tail:
        tell(run.tail)
    name = shlex.join(command)
    folder = tempfile.gettempdir()
    if not run.steps and shutil.disk_usage(folder).free < _LEAST_ROOM:
        raise UsageError(f"no verdict: there is no room for samples in {folder}: {ROOM_FOR_TEMPORARY_FILES}")
    if run.ended == "timeout":
        raise UsageError(f"`{name}` was killed by --timeout after {run.steps} steps: give a longer --timeout")
    if run.code:
        tell(f"lowtide: error: `{name}` ended with {_ending(run.code)} after {run.steps} steps: no verdict")
        return int(run.code) if run.code > 0 else 128 - int(run.code)
    raise UsageError(
        f"`{name}` ended before any step was seen: it must be a Python program that trains, or run longer"
    )


def _ending(code: int) -> str:
    return f"exit code {code}" if code > 0 else f"signal {-code}"


class LeakProgress(Progress):
    """Shows the progress of a study as a bar."""

    def __init__(self, bar: Any, steps: int) -> None:
        """Show nothing yet, and nothing at all if ``bar`` is None."""
        self._bar, self._steps, self._number = bar, steps, 0
        self._task: Any = None

    def began(self, what: str) -> None:
        """A new part of the study begins."""
        if self._bar is not None:
            if self._task is not None:
                self._bar.update(self._task, visible=False)
            self._task = self._bar.add_task(what, total=self._steps)

    def process(self) -> None:
        """A process of the study begins."""
        self._number += 1
        self.began(f"process {self._number}")

    def arm(self, name: str) -> None:
        """An arm of an ablation begins."""
        self.began(f"run: {name}")

    def stepped(self, steps: int) -> None:
        """The running process has made this many steps."""
        if self._bar is not None:
            self._bar.update(self._task, completed=min(steps, self._steps))


@contextmanager
def _progress(steps: int, *, quiet: bool) -> Iterator[LeakProgress]:
    if quiet:
        yield LeakProgress(None, steps)
        return
    from rich.progress import Progress as Bar

    from lowtide.report.terminal import console

    with Bar(console=console(), transient=True) as bar:
        yield LeakProgress(bar, steps)
