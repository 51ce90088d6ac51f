"""Reports of a guarded run: a live panel or lines of events, a table at the end, and JSON."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any, Final, final

from rich import box
from rich.console import Console
from rich.live import Live as Screen
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lowtide.base.messages import shown
from lowtide.base.units import format_bytes, format_seconds
from lowtide.guard.outcome import Generation, GuardOutcome, Live
from lowtide.report.terminal import console

WIDTH: Final = 40
"""Width of the bar in characters."""
SHOWN: Final = 15
"""How many of the first and of the last processes the table shows."""
ROW_SECONDS: Final = 1.0
"""Seconds between two rows of the recording, and between two points of exported figures."""


def clock(seconds: float) -> str:
    """A long duration for people: ``3 h 05 min``, ``4 min 10 s``, ``12 s``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{whole} s"


def panel(live: Live) -> Panel:
    """The panel of a running guarded program."""
    share = live.reading.bytes / live.cap_bytes
    full = min(WIDTH, round(share * WIDTH))
    colour = "red" if share >= 0.9 else "yellow" if share >= 0.75 else "green"
    bar = Text.assemble(("█" * full, colour), ("░" * (WIDTH - full), "dim"))
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    held = f" {format_bytes(live.reading.bytes)} of {format_bytes(live.cap_bytes)}, {share:.0%}"
    table.add_row("memory", bar + Text(held))
    table.add_row("forecast", forecast(live))
    generation = f"{live.generation + 1}, for {clock(live.seconds)}, {live.reading.processes} processes"
    table.add_row("generation", generation + (f"; asked to stop: {live.asked}" if live.asked else ""))
    rate = f", {live.steps_per_second:.1f} a second" if live.steps_per_second else ""
    steps = f"{live.beat.steps:.0f}{rate}; {live.beat.points:.0f} safe points" if live.beat.steps else (
        f"{live.beat.points:.0f} safe points{rate}")
    table.add_row("steps", f"{steps}, {live.beat.saves:.0f} saved")
    if live.whole_seconds is not None:
        spent = sum(g.overhead_seconds for g in live.done)
        restarts = f", {format_seconds(spent / live.beat.fraction)} of it for restarts" if spent else ""
        table.add_row("whole run", f"{live.beat.fraction:.0%} done, about {clock(live.whole_seconds)} in total{restarts}")
    if live.reading.device_bytes:
        table.add_row("CUDA", format_bytes(live.reading.device_bytes))
    if live.reading.pressure >= 1:
        table.add_row("pressure", f"waited for memory during {live.reading.pressure:.0f} % of the last 10 s")
    return Panel(table, title="lowtide guard", title_align="left", expand=False)


def forecast(live: Live) -> str:
    """When memory will reach the cap, as text."""
    if live.growth is None:
        return "too early to say"
    if live.left_seconds is None and live.growth.is_flat(live.cap_bytes):
        return "does not grow"
    if live.left_seconds is None:
        return f"grows by at most {format_bytes(live.growth.high)} a second, if at all"
    return f"grows by {format_bytes(live.growth.rate)} a second; at the cap in {clock(live.left_seconds)}"


@final
class _Through:
    """Prints standard output and error of the guarded program line by line above the panel instead of across it."""

    def __init__(self) -> None:
        """Redirect those of the two that are terminals."""
        self._kept = {number: os.dup(number) for number in (1, 2) if os.isatty(number)}  # files are left alone
        self.console = Console(file=shown(os.fdopen(os.dup(2), "w", errors="backslashreplace")), highlight=False)
        os.environ["PYTHONUNBUFFERED"] = "1"  # Python programs buffer their output to a pipe
        self._reading, writing = os.pipe()
        for number in self._kept:
            os.dup2(writing, number)
        os.close(writing)
        self._thread = threading.Thread(target=self._pass_on, name="lowtide-output", daemon=True)
        self._thread.start()

    def _pass_on(self) -> None:
        with open(self._reading, errors="replace", newline="\n") as lines:  # noqa: PTH123 - a descriptor
            for line in lines:
                text = line.rstrip("\r\n").rpartition("\r")[2]  # of a redrawn progress bar, its last state
                self.console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Restore both streams, and print what is still in the pipe (for at most 5 s)."""
        for number, kept in self._kept.items():
            os.dup2(kept, number)
            os.close(kept)
        self._thread.join(timeout=5.0)


@final
class GuardDisplay:
    """Shows the panel if standard error is a terminal, and a line for every event."""

    def __init__(self, *, quiet: bool) -> None:
        """Show nothing yet; with ``quiet``, never show anything."""
        self._console: Console = console()
        self._quiet = quiet
        self._panel = not quiet and self._console.is_terminal
        self._through = _Through() if self._panel else None
        if self._through is not None:
            self._console = self._through.console
        self._screen = Screen(console=self._console, auto_refresh=False, transient=True, redirect_stdout=False)
        self._number = 0

    def __enter__(self) -> GuardDisplay:
        """Start the panel."""
        if self._panel:
            self._screen.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the panel."""
        if self._through is not None:
            self._through.close()
        self._screen.stop()

    def looked(self, live: Live) -> None:
        """Update the panel after a look at the process."""
        self._number = live.generation
        if self._screen.is_started:
            self._screen.update(panel(live), refresh=True)

    def said(self, text: str) -> None:
        """Print an event."""
        if not self._quiet:  # printed above the panel if there is one
            self._console.print(f"lowtide guard: process {self._number + 1}: {text}", soft_wrap=True, markup=False)

    def ended(self, generation: Generation) -> None:
        """Print how a process ended."""
        self._number = generation.number
        size = format_bytes(generation.peak_bytes)
        self.said(f"{generation.cause.value} after {clock(generation.seconds)}, peak {size}, exit {_exit(generation.exit)}")


