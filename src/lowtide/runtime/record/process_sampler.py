"""Samples a process's memory step by step, in any framework: resident and unique set size, heap, child processes.

Steps are marked by the script or by Keras (``probe/marks``), or, if neither marks any, by time.
"""

from __future__ import annotations

import contextlib
import resource
import threading
import time
from typing import Final, final

import psutil

from lowtide.probe import marks
from lowtide.probe.marks import MarkSource
from lowtide.recording.file_format import ProcessRow
from lowtide.recording.writer import Writer
from lowtide.runtime.device.heap_counters import preloaded

INTERVAL_SECONDS: Final = 0.02
"""Seconds between two samples of the resident set size (each is one read of ``/proc``)."""
STEP_SECONDS: Final = 1.0
"""Length of a step in seconds, if the script marks none."""
_PAGE: Final = resource.getpagesize()


@final
class ProcessSampler:
    """Samples the process's memory from a thread of its own, and writes one row per step."""

    def __init__(self, writer: Writer) -> None:
        """Prepare to sample; the rows go to ``writer``."""
        self._writer = writer
        self._process = psutil.Process()
        self._heap = preloaded()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lowtide", daemon=True)
        self._began = self._since = time.perf_counter()
        self._highest = self._before = self._resident()
        self._rows = {True: 0, False: 0}
        self._marked = False

    def start(self) -> None:
        """Start sampling."""
        marks.listeners.append(self.step)
        self._reset_heap()
        self._thread.start()

    def stop(self) -> None:
        """Stop sampling; the time since the last step becomes a row that is not marked as a step."""
        marks.listeners.remove(self.step)
        self._stop.set()
        self._thread.join()
        self._close(None, marked=False)

    def step(self, _: MarkSource, loss: float | None) -> None:
        """Write the row of a step that the script marked."""
        self._marked = True
        self._close(loss, marked=True)

    def _watch(self) -> None:
        while not self._stop.wait(INTERVAL_SECONDS):
            with self._lock:
                self._highest = max(self._highest, self._resident())
            if not self._marked and time.perf_counter() - self._since >= STEP_SECONDS:
                self._close(None, marked=False)

    def _resident(self) -> int:
        try:
            with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 - fifty times a second
                return int(file.read().split()[1]) * _PAGE
        except OSError:  # not Linux
            return int(self._process.memory_info().rss)

    def _reset_heap(self) -> None:
        if self._heap is not None:
            self._heap.heap_peak = self._heap.heap_live

    def _close(self, loss: float | None, *, marked: bool) -> None:
        now = time.perf_counter()
        resident = self._resident()
        with self._lock:
            highest = max(self._highest, resident)
            row = ProcessRow(
                step=self._rows[marked], start=self._since - self._began, seconds=now - self._since, resident_bytes=resident,
                highest_bytes=highest, change_bytes=resident - self._before, unique_bytes=self._unique(),
                children_bytes=self._children(), heap_bytes=0 if self._heap is None else int(self._heap.heap_live),
                heap_peak_bytes=0 if self._heap is None else int(self._heap.heap_peak), loss=loss, marked=marked,
            )
            self._rows[marked] += 1
            self._since, self._highest, self._before = now, resident, resident
            self._reset_heap()
            self._writer.process(row)

    def _unique(self) -> int:
        with contextlib.suppress(psutil.Error, AttributeError):
            return int(self._process.memory_full_info().uss)
        return 0

    def _children(self) -> int:
        """Proportional set size in bytes of all child processes (loader workers), which counts shared pages once.

        If the system does not report it, the unique set size.
        """
        total = 0
        with contextlib.suppress(psutil.Error):
            for child in self._process.children(recursive=True):
                with contextlib.suppress(psutil.Error, AttributeError):
                    info = child.memory_full_info()
                    total += int(getattr(info, "pss", info.uss))
        return total
