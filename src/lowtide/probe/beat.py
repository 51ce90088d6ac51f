"""How a guarded process reports to its guard: steps, safe points, saves, and how it ended. Standard library only.

The guard passes a folder in an environment variable. Each process keeps its figures in a small mapped file there, so that they
survive however the process ends. The guard asks it to stop by creating a file.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import mmap
import os
import struct
import sys
import time
from types import TracebackType
from typing import Any, Final, NamedTuple, final

from lowtide.base.files import ROOM_FOR_TEMPORARY_FILES, reserve, why
from lowtide.base.messages import tell as say
from lowtide.probe import marks
from lowtide.probe.catalogue import out_of_memory
from lowtide.probe.marks import MarkSource, WhenImported

FOLDER: Final = "LOWTIDE_GUARD"
"""Environment variable: the folder that guard and process share."""
RECYCLE: Final = "LOWTIDE_RECYCLE"
"""Environment variable: when the process stops without being asked: at an epoch's end (``epoch``), after N safe points
(``every=N``), or never (empty)."""
GENERATION: Final = "LOWTIDE_GENERATION"
"""Environment variable: how many processes the guard started before this one."""
STOP: Final = "stop"
"""File in the folder whose presence asks the process to save at the next safe point, and stop."""
SAVED: Final = "saved-"
"""Prefix of an empty file whose name says that the state is saved and the process stops, for a disk too full for the beat."""
STOPPED: Final = 75
"""Exit code of a process that has saved its state and asks to be restarted (``EX_TEMPFAIL`` of ``sysexits.h``)."""


class Beat(NamedTuple):
    """Figures that a process reports; times are in seconds of the machine's monotonic clock, 0 for never.

    Attributes:
        steps: number of steps marked by the framework or the script.
        first_step, last_step: times of the first and the last step.
        points: number of safe points passed.
        first_point, last_point: times of the first and the last safe point.
        longest_gap: longest time between two safe points, in seconds.
        saves: number of checkpoints written.
        last_save: time of the last save.
        save_seconds: duration of all saves together.
        longest_save: duration of the longest save, in seconds.
        load_seconds: time taken to restore the state.
        saved_bytes: size of the last save.
        fraction: share of the work that is done, as the script reports it; 0 if it does not.
        stopped: 1 once the state is saved and the process ends in order to be restarted.
        rank: the process's rank among several; -1 if it is alone.
    """

    steps: float = 0.0
    first_step: float = 0.0
    last_step: float = 0.0
    points: float = 0.0
    first_point: float = 0.0
    last_point: float = 0.0
    longest_gap: float = 0.0
    saves: float = 0.0
    last_save: float = 0.0
    save_seconds: float = 0.0
    longest_save: float = 0.0
    load_seconds: float = 0.0
    saved_bytes: float = 0.0
    fraction: float = 0.0
    stopped: float = 0.0
    rank: float = -1.0


_LAYOUT: Final = struct.Struct(f"<{len(Beat._fields)}d")


def read(raw: bytes) -> Beat:
    """Decode a beat from its file's bytes; an empty beat if there are too few."""
    return Beat(*_LAYOUT.unpack_from(raw)) if len(raw) >= _LAYOUT.size else Beat()