def _exit(code: int) -> str:
    """An exit code as text; a negative one as the name of its signal."""
    try:
        return str(code) if code >= 0 else signal.Signals(-code).name
    except ValueError:  # a real-time signal has none
        return str(code)


def show(outcome: GuardOutcome) -> None:
    """Print the table at the end."""
    columns: dict[str, Callable[[Generation], str]] = {  # blank: the process reported nothing
        "": lambda g: str(g.number + 1),
        "ended by": lambda g: g.cause.value,
        "exit": lambda g: _exit(g.exit),
        "took": lambda g: clock(g.seconds),
        "start-up": lambda g: format_seconds(g.start_seconds) if g.start_seconds else "",
        "load": lambda g: format_seconds(g.load_seconds) if g.load_seconds else "",
        "steps": lambda g: str(g.steps or g.points or ""),
        "peak": lambda g: format_bytes(g.peak_bytes) if g.peak_bytes else "",
        "growth/s": lambda g: "" if g.growth_bytes_per_second is None else f"+{format_bytes(g.growth_bytes_per_second)}",
    }
    done = outcome.generations
    shown = [*done] if len(done) <= 2 * SHOWN else [*done[:SHOWN], None, *done[-SHOWN:]]
    told = {name: cell for name, cell in columns.items() if any(cell(g) for g in shown if g is not None)}
    table = Table(title="lowtide guard", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for name in told:
        words = name == "ended by"
        table.add_column(name, justify="left" if words else "right", no_wrap=not words)
    for g in shown:
        table.add_row(*(["..."] if g is None else [cell(g) for cell in told.values()]))
    out = console()
    out.print(table)
    fences = {
        "cgroup": "enforced by a cgroup",
        "watch": "enforced by watching",
        "rlimit": "enforced by RLIMIT_DATA, per process",
    }
    share = outcome.overhead_seconds / max(outcome.seconds, 1e-9)
    cap = "no cap" if outcome.fence == "none" else f"cap {format_bytes(outcome.cap_bytes)}, {fences[outcome.fence]}"
    out.print(
        f"{outcome.text}; {cap}; {clock(outcome.seconds)} in total, "
        f"{clock(outcome.overhead_seconds)} of it ({share:.0%}) for saving and restarting",
        soft_wrap=True,
        markup=False,
    )


def to_json(outcome: GuardOutcome) -> dict[str, Any]:
    """The outcome as JSON."""
    return {
        "generations": [
            {
                "exit": g.exit,
                "reason": g.cause.value,
                "peak_bytes": g.peak_bytes,
                "seconds": g.seconds,
                "asked": g.asked or None,
                "start_seconds": g.start_seconds,
                "load_seconds": g.load_seconds,
                "save_seconds": g.save_seconds,
                "waited_seconds": g.waited_seconds,
                "overhead_seconds": g.overhead_seconds,
                "steps": g.steps,
                "safe_points": g.points,
                "saves": g.saves,
                "unique_bytes": g.unique_bytes,
                "resident_bytes": g.resident_bytes,
                "device_bytes": g.device_bytes,
                "growth_bytes_per_second": g.growth_bytes_per_second,
                "error": g.error,
            }
            for g in outcome.generations
        ],
        "exit_code": outcome.exit_code,
        "text": outcome.text,
        "cap_bytes": outcome.cap_bytes,
        "enforced_by": outcome.fence,
        "seconds": outcome.seconds,
        "overhead_seconds": outcome.overhead_seconds,
        "fraction": outcome.fraction or None,
        "forecast_seconds": outcome.seconds / outcome.fraction if outcome.fraction else None,
    }
