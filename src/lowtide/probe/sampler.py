"""Samples a watched process: one row per step, a few audits, and its end after the requested number of steps.

The task comes in an environment variable as JSON (``studies.leak.watch.Watched`` writes it). Rows go to a file through a
small buffer, so that the sampler itself does not grow; if the process is killed, the rows written so far are on record.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import struct
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Final, final

from lowtide.base.files import ROOM_FOR_TEMPORARY_FILES, why, write
from lowtide.base.messages import tell
from lowtide.probe import marks
from lowtide.probe.counters import ABSENT, COLUMNS, Allocators, Gate, Kernel, books, cuda
from lowtide.probe.family import Family
from lowtide.probe.marks import MarkSource, WhenImported

TASK: Final = "LOWTIDE_PROBE"
"""Environment variable that carries the task."""
SETTINGS: Final = "LOWTIDE_SETTINGS"
"""Environment variable with calls to make once a module has been imported, as JSON: ``{module: [[path, arguments], ...]}``."""
ENOUGH: Final = "enough"
"""File in the task's folder whose presence asks the process to end."""
_ROW: Final = struct.Struct(f"<{len(COLUMNS)}q")
_BUFFERED: Final = 64
"""Rows held before they are written."""
READINGS: Final = 30
"""Fewest readings of each counter in a run, except of those for which the kernel walks all pages of this process."""
CLOCK_SHARE: Final = 0.2
"""Most of the time that marks of the clock may take: they hold the interpreter's lock."""
FROZEN_GROWTH: Final = 1.5
"""Objects are frozen again when the interpreter has so many times as many blocks of memory."""
_FLUSH_NS: Final = 250_000_000


class Enough(SystemExit):
    """Ends a script that has been watched for the requested number of steps."""


def begin() -> None:
    """Start to watch this process if the environment has a task for it."""
    text = os.environ.get(TASK)
    if text is None:
        return
    task = json.loads(text)
    Sampler(task).install()
    if task["arm"]:
        from lowtide.probe.arms import Arm

        Arm(task["arm"], task["folder"]).install()
    for module, calls in json.loads(os.environ.get(SETTINGS, "{}")).items():
        WhenImported(module, functools.partial(_set, calls))


def _set(calls: list[tuple[str, list[Any]]], module: Any) -> None:
    """Make the calls of a configuration."""
    for path, arguments in calls:
        target = module
        for name in path.split("."):
            target = getattr(target, name)
        target(*arguments)


