"""Runs the cells of a sweep: one after the other, several in parallel, or on the workers of a dask cluster."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, final

from lowtide.base.errors import LowtideError, UsageError
from lowtide.base.files import write_file
from lowtide.base.messages import named_here
from lowtide.studies.sweep.axes import applied
from lowtide.studies.sweep.cell import NO_ROOM, NOTHING, measure
from lowtide.studies.sweep.definition import Definition
from lowtide.studies.sweep.results import CONFIRM, Cell, SweepResults

LOOK_SECONDS: Final = 0.05
LOST: Final = 3
"""How often a cell is run again if its runner dies without a result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellTask:
    """What one cell runs: the command and environment of its configuration, and how the process is watched."""

    cell: int
    command: list[str]
    environment: dict[str, str]
    watch: dict[str, Any]


def task_of(definition: Definition, cell: Cell, environment: Mapping[str, str]) -> CellTask:
    """The task of a cell: its configuration applied to the command."""
    base = definition.confirm if cell.part == CONFIRM else definition.command
    command, made = applied(definition.settings(cell.config), base, {**environment, **definition.file.environment})
    watch = {
        "steps": definition.file.steps,
        "step_line": definition.file.step_line,
        "cap_bytes": definition.cap_bytes,
        "timeout_seconds": definition.file.timeout_seconds,
        "samples_per_step": definition.file.samples_per_step,
    }
    command, made = [named_here(word) for word in command], {name: named_here(value) for name, value in made.items()}
    return CellTask(cell=cell.id, command=command, environment=made, watch=watch)


class Executor(Protocol):
    """Runs the tasks of cells."""

    def run(self, tasks: Sequence[CellTask]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Run the tasks; yields (cell id, result) as results arrive."""


def go(definition: Definition, results: SweepResults, part: str, executor: Executor, told: Any) -> None:
    """Run the cells of a part that have no result yet; each result is on disk before the next one is awaited.

    Args:
        definition: the sweep.
        results: where results are read and stored.
        part: ``sweep`` or ``confirm``.
        executor: what runs the tasks.
        told: receives the progress, by ``begins(part, cells, done)`` and ``finished(result)``.
    """
    cells = results.cells(part)
    waiting = [cell for cell in cells if cell.result is None]
    told.begins(part, len(cells), len(cells) - len(waiting))
    for cell, result in executor.run([task_of(definition, cell, os.environ) for cell in waiting]):
        results.finish(cell, result)
        told.finished(result)


@final
class Local:
    """Runs cells on this machine: one process per cell, ``jobs`` of them in parallel.

    The process that runs a cell claims it with a lock, which the kernel releases when that process ends, and renames its
    result into place. So a sweep may be killed at any moment without losing a cell or running one twice: the cell that was
    running goes on, and the next sweep finds its claim or its result.
    """

    def __init__(self, folder: Path, jobs: int = 1) -> None:
        """Use a folder, beside the results file, in which cells' tasks and results lie until they are stored.

        Args:
            folder: the folder; it is created when needed, and removed after the last cell.
            jobs: number of cells that run in parallel.
        """
        self._folder, self._jobs = folder, jobs

    def run(self, tasks: Sequence[CellTask]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Run the tasks; yields (cell id, result) as results arrive, those that a killed sweep left behind first.

        Raises:
            LowtideError: if a cell has no disk space for its result or its samples.
        """
        self._folder.mkdir(exist_ok=True)
        waiting = {task.cell: task for task in tasks}
        running: dict[int, CellTask] = {}
        started: dict[int, subprocess.Popen[bytes]] = {}
        tries = dict.fromkeys(waiting, 0)
        for cell in list(waiting):
            if self._claimed(cell):
                running[cell] = waiting.pop(cell)
        try:
            while waiting or running:
                for cell in [*running, *waiting]:
                    result = self._result(cell)
                    if result is not None:
                        running.pop(cell, None)
                        waiting.pop(cell, None)
                        yield cell, result
                        self._file(cell, "result").rename(self._file(cell, "taken"))
                for cell, task in list(running.items()):
                    alive = cell in started and started[cell].poll() is None
                    if not alive and not self._claimed(cell) and self._result(cell) is None:
                        del running[cell]
                        if cell in started and started[cell].returncode == NO_ROOM:
                            raise LowtideError(f"no room for the result of a cell in {self._folder}, or for its samples in "
                                               f"{tempfile.gettempdir()}: make room, and start the same sweep again")
                        if tries[cell] <= LOST:
                            waiting = {cell: task, **waiting}
                        else:
                            yield cell, {**NOTHING, "ended": "runner lost"}
                while waiting and len(running) < self._jobs:
                    cell, task = next(iter(waiting.items()))
                    running[cell] = waiting.pop(cell)
                    tries[cell] += 1
                    started[cell] = self._start(task)
                if running:
                    time.sleep(LOOK_SECONDS)
        finally:
            for cell in running:
                self._end(cell, started.get(cell))
        shutil.rmtree(self._folder, ignore_errors=True)

    def _file(self, cell: int, kind: str) -> Path:
        return self._folder / f"{cell}.{kind}"

    def _start(self, task: CellTask) -> subprocess.Popen[bytes]:
        path = self._file(task.cell, "task")
        asked = {"command": task.command, "environment": task.environment, "watch": task.watch}
        write_file(path, json.dumps(asked).encode())
        return subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-m", "lowtide.studies.sweep.cell", str(path)],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def _claimed(self, cell: int) -> bool:
        """Whether a live process has claimed a cell."""
        try:
            with self._file(cell, "lock").open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def _result(self, cell: int) -> dict[str, Any] | None:
        try:
            return dict(json.loads(self._file(cell, "result").read_text()))
        except OSError:
            return None

    def _end(self, cell: int, process: subprocess.Popen[bytes] | None) -> None:
        """End the runner of a cell, and with it the cell's process."""
        with contextlib.suppress(OSError, ValueError):
            pid = process.pid if process is not None else int(self._file(cell, "lock").read_text())
            if process is not None or self._claimed(cell):
                os.kill(pid, signal.SIGTERM)
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)


