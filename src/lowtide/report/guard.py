"""A guarded run: a panel while it lives, lines where nobody looks at a terminal, a table at the end, figures."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, final

from rich import box
from rich.console import Console
from rich.live import Live as Screen
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lowtide.base.files import why
from lowtide.base.messages import shown, tell
from lowtide.base.units import format_bytes, format_seconds
from lowtide.guard.outcome import Generation, Live, Outcome
from lowtide.recording.file_format import ProcessRow
from lowtide.recording.writer import Writer
from lowtide.report.terminal import console

WIDTH: Final = 40
"""Of the bar, in characters."""
SHOWN: Final = 15
"""Processes in the table, of the first and of the last."""
ROW_SECONDS: Final = 1.0
"""Between two rows of the recording, and two points of exported figures."""


def clock(seconds: float) -> str:
    """A long duration for people: ``3 h 05 min``, ``4 min 10 s``, ``12 s``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{whole} s"


def panel(live: Live) -> Panel:
    """What is seen of a run that lives."""
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
        table.add_row("whole run", f"{live.beat.fraction:.0%} done, about {clock(live.whole_seconds)} in all{restarts}")
    if live.reading.device_bytes:
        table.add_row("CUDA", format_bytes(live.reading.device_bytes))
    if live.reading.pressure >= 1:
        table.add_row("pressure", f"waited for memory {live.reading.pressure:.0f} % of the last 10 s")
    return Panel(table, title="lowtide guard", title_align="left", expand=False)


def forecast(live: Live) -> str:
    """When the cap is reached."""
    if live.growth is None:
        return "too early to say"
    if live.left_seconds is None and live.growth.is_flat(live.cap_bytes):
        return "does not grow"
    if live.left_seconds is None:
        return f"grows by at most {format_bytes(live.growth.high)} a second, if at all"
    return f"grows by {format_bytes(live.growth.rate)} a second; at the cap in {clock(live.left_seconds)}"


@final
class _Through:
    """Standard output and error of what is started, printed line by line above the panel rather than across it."""

    def __init__(self) -> None:
        """From now on."""
        self._kept = {number: os.dup(number) for number in (1, 2) if os.isatty(number)}  # files stay what they are
        self.console = Console(file=shown(os.fdopen(os.dup(2), "w", errors="backslashreplace")), highlight=False)
        os.environ["PYTHONUNBUFFERED"] = "1"  # a pipe would hold the lines of Python programs back
        self._reading, writing = os.pipe()
        for number in self._kept:
            os.dup2(writing, number)
        os.close(writing)
        self._thread = threading.Thread(target=self._pass_on, name="lowtide-output", daemon=True)
        self._thread.start()

    def _pass_on(self) -> None:
        with open(self._reading, errors="replace", newline="\n") as lines:  # noqa: PTH123 - a descriptor
            for line in lines:
                text = line.rstrip("\r\n").rpartition("\r")[2]  # of a bar that is drawn again and again, the last
                self.console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        """No more; what was written is printed."""
        for number, kept in self._kept.items():
            os.dup2(kept, number)
            os.close(kept)
        self._thread.join(timeout=5.0)


@final
class Shown:
    """The panel on a terminal; lines of events where standard error is none."""

    def __init__(self, *, quiet: bool) -> None:
        """Nothing is shown yet."""
        self._console: Console = console()
        self._quiet = quiet
        self._panel = not quiet and self._console.is_terminal
        self._through = _Through() if self._panel else None
        if self._through is not None:
            self._console = self._through.console
        self._screen = Screen(console=self._console, auto_refresh=False, transient=True, redirect_stdout=False)
        self._number = 0

    def __enter__(self) -> Shown:
        """Begin to show."""
        if self._panel:
            self._screen.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Show no more."""
        if self._through is not None:
            self._through.close()
        self._screen.stop()

    def looked(self, live: Live) -> None:
        """The guard looked at the process."""
        self._number = live.generation
        if self._screen.is_started:
            self._screen.update(panel(live), refresh=True)

    def said(self, text: str) -> None:
        """Something happened."""
        if not self._quiet:  # above the panel, where there is one
            self._console.print(f"lowtide guard: process {self._number + 1}: {text}", soft_wrap=True, markup=False)

    def ended(self, generation: Generation) -> None:
        """A process has ended."""
        self._number = generation.number
        size = format_bytes(generation.peak_bytes)
        self.said(f"{generation.cause.value} after {clock(generation.seconds)}, peak {size}, exit {_exit(generation.exit)}")


def _exit(code: int) -> str:
    """An exit code, or the signal's name."""
    try:
        return str(code) if code >= 0 else signal.Signals(-code).name
    except ValueError:  # a real-time signal has none
        return str(code)


