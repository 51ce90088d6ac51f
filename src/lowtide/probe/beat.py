"""What a guarded process tells its guard: steps, safe points, saves, and how it ended. Standard library only.

The guard names a folder in the environment. Figures lie in a small mapped file per process, so that they are there
whatever ends it; a file's presence is the request to stop.
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
"""Environment variable: after what the process stops of itself: ``epoch``, ``every=N``, or nothing."""
GENERATION: Final = "LOWTIDE_GENERATION"
"""Environment variable: how many processes came before this one."""
STOP: Final = "stop"
"""File in the folder: please save at the next safe point, and stop."""
SAVED: Final = "saved-"
"""Beginning of the name of a file that says what a beat without room cannot: the state is saved, the process stops."""
STOPPED: Final = 75
"""Exit code of a process that has saved its state and wants to be started again (``EX_TEMPFAIL`` of ``sysexits.h``)."""


class Beat(NamedTuple):
    """What a process has told; times in seconds of the machine's monotonic clock, 0 for never.

    Attributes:
        steps: marked by the framework or the script.
        first_step, last_step: when.
        points: safe points passed.
        first_point, last_point: when.
        longest_gap: between two safe points, seconds.
        saves: checkpoints written.
        last_save: when.
        save_seconds: of all saves.
        longest_save: seconds.
        load_seconds: of putting the state back.
        saved_bytes: of the last save.
        fraction: of the work that is done, by the script's own account; 0 where it did not say.
        stopped: 1 once the state is saved and the process ends to be started again.
        rank: of the process among several; -1 where it is alone.
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
    """A beat from its file's bytes; an empty one where they are too few."""
    return Beat(*_LAYOUT.unpack_from(raw)) if len(raw) >= _LAYOUT.size else Beat()


def _mapped(path: str) -> mmap.mmap:
    """A beat's file, whose bytes the disk has.

    Raises:
        OSError: if it has no room for them.
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
        """Nothing is written before something happens."""
        self.folder = folder
        self.beat = Beat(rank=float(os.environ.get("RANK", "-1")))
        self._pid = os.getpid()
        self._map: mmap.mmap | None = None
        self._mute = False

    def tell(self, **changed: float) -> None:
        """Write what has changed."""
        if os.getpid() != self._pid:  # a forked child is not the process that is guarded
            return
        self.beat = self.beat._replace(**changed)
        if self._map is None and not self._mute:
            path = os.path.join(self.folder, f"beat-{self._pid}")
            try:
                self._map = _mapped(path)
            except OSError as error:
                self._mute = True
                trouble = f"{why(error)} at {path}: {ROOM_FOR_TEMPORARY_FILES}"
                say(f"lowtide: the guard sees no steps of this process: {trouble}; training goes on")
        if self._map is not None:
            _LAYOUT.pack_into(self._map, 0, *self.beat)
        elif changed.get("stopped"):  # a name takes no room
            with contextlib.suppress(OSError), open(os.path.join(self.folder, f"{SAVED}{self._pid}"), "w"):
                pass

    def stepped(self, kind: MarkSource, loss: float | None) -> None:
        """A step of the framework is over."""
        del kind, loss
        now = time.monotonic()
        self.tell(steps=self.beat.steps + 1, first_step=self.beat.first_step or now, last_step=now)

    def passed(self, fraction: float | None) -> None:
        """A safe point was passed."""
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
        """A checkpoint was written."""
        self.tell(
            saves=self.beat.saves + 1,
            last_save=time.monotonic(),
            save_seconds=self.beat.save_seconds + seconds,
            longest_save=max(seconds, self.beat.longest_save),
            saved_bytes=float(size),
        )

    def ended(self, error: BaseException | None) -> None:
        """The process ends; by an error that nobody caught, where one is given."""
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
    """Who tells the guard; None where nobody guards this process."""
    return _teller


def begin() -> None:
    """Tell the guard that the environment names, if it names one."""
    global _teller  # noqa: PLW0603 - one per process
    folder = os.environ.get(FOLDER)
    if folder is None or _teller is not None or not os.path.isdir(folder):
        return
    _teller = found = Teller(folder)
    if "RANK" in os.environ and "--multiprocessing-fork" not in sys.orig_argv:  # a rank, not a worker that it started
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
    """A listener that counts marks of the surest kind that comes."""
    best = MarkSource.CLOCK

    def marked(kind: MarkSource, loss: float | None) -> None:
        nonlocal best
        if kind < best and found.beat.steps:
            found.tell(steps=0.0)
        best = min(best, kind)
        if kind is best:
            found.stepped(kind, loss)

    return marked