@final
class Dask:
    """Runs cells on the workers of a dask cluster, one process per cell; a lost worker's cells run again elsewhere."""

    def __init__(self, address: str | None, workers: int) -> None:
        """Connect to nothing yet.

        Args:
            address: address of a scheduler; None for a cluster on this machine.
            workers: number of workers of a cluster on this machine.
        """
        self._address, self._workers = address, workers

    def run(self, tasks: Sequence[CellTask]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Run the tasks; yields (cell id, result) as results arrive.

        Raises:
            UsageError: if dask is not installed, or no scheduler answers at the address.
        """
        try:
            import dask
            import distributed
        except ImportError:
            raise UsageError("--executor dask needs dask: pip install 'lowtide[dask]'") from None
        dask.config.set({"distributed.scheduler.allowed-failures": LOST, "distributed.worker.daemon": False})
        with contextlib.ExitStack() as open_:
            if self._address is None:
                cluster = open_.enter_context(
                    distributed.LocalCluster(
                        n_workers=self._workers,
                        threads_per_worker=1,
                        processes=True,
                        dashboard_address=None,
                        silence_logs=50,
                    )
                )
                client = open_.enter_context(distributed.Client(cluster))
            else:
                try:
                    client = open_.enter_context(distributed.Client(self._address, timeout=10))
                except (OSError, ValueError) as error:
                    raise UsageError(f"no dask scheduler answers at {self._address}: {error}") from None
            futures = {
                client.submit(measure, t.command, t.environment, t.watch, pure=False, retries=LOST): t.cell for t in tasks
            }
            for future in distributed.as_completed(list(futures)):
                yield futures[future], future.result()