def show(outcome: Outcome) -> None:
    """The table at the end."""
    columns: dict[str, Callable[[Generation], str]] = {  # blank: the process told nothing
        "": lambda g: str(g.number + 1),
        "ended by": lambda g: g.cause.value,
        "exit": lambda g: _exit(g.exit),
        "took": lambda g: clock(g.seconds),
        "start-up": lambda g: format_seconds(g.start_seconds) if g.start_seconds else "",
        "load": lambda g: format_seconds(g.load_seconds) if g.load_seconds else "",
        "steps": lambda g: str(g.steps or g.points or ""),
        "peak": lambda g: format_bytes(g.peak_bytes) if g.peak_bytes else "",
        "a second": lambda g: "" if g.growth_bytes_per_second is None else f"+{format_bytes(g.growth_bytes_per_second)}",
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
        "cgroup": "held by a cgroup",
        "watch": "held by watching",
        "rlimit": "held by RLIMIT_DATA, each process",
    }
    share = outcome.overhead_seconds / max(outcome.seconds, 1e-9)
    cap = "no cap" if outcome.fence == "none" else f"cap {format_bytes(outcome.cap_bytes)}, {fences[outcome.fence]}"
    out.print(
        f"{outcome.text}; {cap}; {clock(outcome.seconds)} in all, "
        f"{clock(outcome.overhead_seconds)} of it ({share:.0%}) for saving and starting again",
        soft_wrap=True,
        markup=False,
    )


def to_json(outcome: Outcome) -> dict[str, Any]:
    """Figures."""
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


