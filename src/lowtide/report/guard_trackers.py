"""Trackers of a guarded run: they send its figures to a recording, Prometheus or TensorBoard."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

from lowtide.base.files import why
from lowtide.base.messages import tell
from lowtide.guard.outcome import Generation, GuardOutcome, Live
from lowtide.recording.file_format import ProcessRow
from lowtide.recording.writer import Writer
from lowtide.report.guard import ROW_SECONDS, to_json


class Sparse:
    """A listener of the guard that handles one look per :data:`ROW_SECONDS`."""

    def __init__(self) -> None:
        """Handle the first look that comes."""
        self._next = 0.0

    def looked(self, live: Live) -> None:
        """Handle a look at the process, unless the last one was handled less than :data:`ROW_SECONDS` ago."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + ROW_SECONDS
            self.row(live)

    def row(self, live: Live) -> None:
        """Handle one look; subclasses override this."""

    def said(self, text: str) -> None:
        """Ignore an event."""

    def ended(self, generation: Generation) -> None:
        """Ignore the end of a process."""


@final
class RecordingTracker(Sparse):
    """Writes the run as a recording: one row per second, and the generations."""

    def __init__(self, path: Path, command: str) -> None:
        """Create the file.

        Raises:
            RecordingError: if the file cannot be written.
        """
        super().__init__()
        self._writer = Writer(path, {"script": command, "arguments": []})
        self._began = time.monotonic()
        self._number, self._before, self._highest = 0, 0, 0
        self._last: Live | None = None

    def looked(self, live: Live) -> None:
        """Note the memory of every look, so that a row has the highest since the row before."""
        self._highest = max(self._highest, live.reading.bytes)
        self._last = live
        super().looked(live)

    def ended(self, generation: Generation) -> None:
        """Write what was seen of a process since its last row."""
        del generation
        if self._last is not None and self._highest:
            self.row(self._last)

    def row(self, live: Live) -> None:
        """Write one row."""
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

    def close(self, outcome: GuardOutcome | None) -> None:
        """Complete the recording; ``outcome`` is None if the guard itself failed."""
        if outcome is not None:
            self._writer.put_meta({"guard": to_json(outcome)})
        self._writer.close(code=1 if outcome is None else outcome.exit_code, always=True)


@final
class PrometheusTracker(Sparse):
    """Serves the figures to Prometheus, on the loopback interface."""

    def __init__(self, port: int) -> None:
        """Start the server.

        Raises:
            OSError: if the port is taken.
        """
        from prometheus_client import CollectorRegistry, Gauge, start_http_server

        super().__init__()
        registry = CollectorRegistry()

        def gauge(name: str, text: str) -> Any:
            return Gauge(f"lowtide_{name}", text, registry=registry)

        self._memory = gauge("memory_bytes", "Memory that counts against the cap.")
        self._unique = gauge("unique_bytes", "Unique set size of all processes.")
        self._device = gauge("device_bytes", "Memory in use on CUDA devices.")
        self._cap = gauge("cap_bytes", "The cap.")
        self._growth = gauge("growth_bytes_per_second", "Current growth of memory; NaN if it is too early to say.")
        self._left = gauge("seconds_to_cap", "Forecast of the time to the cap; NaN if no growth is certain.")
        self._generation = gauge("generation", "Processes before this one.")
        self._steps = gauge("steps", "Steps of this process.")
        self._points = gauge("safe_points", "Safe points passed by this process.")
        self._rate = gauge("steps_per_second", "Steps of this process per second; safe points if it marks no steps.")
        self._saves = gauge("saves", "Checkpoints of this process.")
        self._pressure = gauge("pressure_percent", "Share of the last 10 s in which some process waited for memory.")
        self._server, self._thread = start_http_server(port, addr="127.0.0.1", registry=registry)

    def row(self, live: Live) -> None:
        """Set the gauges."""
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
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@final
class TensorBoardTracker(Sparse):
    """Writes the figures for TensorBoard."""

    def __init__(self, folder: Path) -> None:
        """Create an event file in the folder."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        super().__init__()
        self._event, self._summary = Event, Summary
        self._folder, self._full = folder, False
        self._writer = EventFileWriter(str(folder))
        self._number = 0

    def row(self, live: Live) -> None:
        """Add one point to each curve."""
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
        """Close the event file."""
        self._attempt(self._writer.close)

    def _attempt(self, write: Callable[[], object]) -> None:
        """Write, or stop writing after the first error (a full disk): the guarded program goes on."""
        if self._full:
            return
        try:
            write()
        except OSError as error:
            self._full = True
            tell(f"lowtide: TensorBoard output stops: {why(error)} in {self._folder}: make room there; training goes on")