def _mapped(path: str) -> mmap.mmap:
    """Map a beat's file, with its disk space allocated.

    Raises:
        OSError: if the disk has no room for it.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        reserve(file, _LAYOUT.size)
        return mmap.mmap(file, _LAYOUT.size)
    finally:
        os.close(file)


@final
class Teller:
    """Writes this process's beat."""

    def __init__(self, folder: str) -> None:
        """Start an empty beat; nothing is written before the first report."""
        self.folder = folder
        self.beat = Beat(rank=float(os.environ.get("RANK", "-1")))
        self._pid = os.getpid()
        self._map: mmap.mmap | None = None
        self._mute = False

    def tell(self, **changed: float) -> None:
        """Update fields of the beat, and write it."""
        if os.getpid() != self._pid:  # a forked child is not the guarded process
            return
        self.beat = self.beat._replace(**changed)
        if self._map is None and not self._mute:
            path = os.path.join(self.folder, f"beat-{self._pid}")
            try:
                self._map = _mapped(path)
            except OSError as error:
                self._mute = True
                trouble = f"{why(error)} at {path}: {ROOM_FOR_TEMPORARY_FILES}"
                say(f"lowtide: the guard cannot see the steps of this process: {trouble}; training goes on")
        if self._map is not None:
            _LAYOUT.pack_into(self._map, 0, *self.beat)
        elif changed.get("stopped"):  # an empty file needs no disk space
            with contextlib.suppress(OSError), open(os.path.join(self.folder, f"{SAVED}{self._pid}"), "w"):
                pass

    def stepped(self, kind: MarkSource, loss: float | None) -> None:
        """Count a step that has ended."""
        del kind, loss
        now = time.monotonic()
        self.tell(steps=self.beat.steps + 1, first_step=self.beat.first_step or now, last_step=now)

    def passed(self, fraction: float | None) -> None:
        """Count a safe point that was passed, and note the fraction of the work done, if given."""
        now = time.monotonic()
        gap = now - self.beat.last_point if self.beat.last_point else 0.0
        self.tell(
            points=self.beat.points + 1,
            first_point=self.beat.first_point or now,
            last_point=now,
            longest_gap=max(gap, self.beat.longest_gap),
            fraction=self.beat.fraction if fraction is None else fraction,
        )

    def saved(self, seconds: float, size: int) -> None:
        """Count a checkpoint that was written, with its duration in seconds and its size in bytes."""
        self.tell(
            saves=self.beat.saves + 1,
            last_save=time.monotonic(),
            save_seconds=self.beat.save_seconds + seconds,
            longest_save=max(seconds, self.beat.longest_save),
            saved_bytes=float(size),
        )

    def ended(self, error: BaseException | None) -> None:
        """Report that the process ends, and the uncaught error that ends it, if any."""
        if os.getpid() != self._pid:
            return
        kind = None if error is None else out_of_memory(error)
        said = {
            "rank": self.beat.rank,
            "error": None if error is None else f"{type(error).__name__}: {error}"[:400],
            "memory": None if kind is None else kind.where.value,
        }
        path = os.path.join(self.folder, f"ended-{self._pid}")
        if error is None and os.path.exists(path):
            return
        with contextlib.suppress(OSError), open(path, "w") as file:
            file.write(json.dumps(said))


_teller: Teller | None = None


def teller() -> Teller | None:
    """This process's :class:`Teller`; None if the process is not guarded."""
    return _teller


def begin() -> None:
    """Start to report to the guard named in the environment, if there is one."""
    global _teller  # noqa: PLW0603 - one per process
    folder = os.environ.get(FOLDER)
    if folder is None or _teller is not None or not os.path.isdir(folder):
        return
    _teller = found = Teller(folder)
    if "RANK" in os.environ and "--multiprocessing-fork" not in sys.orig_argv:  # a rank, not a worker that a rank started
        found.tell()
    marks.listeners.append(_first_kind(found))
    WhenImported("torch.optim.optimizer", marks.watch_optimizers)
    WhenImported("keras", marks.watch_keras)
    atexit.register(found.ended, None)
    hooked = sys.excepthook

    def failed(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        found.ended(error)
        hooked(kind, error, trace)

    sys.excepthook = failed


def _first_kind(found: Teller) -> Any:
    """A listener that counts marks from the best source seen so far; a better one restarts the count."""
    best = MarkSource.CLOCK

    def marked(kind: MarkSource, loss: float | None) -> None:
        nonlocal best
        if kind < best and found.beat.steps:
            found.tell(steps=0.0)
        best = min(best, kind)
        if kind is best:
            found.stepped(kind, loss)

    return marked