class Sparse:
    """Told of one look a second."""

    def __init__(self) -> None:
        """Told of none yet."""
        self._next = 0.0

    def looked(self, live: Live) -> None:
        """The guard looked at the process."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + ROW_SECONDS
            self.row(live)

    def row(self, live: Live) -> None:
        """One look a second."""

    def said(self, text: str) -> None:
        """Something happened."""

    def ended(self, generation: Generation) -> None:
        """A process has ended."""


@final
class Recorded(Sparse):
    """The run as a recording: a row a second, and the generations."""

    def __init__(self, path: Path, command: str) -> None:
        """Create the file.

        Raises:
            RecordingError: if it cannot be written.
        """
        super().__init__()
        self._writer = Writer(path, {"script": command, "arguments": []})
        self._began = time.monotonic()
        self._number, self._before, self._highest = 0, 0, 0
        self._last: Live | None = None

    def looked(self, live: Live) -> None:
        """The highest of all looks counts."""
        self._highest = max(self._highest, live.reading.bytes)
        self._last = live
        super().looked(live)

    def ended(self, generation: Generation) -> None:
        """What was seen of a process since its last row."""
        del generation
        if self._last is not None and self._highest:
            self.row(self._last)

    def row(self, live: Live) -> None:
        """One row."""
        r = live.reading
        self._writer.process(
            ProcessRow(
                step=self._number,
                start=r.seconds - self._began,
                seconds=ROW_SECONDS,
                resident_bytes=r.bytes,
                highest_bytes=self._highest,
                change_bytes=r.bytes - self._before,
                unique_bytes=r.unique_bytes,
                children_bytes=0,
                heap_bytes=0,
                heap_peak_bytes=0,
                loss=None,
                marked=False,
            )
        )
        self._number, self._before, self._highest = self._number + 1, r.bytes, 0

    def close(self, outcome: Outcome | None) -> None:
        """The recording is whole."""
        if outcome is not None:
            self._writer.put_meta({"guard": to_json(outcome)})
        self._writer.close(code=1 if outcome is None else outcome.exit_code, always=True)


@final
class Exported(Sparse):
    """Figures for Prometheus, on loopback."""

    def __init__(self, port: int) -> None:
        """Serve them.

        Raises:
            OSError: if the port is taken.
        """
        from prometheus_client import CollectorRegistry, Gauge, start_http_server

        super().__init__()
        registry = CollectorRegistry()

        def gauge(name: str, text: str) -> Any:
            return Gauge(f"lowtide_{name}", text, registry=registry)

        self._memory = gauge("memory_bytes", "What counts against the cap.")
        self._unique = gauge("unique_bytes", "Unique set size of all processes.")
        self._device = gauge("device_bytes", "Taken on CUDA devices.")
        self._cap = gauge("cap_bytes", "The cap.")
        self._growth = gauge("growth_bytes_per_second", "Growth of memory now; NaN where it is too early.")
        self._left = gauge("seconds_to_cap", "Forecast; NaN where no growth is certain.")
        self._generation = gauge("generation", "Processes before this one.")
        self._steps = gauge("steps", "Of this process.")
        self._points = gauge("safe_points", "Passed by this process.")
        self._rate = gauge("steps_per_second", "Of this process; safe points where it marks no steps.")
        self._saves = gauge("saves", "Checkpoints of this process.")
        self._pressure = gauge("pressure_percent", "Share of the last 10 s in which some process waited for memory.")
        self._server, self._thread = start_http_server(port, addr="127.0.0.1", registry=registry)

    def row(self, live: Live) -> None:
        """Set them."""
        self._memory.set(live.reading.bytes)
        self._unique.set(live.reading.unique_bytes)
        self._device.set(live.reading.device_bytes)
        self._cap.set(live.cap_bytes)
        self._growth.set(float("nan") if live.growth is None else live.growth.rate)
        self._left.set(float("nan") if live.left_seconds is None else live.left_seconds)
        self._generation.set(live.generation)
        self._steps.set(live.beat.steps)
        self._points.set(live.beat.points)
        self._rate.set(live.steps_per_second)
        self._saves.set(live.beat.saves)
        self._pressure.set(live.reading.pressure)

    def close(self) -> None:
        """Serve them no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@final
class Scalars(Sparse):
    """Figures for TensorBoard."""

    def __init__(self, folder: Path) -> None:
        """Begin a file of events."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        super().__init__()
        self._event, self._summary = Event, Summary
        self._folder, self._full = folder, False
        self._writer = EventFileWriter(str(folder))
        self._number = 0

    def row(self, live: Live) -> None:
        """One point of each curve."""
        values = {
            "lowtide/memory_bytes": live.reading.bytes,
            "lowtide/cap_bytes": live.cap_bytes,
            "lowtide/generation": live.generation,
            "lowtide/steps_per_second": live.steps_per_second,
        }
        if live.growth is not None:
            values["lowtide/growth_bytes_per_second"] = live.growth.rate
        value = [self._summary.Value(tag=tag, simple_value=found) for tag, found in values.items()]
        event = self._event(step=self._number, wall_time=time.time(), summary=self._summary(value=value))
        self._attempt(lambda: self._writer.add_event(event))
        self._number += 1

    def close(self) -> None:
        """The file is whole."""
        self._attempt(self._writer.close)

    def _attempt(self, write: Callable[[], object]) -> None:
        """Write, until the disk is full: what is guarded goes on."""
        if self._full:
            return
        try:
            write()
        except OSError as error:
            self._full = True
            tell(f"lowtide: TensorBoard's figures stop: {why(error)} in {self._folder}: make room there; training goes on")