@final
class Sampler:
    """Takes a row of samples at each mark.

    Its many fields are the task, the counters with the gates that limit their readings, the rows not yet written, and the
    marks seen so far.
    """

    def __init__(self, task: dict[str, Any]) -> None:
        """Read the task; nothing is written before the first mark.

        Args:
            task: ``folder``, where rows and audits are written;
                ``watcher``, id of the process that started the command;
                ``steps``, number of steps after which the process ends (0: never);
                ``audits``, steps after which an audit is made;
                ``lines``, a regular expression for lines of output that mark steps;
                ``every_seconds``, time between the clock's marks (0: none);
                ``least_seconds``, least time before the end if only the clock marks steps;
                ``census``, whether to look for what grows;
                ``census_kind``, source of the marks at which the census looks (None: any);
                ``deep``, whether the census records native stacks;
                ``collect_every``, steps between garbage collections (0: left to Python);
                ``arm``, the arm of an ablation (``probe.arms``).
        """
        self._task = task
        self._steps: int = task["steps"]
        self._audits = set(task["audits"])
        self._allocators, self._kernel, self._family = Allocators(), Kernel(), Family(task["watcher"])
        every = max(1, self._steps // READINGS) if self._steps else 0
        self._gates = [Gate(every), Gate(every), Gate(every), Gate(), Gate(every), Gate(every)]
        self._collect: int = task["collect_every"]
        self._frozen_at = 0
        self._buffer = bytearray(_BUFFERED * _ROW.size)
        self._used = 0
        self._flushed = 0
        self._file = -1
        self._pid = os.getpid()
        self._kind = MarkSource.CLOCK
        self._count = 0
        self._began = time.monotonic()
        self._ending = False
        self._lock = threading.RLock()
        self._census: Any = None
        self._silent = False

    def install(self) -> None:
        """Start to listen for marks."""
        marks.listeners.append(self.marked)
        WhenImported("torch.optim.optimizer", marks.watch_optimizers)
        WhenImported("torch.utils.data.dataloader", marks.watch_loaders)
        WhenImported("keras", marks.watch_keras)
        if self._task["lines"]:
            marks.watch_lines(self._task["lines"])
        if self._task["every_seconds"]:
            threading.Thread(target=self._clock, args=(self._task["every_seconds"],), name="lowtide", daemon=True).start()
        os.register_at_fork(after_in_child=self._forked)
        atexit.register(self._finish)

    def _forked(self) -> None:
        """Stop sampling in a forked child (a data loader's worker): it is not the watched process."""
        marks.listeners.clear()
        self._file = -1
        atexit.unregister(self._finish)

    def _clock(self, seconds: float) -> None:
        following, took = time.monotonic(), 0.0
        while self._kind is MarkSource.CLOCK and not self._ending:
            following = max(following + seconds, time.monotonic() + took * (1 / CLOCK_SHARE - 1))
            time.sleep(max(0.0, following - time.monotonic()))
            if self._kind is MarkSource.CLOCK:
                start = time.monotonic()
                self.marked(MarkSource.CLOCK, None)
                took = time.monotonic() - start

    def marked(self, kind: MarkSource, loss: float | None) -> None:
        """Take a row at the end of a step, and an audit if one is due; end the process after the last step."""
        del loss
        if kind > self._kind or os.getpid() != self._pid:
            return
        with self._lock:
            if kind < self._kind:  # a better source has begun to mark: count its steps only
                self._kind, self._count = kind, 0
                if self._census is not None:
                    self._census.forget()
            if self._collect and not (self._count + 1) % self._collect and gc.isenabled():
                self._collected()
            with self._unless_full():
                self._row(kind)
            self._count += 1
            if self._count in self._audits:
                with self._unless_full():
                    self._audit()
            done = bool(self._steps) and self._count >= self._steps
            if done and kind is MarkSource.CLOCK:
                done = time.monotonic() - self._began >= self._task["least_seconds"]
        if done or (not self._used and os.path.exists(os.path.join(self._task["folder"], ENOUGH))):
            self._end(kind)

    def _collected(self) -> None:
        """Collect garbage before the next row; freeze what is left if there is much more than at the last time, to be quick.

        A library that is imported late (torch's compiler comes with the first optimizer) brings a million objects. Freezing
        at each call would hide garbage: of objects that were in use at the time, and those would seem to grow. Objects are not
        counted by listing them: a tuple that another thread is filling may not be referred to.
        """
        gc.collect()
        blocks = sys.getallocatedblocks()
        if blocks > FROZEN_GROWTH * self._frozen_at:
            gc.freeze()
            self._frozen_at = blocks

    @contextlib.contextmanager
    def _unless_full(self) -> Iterator[None]:
        """If a write fails, say so once and stop sampling; steps are still counted, and the process ends as requested."""
        try:
            yield
        except OSError as error:
            if not self._silent:
                self._silent = True
                if self._file >= 0:  # a verdict on the first steps alone could be wrong; and the message needs disk space too
                    with contextlib.suppress(OSError):
                        os.ftruncate(self._file, 0)
                trouble = f"{why(error)} in {self._task['folder']}: {ROOM_FOR_TEMPORARY_FILES}"
                tell(f"lowtide: memory sampling stops: {trouble}; training goes on")

    def _row(self, kind: MarkSource) -> None:
        if self._silent:
            return
        if self._file < 0:
            name = f"{self._task['folder']}/rows-{self._pid}"
            self._file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        now = time.perf_counter_ns()
        heap, tensor = self._allocators.live()
        system = used = python = blocks = arenas = touched = private = virtual = resident = ABSENT
        anonymous = file = shared = segments = unique = proportional = allocated = reserved = children = taken = ABSENT
        slow, maps, status, walk, device, others = self._gates
        if slow.due(now):
            at = time.perf_counter_ns()
            python, blocks, arenas, touched = self._allocators.python()
            slow.took(at)
        if maps.due(now):  # read together: one is subtracted from the other
            at = time.perf_counter_ns()
            system, used = self._allocators.malloc()
            private, virtual, resident = self._kernel.maps()
            segments = self._kernel.segments()
            maps.took(at)
        if status.due(now):
            at = time.perf_counter_ns()
            anonymous, file, shared = self._kernel.resident()
            status.took(at)
        if walk.due(now):
            at = time.perf_counter_ns()
            unique, proportional = self._kernel.shares()
            walk.took(at)
        if device.due(now):
            at = time.perf_counter_ns()
            allocated, reserved = cuda()
            device.took(at)
        if others.due(now):
            at = time.perf_counter_ns()
            children, taken = self._family.read()
            others.took(at)
        _ROW.pack_into(
            self._buffer,
            self._used * _ROW.size,
            now,
            kind,
            heap,
            tensor,
            self._allocators.peak(),
            system,
            used,
            python,
            blocks,
            arenas,
            touched,
            private,
            virtual,
            resident,
            anonymous,
            file,
            shared,
            segments,
            unique,
            proportional,
            allocated,
            reserved,
            children,
            taken,
        )
        self._used += 1
        if self._used == _BUFFERED or now - self._flushed > _FLUSH_NS:
            self._flush(now)

    def _flush(self, now: int) -> None:
        if self._used and self._file >= 0 and not self._silent:
            write(self._file, memoryview(self._buffer)[: self._used * _ROW.size])
        self._used, self._flushed = 0, now

    def _audit(self) -> None:
        """Write an audit: after a garbage collection, the bytes of every allocator, and resident bytes by kind of mapping."""
        if self._silent:
            return
        began = time.perf_counter_ns()
        before = self._held()
        collected = gc.collect() if gc.isenabled() else 0
        after = self._held()
        self._flush(began)
        if self._task["census"] and self._task["census_kind"] in (None, int(self._kind)):
            self._look()
        entry = {
            "step": self._count,
            "kind": int(self._kind),
            "collected": collected,
            "cycles_bytes": max(0, before - after),
            "held_bytes": after,
            "children": self._family.members(),
            **self._balance(),
        }
        if self._steps and self._count >= self._steps:  # only now, as a trim changes what later rows would show
            self._allocators.trim()
            entry["trimmed_bytes"] = entry["resident_bytes"] - self._kernel.maps()[2]
        entry["seconds"] = (time.perf_counter_ns() - began) / 1e9
        with open(f"{self._task['folder']}/audits-{self._pid}", "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def _held(self) -> int:
        python, *_ = self._allocators.python()
        heap, _ = self._allocators.live()
        if heap == ABSENT:
            _, heap = self._allocators.malloc()
        return max(python, 0) + max(heap, 0)

    def _balance(self) -> dict[str, Any]:
        heap, _ = self._allocators.live()
        system, used = self._allocators.malloc()
        python, blocks, arenas, touched = self._allocators.python()
        private, virtual, resident = self._kernel.maps()
        return {
            "heap_bytes": heap,
            "system_bytes": system,
            "used_bytes": used,
            "python_bytes": python,
            "python_blocks": blocks,
            "mapped_bytes": self._allocators.mapped(),
            "arena_bytes": arenas,
            "touched_bytes": touched,
            "private_bytes": private,
            "virtual_bytes": virtual,
            "resident_bytes": resident,
            "books": books(),
        }

    def _look(self) -> None:
        if self._census is None:
            from lowtide.probe.census import Census

            self._census = Census(self._task["folder"], deep=self._task["deep"])
        self._census.look(self._count, kind=int(self._kind), last=self._count == max(self._audits))

    def _end(self, kind: MarkSource) -> None:
        """End the script by an exception; if it continues regardless, or this is not its main thread, end the process."""
        self._finish()
        if self._ending or threading.current_thread() is not threading.main_thread() or kind is MarkSource.CLOCK:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
            os._exit(0)
        self._ending = True
        raise Enough(0)

    def _finish(self) -> None:
        with self._lock:
            if os.getpid() == self._pid:
                with self._unless_full():
                    self._flush(time.perf_counter_ns())
