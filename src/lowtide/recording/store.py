"""The recording: one SQLite file for a whole run, readable after SIGKILL.

While a step runs, what happens is written as fixed-size entries into a *journal*, a mapped file beside the recording; names
(of operators, modules, source lines) go into a second one. Both survive the process. When the step is over, its figures, and
its entries where they are kept, go into the SQLite file and the journal begins anew. A clean end removes both files; a reader
that finds them reads the last, unfinished step out of them.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import itertools
import json
import math
import mmap
import os
import sqlite3
import struct
import sys
import threading
import weakref
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import IntEnum
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import numpy as np
import psutil
from numpy.typing import NDArray

from lowtide.base import files
from lowtide.base.errors import RecordingError
from lowtide.base.messages import readable, tell
from lowtide.base.trace import Phase

FORMAT: Final = 2
"""Version of the file."""
APPLICATION: Final = 0x4C6F7774
_APPLICATION_AT: Final = 68
_HEADER_BYTES: Final = 72
"""Where SQLite has the application's number in a file (sqlite.org/fileformat.html, section 1.3)."""
"""``application_id`` of the SQLite header: "Lowt"."""


class Kind(IntEnum):
    """What an entry says. Fields that are not named are 0."""

    OP = 1
    """An operator ran: a, b, c = its name, module and source line; size, peak, live = bytes before, highest inside, after;
    flags: see :func:`encode_run`."""
    BORN = 2
    """A block appeared: a = block, b = its type and shape, size = bytes; flags: see :class:`Flag`."""
    DIED = 3
    """A block's memory was given back: a = block."""
    READ = 4
    """The operator before read a block: a = block, size = bytes of the tensor on it (0 where it was not said); flags."""
    SAVED = 5
    """Autograd saved a tensor of a block: a = block."""
    RELEASED = 6
    """Autograd let go of it: a = block."""
    ROLE = 7
    """A block was recognised: a = block, b = its name, flags = :class:`Role`."""
    HELD = 8
    """A variable of the script refers to a block: a = block, b = variable, function and line."""
    PHASE = 9
    """Another phase begins: live; of the phase before: peak = highest point, size = most heap bytes that are not torch's."""
    DENIED = 10
    """An operator failed for want of memory: a, b, c as for OP; size = bytes asked for, live, peak."""
    CALL = 11
    """A model was called from outside any module: flags = 1 where it evaluates (``eval()``) while autograd records."""


class Flag(IntEnum):
    """Bits of ``flags`` of BORN and READ entries."""

    COUNTED = 1
    MET = 2
    WRITTEN = 4


COMPILED: Final = "compiled region"
"""What ``torch.compile`` made, as the name of an operator, and before the names of operators that its backward calls."""
BY_ZERO: Final = " by zero"
"""Behind the name of an operator that zeroes without being named for it: a product, or a filling, in place."""
HELD_BYTES: Final = 64 << 10
"""Blocks from this size on are looked up among the script's variables, and when they were used last is noted."""
_SECONDS_STEPS: Final = 256
_SECONDS_LEAST: Final = 24
_SECONDS_MOST: Final = (1 << 14) - 1
_REPLAYABLE: Final = 1 << 14
_SEEDED: Final = 1 << 15


def encode_run(seconds: float, *, replayable: bool, seeded: bool) -> int:
    """An operator's run in 16 bits: seconds in steps of 2^(1/256) from 2^-24 on, whether it may be run again, and draws."""
    steps = round(_SECONDS_STEPS * (math.log2(seconds) + _SECONDS_LEAST)) if seconds > 0 else 1
    return max(1, min(_SECONDS_MOST, steps)) | _REPLAYABLE * replayable | _SEEDED * seeded


def decode_run(flags: int) -> tuple[float, bool, bool]:
    """Seconds, whether it may be run again, whether it draws; 0 seconds in a recording that does not say."""
    steps = flags & _SECONDS_MOST
    seconds = 2.0 ** (steps / _SECONDS_STEPS - _SECONDS_LEAST) if steps else 0.0
    return seconds, bool(flags & _REPLAYABLE), bool(flags & _SEEDED)


class Role(IntEnum):
    """What a block is for; the later ones are told from its life, not written into ROLE entries."""

    PARAMETER = 0
    BUFFER = 1
    GRADIENT = 2
    OPTIMIZER_STATE = 3
    INPUT = 4
    ACTIVATION = 5
    OUTPUT = 6
    TEMPORARY = 7
    WORKSPACE = 8
    CACHE = 9
    UNKNOWN = 10


ENTRY: Final = np.dtype(
    [("time", "<f8"), ("kind", "u1"), ("phase", "u1"), ("flags", "<u2"), ("a", "<u4"), ("b", "<u4"), ("c", "<u4"),
     ("size", "<i8"), ("live", "<i8"), ("peak", "<i8")]
)
"""One entry: seconds since the recording began, then as :class:`Kind` says; bytes where sizes are meant."""
PACK: Final = struct.Struct("<dBBHIIIqqq")
CARRIED: Final = np.dtype(
    [("block", "<u4"), ("role", "<i2"), ("counted", "u1"), ("phase", "u1"), ("name", "<u4"), ("op", "<u4"), ("module", "<u4"),
     ("source", "<u4"), ("label", "<u4"), ("saves", "<u4"), ("size", "<i8")]
)
"""A block that was live when a step began; role -1 where none was recognised; the others are names and counts."""
PHASES: Final = tuple(Phase)

_HEADER: Final = struct.Struct("<8sqddqqq")
"""Magic, step, its start, (unused), live bytes at its start, high water by then, number of carried blocks."""
_MAGIC: Final = b"lowtide\x01"
_FIRST_BYTES: Final = 1 << 16
_MOST_GROWTH_BYTES: Final = 1 << 24
"""The journal's file doubles, but takes no more of the disk than this at a time ..."""
_LEAST_GROWTH_BYTES: Final = 1 << 12
"""... and where the disk is nearly full, what is left of it down to this."""
_LARGEST_BYTES: Final = 1 << 48
"""No memory is larger: a number above it was not written by a recorder."""
_MOST_BYTES: Final = 1 << 28
"""A journal takes no more than this (5.6 million entries in one step): what follows in that step is lost."""

_TABLES: Final = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT);
CREATE TABLE names (id INTEGER PRIMARY KEY, text TEXT);
CREATE TABLE steps (step INTEGER PRIMARY KEY, start REAL, seconds REAL, start_bytes INTEGER, end_bytes INTEGER,
                    peak_bytes INTEGER, high_water_bytes INTEGER, complete INTEGER, entries BLOB, carried BLOB);
CREATE TABLE phases (step INTEGER, position INTEGER, name TEXT, start REAL, seconds REAL, start_bytes INTEGER,
                     end_bytes INTEGER, peak_bytes INTEGER, high_water_bytes INTEGER, outside_bytes INTEGER);
CREATE TABLE process (step INTEGER, start REAL, seconds REAL, resident_bytes INTEGER, highest_bytes INTEGER,
                      change_bytes INTEGER, unique_bytes INTEGER, children_bytes INTEGER, heap_bytes INTEGER,
                      heap_peak_bytes INTEGER, loss REAL, marked INTEGER);
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseFigures:
    """One phase of one step; bytes are of torch's allocator.

    Attributes:
        start: seconds since the recording began.
        high_water_bytes: highest point of the run so far, at its end.
        outside_bytes: most heap bytes in it that are not torch's: Python's objects, workspaces of LAPACK and MKL.
    """

    name: str
    start: float
    seconds: float
    start_bytes: int
    end_bytes: int
    peak_bytes: int
    high_water_bytes: int
    outside_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One step: its figures, and its entries where they were kept.

    Attributes:
        step: -1 for what came before the first one.
        complete: whether its end was seen.
    """

    step: int
    start: float
    seconds: float
    start_bytes: int
    end_bytes: int
    peak_bytes: int
    high_water_bytes: int
    complete: bool
    phases: tuple[PhaseFigures, ...]
    entries: NDArray[np.void] | None = field(default=None, repr=False)
    carried: NDArray[np.void] | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRow:
    """What the whole process took in one step of the script, or in one second where it marks none.

    Attributes:
        resident_bytes: resident set size at its end; ``highest_bytes`` the highest seen in it (looked at 50 times a second).
        change_bytes: of the resident set size since the step before.
        unique_bytes: unique set size at its end; 0 where the system does not tell.
        children_bytes: proportional set size of all child processes.
        heap_bytes, heap_peak_bytes: live in the heap at its end, and the highest in it; 0 without the counter.
        marked: whether the script, or its framework, ended it by a mark; steps and what was not marked are counted apart.
    """

    step: int
    start: float
    seconds: float
    resident_bytes: int
    highest_bytes: int
    change_bytes: int
    unique_bytes: int
    children_bytes: int
    heap_bytes: int
    heap_peak_bytes: int
    loss: float | None
    marked: bool


def tail_path(path: Path) -> Path:
    """The journal beside a recording."""
    return path.with_name(path.name + "-tail")


def names_path(path: Path) -> Path:
    """The names that the journal refers to."""
    return path.with_name(path.name + "-names")


@final
class Journal:
    """Entries of the step that runs, in a mapped file.

    Attributes:
        silent: whether nothing is written any more: this process is a child, the disk is full, or the recording is over.
    """

    def __init__(self, path: Path | None, failed: Callable[[OSError], None] | None = None) -> None:
        """Create the file.

        Args:
            path: of the file; None for a journal that is silent from the beginning.
            failed: told that there is no room for more; without it, that is raised.

        Raises:
            OSError: if there is no room for it.
        """
        self.silent = path is None
        self._path = path
        if path is None:
            return
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self._failed = failed
        self._growing = threading.RLock()  # a weak reference's callback in between may add an entry
        self._size = 0
        try:
            self._size = self._reserved(_LEAST_GROWTH_BYTES, _FIRST_BYTES)
            self._map = mmap.mmap(self._file, self._size)
        except BaseException:
            os.close(self._file)
            path.unlink(missing_ok=True)
            raise
        self._start = _HEADER.size
        self._next = itertools.count().__next__

    def begin(self, step: int, start: float, live_bytes: int, high_water_bytes: int, carried: NDArray[np.void]) -> None:
        """A new step: what is in the journal is in the recording, or is not kept."""
        if self.silent or not self._whole():
            return
        used = min(self._start + self._next() * ENTRY.itemsize, self._size)
        first = _HEADER.size + carried.nbytes
        if not self._grow(first + ENTRY.itemsize):
            return
        self._start = first
        if used > self._start:
            self._map[self._start : used] = bytes(used - self._start)
        self._map[_HEADER.size : self._start] = carried.tobytes()
        _HEADER.pack_into(self._map, 0, _MAGIC, step, start, 0.0, live_bytes, high_water_bytes, len(carried))
        self._next = itertools.count().__next__

    def add(self, *entry: Any) -> None:
        """One entry, field by field as in :data:`ENTRY`; safe against weak-reference callbacks in between."""
        if self.silent:
            return
        at = self._start + self._next() * ENTRY.itemsize
        if at + ENTRY.itemsize > self._size and not self._grow(at + ENTRY.itemsize):
            return
        PACK.pack_into(self._map, at, *entry)

    def _grow(self, needed: int) -> bool:
        with self._growing:
            if needed <= self._size:
                return True
            if needed > _MOST_BYTES or self.silent or not self._whole():
                return False
            try:
                size = self._reserved(needed, min(2 * self._size, self._size + _MOST_GROWTH_BYTES))
                if size > self._size:
                    self._map.resize(size)
                    self._size = size
            except OSError as error:
                self._stop(error)
                return False
            return True

    def _reserved(self, needed: int, wished: int) -> int:
        """The size to which the file has grown: what was wished for, or what is needed where there is no room for more."""
        page = mmap.ALLOCATIONGRANULARITY
        least = -(-needed // page) * page
        for size in (max(wished, least), least):
            try:
                files.reserve(self._file, size, since=self._size)
            except OSError:
                if size == least:
                    raise
            else:
                return size
        raise AssertionError

    def _whole(self) -> bool:
        """Whether nobody has cut the file short, so that all of it may be touched."""
        if os.fstat(self._file).st_size >= self._size:
            return True
        self._stop(OSError(errno.EIO, "somebody has cut the file short"))
        return False

    def _stop(self, error: OSError) -> None:
        self.silent = True
        if self._failed is None:
            raise error
        self._failed(error)

    def entries(self) -> NDArray[np.void]:
        """A copy of the step's entries so far; none where they are not written."""
        if self.silent or not self._whole():
            return np.zeros(0, dtype=ENTRY)
        count = self._next()
        self._next = itertools.count(count).__next__
        return _entries(self._map[self._start : min(self._start + count * ENTRY.itemsize, self._size)])

    def close(self, *, keep: bool = False) -> None:
        """Unmap, and remove the file, unless it is what is left of a step that could not be written elsewhere."""
        self.silent = True
        if self._path is None:
            return
        self._map.close()
        os.close(self._file)
        if not keep:
            self._path.unlink(missing_ok=True)


def _entries(data: bytes) -> NDArray[np.void]:
    """The entries at the beginning of some bytes: up to the first that is empty."""
    found: NDArray[np.void] = np.frombuffer(data[: len(data) // ENTRY.itemsize * ENTRY.itemsize], dtype=ENTRY)
    empty = np.flatnonzero(found["kind"] == 0)
    return found[: empty[0]].copy() if len(empty) else found.copy()


def _check_place(path: Path) -> None:
    """Whether a recording may be written here: what is no recording is not replaced by one.

    Raises:
        RecordingError: if it may not.
    """
    if path.is_dir() or not path.name:
        raise RecordingError(f"cannot write {path}: it is a folder; name a file in it")
    try:
        with path.open("rb") as file:
            head = file.read(_HEADER_BYTES)
    except FileNotFoundError:
        return
    except OSError as error:
        raise RecordingError(f"cannot write {path}: {error.strerror}") from None
    if head and int.from_bytes(head[_APPLICATION_AT:_HEADER_BYTES]) != APPLICATION:
        raise RecordingError(f"cannot write {path}: it is there already and is no recording; name another file, or remove it")


def _tell_of_set_aside(path: Path) -> None:
    """Tell of recordings that lie beside this place, set aside by processes that were killed before they were done."""
    for found in path.parent.glob(f".{glob.escape(path.name)}.*"):
        owner = found.name.rpartition(".")[2]
        if owner.isdecimal() and not psutil.pid_exists(int(owner)):
            tell(f"lowtide: {found} is what was at {path.name} before a recording that was killed: rename it, or remove it")


FEW_LOOKS: Final = 30
"""Rows of the process, a second each, of a script that failed while it was still importing (ten, on a busy machine)."""


_META: Final = "INSERT OR REPLACE INTO meta VALUES (?, ?)"


def _meta_rows(meta: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(key, readable(json.dumps(value, ensure_ascii=False))) for key, value in meta.items()]


@final
class Writer:
    """Writes a recording. Where the disk does not take it any more it says so, once, and writes nothing from there on.

    Attributes:
        stopped: why nothing is written any more; None while it is.
    """

    def __init__(self, path: Path, meta: Mapping[str, Any]) -> None:
        """Create the file; a recording that was there is kept aside until this one is worth more.

        Raises:
            RecordingError: if it cannot be written, but for want of room: that may come at any time, and training goes on.
        """
        self.path = path
        _check_place(path)
        _tell_of_set_aside(path)
        self._names: dict[str, int] = {}
        self._stored = self._steps = self._looks = 0
        self._lock = threading.Lock()
        self._naming = threading.RLock()
        self._told = threading.Lock()
        self._inherited = False
        self.stopped: str | None = None
        self._base: sqlite3.Connection | None = None
        self._names_file, self._inode = -1, -1
        self.journal = Journal(None)
        self._former = path.with_name(f".{path.name}.{os.getpid()}") if path.exists() else None
        try:
            self._create({"format": FORMAT, "python": sys.version.split()[0], "pid": os.getpid(), "device": "cpu", **meta})
        except (sqlite3.Error, OSError) as error:
            self._restore()
            if not files.is_full(error):
                raise RecordingError(f"cannot write {path}: {files.why(error)}") from None
            self._stop(error)
        except BaseException:
            self._restore()
            raise
        writer = weakref.ref(self)  # the interpreter keeps what it calls for ever
        os.register_at_fork(after_in_child=lambda: _inherit(writer))

    def _create(self, meta: Mapping[str, Any]) -> None:
        if self._former is not None:
            self.path.replace(self._former)
        for old in (tail_path(self.path), names_path(self.path)):
            old.unlink(missing_ok=True)
        made = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)  # says why, which SQLite does not
        self._inode = os.fstat(made).st_ino
        os.close(made)
        self._base = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        self._base.executescript(
            f"PRAGMA application_id={APPLICATION}; PRAGMA journal_mode=MEMORY; PRAGMA synchronous=OFF; BEGIN; {_TABLES} COMMIT"
        )
        self._names_file = os.open(names_path(self.path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self._base.executemany(_META, _meta_rows(meta))
        self.journal = Journal(tail_path(self.path), self._stop)

    def _restore(self) -> None:
        """Take away what was written, and put back what was there before."""
        self._release(keep=False)
        with contextlib.suppress(OSError):
            if self._former is not None and self._former.exists():
                self._former.replace(self.path)
            elif self._former is None:
                self.path.unlink(missing_ok=True)

    def _release(self, *, keep: bool) -> None:
        """Close all files; those of the step that ran stay where it could not be written elsewhere."""
        with self._lock:
            base, self._base = self._base, None
        number, self._names_file = self._names_file, -1
        with contextlib.suppress(sqlite3.Error):
            if base is not None:
                base.close()
        with contextlib.suppress(OSError):
            if number >= 0:
                os.close(number)
            if not keep:
                names_path(self.path).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.journal.close(keep=keep)

    def _stop(self, error: Exception) -> None:
        """Nothing can be written any more: say so once, from whichever thread saw it first."""
        if not self._told.acquire(blocking=False):
            return
        self.stopped = files.why(error)
        self.journal.silent = True
        remedy = "make room there, or record to another disk" if files.is_full(error) else "record anew"
        tell(f"lowtide: the recording stops: {self.stopped} at {self.path}: {remedy}; training goes on")

    def _is_there(self) -> bool:
        """Whether the path leads to what was written: on Unix a file that was removed can be written to all the same."""
        try:
            return self.path.stat().st_ino == self._inode
        except OSError:
            return False

    def _change(self, change: Callable[[sqlite3.Connection], object], *, last: bool = False) -> bool:
        """One change of the SQLite file, made wholly or not at all: no other place writes to it. Whether it was made.

        Args:
            change: makes it.
            last: whether it is tried where others were not made: what is short may find room in a page that there is.
        """
        if self._inherited or (self.stopped is not None and not last):
            return False
        with self._lock:
            base = self._base
            if base is None:
                return False
            try:
                base.execute("BEGIN")
                change(base)
                base.execute("COMMIT")
            except sqlite3.Error as error:
                _roll_back(base)
                self._stop(error)
                return False
            except BaseException:
                _roll_back(base)
                raise
        return True

    def put_meta(self, meta: Mapping[str, Any], *, last: bool = False) -> None:
        """Facts about the run."""
        rows = _meta_rows(meta)
        self._change(lambda base: base.executemany(_META, rows), last=last)

    def name(self, text: str) -> int:
        """The id of a name."""
        found = self._names.get(text)
        if found is not None:
            return found
        if self._inherited or self.stopped is not None:
            return 0
        with self._naming:  # lines are in the order of their numbers
            found = self._names.get(text)
            if found is None:
                found = self._names[text] = len(self._names)
                try:
                    files.write(self._names_file, json.dumps(readable(text)).encode() + b"\n")
                except OSError as error:
                    self._stop(error)
        return found

    def step(self, row: StepRow) -> None:
        """A step is over."""
        with self._naming:
            new = list(itertools.islice(self._names.items(), self._stored, None))
        rows = [(i, readable(text)) for text, i in new]

        def change(base: sqlite3.Connection) -> None:
            base.executemany("INSERT INTO names VALUES (?, ?)", rows)
            _insert(base, row)

        if self._change(change):
            self._stored += len(rows)
            self._steps += row.step >= 0

    def forget(self, step: int) -> None:
        """Of a step that is over, keep the figures alone."""
        self._change(lambda base: base.execute("UPDATE steps SET entries = NULL, carried = NULL WHERE step = ?", (step,)))

    def process(self, row: ProcessRow) -> None:
        """What the process took in a step; from any thread."""
        values = tuple(asdict(row).values())
        if self._change(lambda base: base.execute("INSERT INTO process VALUES (?,?,?,?,?,?,?,?,?,?,?,?)", values)):
            self._looks += 1

    def close(self, *, code: int = 0, error: BaseException | None = None, always: bool = False) -> bool:
        """The recording is whole: how the script ended.

        Args:
            code: the exit code.
            error: what it ended with.
            always: whether it is worth keeping without a step too.

        Returns:
            Whether it is there: of a script that failed before any step the recording that was there before is put back.
        """
        if self._inherited:
            return True
        if self._base is None:
            return False
        if self.stopped is None and not self._is_there():
            self._stop(FileNotFoundError(errno.ENOENT, "It was removed or replaced meanwhile"))
        stopped = self.stopped
        said = None if error is None else f"{type(error).__name__}: {error}"[:500]
        self.put_meta({"exit_code": code, "error": said}, last=True)
        if stopped is not None:
            self.put_meta({"stopped": stopped}, last=True)
        bare = not always and not self._steps and self._looks <= FEW_LOOKS
        empty = self._former is not None and bare and (code != 0 or stopped is not None)
        self._release(keep=self.stopped is not None and not empty)
        with contextlib.suppress(OSError):  # its folder has gone
            if self._former is not None and empty:
                self._former.replace(self.path)
            elif self._former is not None:
                self._former.unlink(missing_ok=True)
        return not empty


def _roll_back(base: sqlite3.Connection) -> None:
    """End a transaction that SQLite may have ended by itself."""
    with contextlib.suppress(sqlite3.Error):
        if base.in_transaction:
            base.execute("ROLLBACK")


def _inherit(known: weakref.ref[Writer]) -> None:
    """This process is a child that inherited a recording: it is its parent's."""
    writer = known()
    if writer is not None:
        writer._inherited = True
        writer.journal.silent = True


_PHASE_VALUES: Final = attrgetter(*(f.name for f in fields(PhaseFigures)))


def _insert(base: sqlite3.Connection, row: StepRow) -> None:
    blobs = [None if x is None else zlib.compress(x.tobytes(), 1) for x in (row.entries, row.carried)]
    base.execute(
        "INSERT OR REPLACE INTO steps VALUES (?,?,?,?,?,?,?,?,?,?)",
        (row.step, row.start, row.seconds, row.start_bytes, row.end_bytes, row.peak_bytes, row.high_water_bytes,
         int(row.complete), *blobs),
    )
    base.executemany(
        "INSERT INTO phases VALUES (?,?,?,?,?,?,?,?,?,?)",
        [(row.step, i, *_PHASE_VALUES(phase)) for i, phase in enumerate(row.phases)],
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Recording:
    """A recording that was read.

    Attributes:
        meta: facts about the run: ``script``, ``arguments``, ``torch``, ``device``, ``level``, ``exit_code``, ...
        names: what entries refer to.
        steps: in order; entries only where they were kept.
        process: what the whole process took, in order.
    """

    path: Path
    meta: Mapping[str, Any]
    names: tuple[str, ...]
    steps: tuple[StepRow, ...]
    process: tuple[ProcessRow, ...] = ()


def read(file: str | os.PathLike[str]) -> Recording:
    """Read a recording, and what a killed process left of its last step.

    Raises:
        RecordingError: if it is not there, empty, truncated, not a recording, or of a newer format.
    """
    path = Path(file)
    if not path.is_file():
        raise RecordingError(f"no such recording: {path}")
    if path.stat().st_size == 0:
        raise RecordingError(f"{path} is empty: record anew with `lowtide record -o {path} SCRIPT`")
    if zipfile.is_zipfile(path):
        raise RecordingError(f"{path} holds recordings at several sizes: ask `lowtide predict {path} --set NAME=VALUE`")
    try:
        base = sqlite3.connect(f"file:{path.resolve()}?mode=ro", uri=True)
        try:
            (application,) = base.execute("PRAGMA application_id").fetchone()
            if application != APPLICATION:
                raise RecordingError(f"{path} is not a recording of Lowtide")
            meta = {key: json.loads(value) for key, value in base.execute("SELECT key, value FROM meta")}
            if meta.get("format", 0) > FORMAT:
                raise RecordingError(f"{path} has format {meta['format']}, this Lowtide reads up to {FORMAT}: update Lowtide")
            names = [text for (text,) in base.execute("SELECT text FROM names ORDER BY id")]
            steps = _steps(base)
            process = tuple(_process(base))
        finally:
            base.close()
        if tail_path(path).is_file() and names_path(path).is_file():
            names = max(names, _names_of(names_path(path)), key=len)  # the file has what came since the last step, too
        _check_meta(meta)
        _check(names, steps)
    except (sqlite3.Error, zlib.error, ValueError, TypeError, OverflowError) as error:
        raise RecordingError(f"{path} is damaged or no recording of Lowtide: {' '.join(str(error).split())}") from None
    if tail_path(path).is_file() and names_path(path).is_file():
        last = _tail(tail_path(path), len(names))
        if last is not None:
            steps = [*(s for s in steps if s.step != last.step), last]
            if "exit_code" in meta:  # what is there was closed, but could not be made whole
                meta.setdefault("stopped", os.strerror(errno.ENOSPC).lower())
            else:
                meta["died"] = True
    return Recording(path=path, meta=meta, names=tuple(names), steps=tuple(steps), process=process)


def _check_meta(meta: Mapping[str, Any]) -> None:
    """Facts about the run are what this Lowtide writes: a file may be anybody's.

    Raises:
        ValueError: naming what is none.
    """
    kinds: dict[str, tuple[type, ...]] = {
        "format": (int,), "cap_bytes": (int, float, type(None)), "allocator": (dict, type(None)),
        "arguments": (list, type(None)), "script": (str, type(None)), "torch": (str, type(None)),
    }
    wrong = [key for key, kind in kinds.items() if not isinstance(meta.get(key), kind)]
    if wrong:
        raise ValueError(f"{wrong[0]} is {meta.get(wrong[0])!r}")


def _check(names: Sequence[str], steps: Iterable[StepRow]) -> None:
    """Whether names are text, and kept entries say what they can.

    Raises:
        ValueError: if not.
    """
    if not all(isinstance(name, str) for name in names):
        raise ValueError("a name is no text")
    for row in steps:
        if row.entries is not None and _sound(row.entries, len(names)) < len(row.entries):
            raise ValueError(f"entries of step {row.step} say what they cannot")
        if row.carried is not None and not _carried_soundly(row.carried, len(names)):
            raise ValueError(f"blocks of step {row.step} are what they cannot be")


def _sound(entries: NDArray[np.void], names: int) -> int:
    """How many entries come before the first that says what it cannot."""
    kind = entries["kind"]
    named = [np.isin(kind, [Kind.OP, Kind.DENIED]), np.isin(kind, [Kind.OP, Kind.DENIED, Kind.BORN, Kind.ROLE, Kind.HELD])]
    sizes = np.stack([entries[key] for key in ("size", "live", "peak")])
    wrong = (
        ~np.isin(kind, list(Kind))
        | (entries["phase"] >= len(PHASES))
        | ((kind == Kind.ROLE) & (entries["flags"] >= len(Role)))
        | (named[0] & ((entries["a"] >= names) | (entries["c"] >= names)))
        | (named[1] & (entries["b"] >= names))
        | ((kind == Kind.BORN) & (entries["size"] < 0))
        | (np.abs(sizes) > _LARGEST_BYTES).any(axis=0)
        | ~np.isfinite(entries["time"])
    )
    return int(np.argmax(wrong)) if wrong.any() else len(entries)


def _carried_soundly(carried: NDArray[np.void], names: int) -> bool:
    """Whether blocks that were live when a step began are what they can be."""
    numbers = np.stack([carried[key] for key in ("name", "op", "module", "source", "label")])
    sizes, roles = carried["size"], carried["role"]
    wrong = (numbers >= names).any(axis=0) | (sizes < 0) | (sizes > _LARGEST_BYTES)
    wrong |= (roles < -1) | (roles >= len(Role)) | (carried["phase"] >= len(PHASES))
    return not wrong.any()


def _row(kind: type[Any], values: Mapping[str, Any]) -> Any:
    """A row whose numbers are numbers: SQLite keeps whatever it is given.

    Raises:
        ValueError: if one is not.
    """
    types: dict[str, tuple[type, ...]] = {
        "int": (int,), "float": (int, float), "float | None": (int, float, type(None)), "str": (str,), "bool": (bool,)
    }
    for one in fields(kind):
        if one.name in values and not isinstance(values[one.name], types.get(str(one.type), (object,))):
            raise ValueError(f"{one.name} is {values[one.name]!r}")
    return kind(**values)


def _process(base: sqlite3.Connection) -> Iterator[ProcessRow]:
    columns = [f.name for f in fields(ProcessRow)]
    for row in base.execute(f"SELECT {', '.join(columns)} FROM process ORDER BY start"):  # noqa: S608 - our own names
        found = dict(zip(columns, row, strict=True))
        yield _row(ProcessRow, {**found, "marked": bool(found["marked"])})


def _steps(base: sqlite3.Connection) -> list[StepRow]:
    phases: dict[int, list[PhaseFigures]] = {}
    for step, *figures in base.execute(
        "SELECT step, name, start, seconds, start_bytes, end_bytes, peak_bytes, high_water_bytes, outside_bytes "
        "FROM phases ORDER BY step, position"
    ):
        keys = ("name", "start", "seconds", "start_bytes", "end_bytes", "peak_bytes", "high_water_bytes", "outside_bytes")
        phases.setdefault(step, []).append(_row(PhaseFigures, dict(zip(keys, figures, strict=True))))
    found = []
    for step, start, seconds, first, last, peak, high, complete, entries, carried in base.execute(
        "SELECT * FROM steps ORDER BY step"
    ):
        found.append(_row(StepRow, {
            "step": step, "start": start, "seconds": seconds, "start_bytes": first, "end_bytes": last, "peak_bytes": peak,
            "high_water_bytes": high, "complete": bool(complete), "phases": tuple(phases.get(step, ())),
            "entries": None if entries is None else np.frombuffer(zlib.decompress(entries), dtype=ENTRY),
            "carried": None if carried is None else np.frombuffer(zlib.decompress(carried), dtype=CARRIED),
        }))
    return found


def _names_of(path: Path) -> list[str]:
    found = []
    for line in path.read_bytes().splitlines():
        try:
            found.append(str(json.loads(line)))
        except ValueError:  # the process was killed while it wrote the last one
            break
    return found


def _tail(path: Path, names: int) -> StepRow | None:
    """The unfinished step in a journal, up to what can be so; None if nothing had happened in it."""
    data = path.read_bytes()
    if len(data) < _HEADER.size:
        return None
    magic, step, start, _, live, high, count = _HEADER.unpack_from(data)
    first = _HEADER.size + count * CARRIED.itemsize
    sound = count >= 0 and math.isfinite(start) and max(abs(live), abs(high)) <= _LARGEST_BYTES
    if magic != _MAGIC or not sound or first > len(data):
        return None
    carried = np.frombuffer(data[_HEADER.size : first], dtype=CARRIED)
    entries = _entries(data[first:])
    entries = entries[: _sound(entries, names)]
    if not len(entries) or not _carried_soundly(carried, names):
        return None
    return summed(step, start, live, high, entries, carried, complete=False)


def summed(
    step: int, start: float, start_bytes: int, high_water_bytes: int, entries: NDArray[np.void], carried: NDArray[np.void],
    *, complete: bool,
) -> StepRow:
    """A step's figures out of its entries."""
    kinds = entries["kind"]
    measured = entries[(kinds == Kind.OP) | (kinds == Kind.PHASE) | (kinds == Kind.DENIED)]
    end = float(entries["time"][-1])
    phases = tuple(_phases(measured, start, start_bytes, high_water_bytes, end))
    if complete and len(phases) > 1 and measured[-1]["kind"] == Kind.PHASE:
        phases = phases[:-1]  # the entry that closes the last phase opens none
    peak = max((int(p.peak_bytes) for p in phases), default=start_bytes)
    return StepRow(
        step=step, start=start, seconds=end - start, start_bytes=start_bytes,
        end_bytes=int(measured["live"][-1]) if len(measured) else start_bytes, peak_bytes=peak,
        high_water_bytes=max(high_water_bytes, peak), complete=complete, phases=phases, entries=entries, carried=carried,
    )


class _Entry(NamedTuple):
    """The fields of :data:`ENTRY`."""

    time: float
    kind: int
    phase: int
    flags: int
    a: int
    b: int
    c: int
    size: int
    live: int
    peak: int


def _phases(
    measured: NDArray[np.void], start: float, live: int, high: int, end: float
) -> Iterable[PhaseFigures]:
    """Phases between their marks. What the script frees before the first operator of a phase is the phase before's."""
    is_mark = measured["kind"] == Kind.PHASE
    bounds = sorted({0, *np.flatnonzero(is_mark).tolist(), len(measured)})
    spans = list(itertools.pairwise(bounds))
    if not spans:
        return
    peaks = np.maximum.reduceat(np.where(is_mark, 0, measured["peak"]), bounds[:-1]).tolist()
    heads = [_Entry(*measured[i].item()) for i, _ in spans]
    firsts = [
        _first_bytes(head, _Entry(*measured[i + 1].item()) if j > i + 1 else None, live)
        for head, (i, j) in zip(heads, spans, strict=True)
    ]
    for n, (_, j) in enumerate(spans):
        closes = heads[n + 1] if n + 1 < len(spans) else None
        begins = heads[n].time if heads[n].kind == Kind.PHASE else start
        last = firsts[n + 1] if closes is not None else int(measured[j - 1]["live"])
        peak = max(firsts[n], last, peaks[n], 0 if closes is None else closes.peak)
        high = max(high, peak)
        yield PhaseFigures(
            name=str(PHASES[heads[n].phase]), start=begins, seconds=(end if closes is None else closes.time) - begins,
            start_bytes=firsts[n], end_bytes=last, peak_bytes=peak, high_water_bytes=high,
            outside_bytes=0 if closes is None else closes.size,
        )


def _first_bytes(head: _Entry, following: _Entry | None, live: int) -> int:
    """Bytes before the first operator of a phase; where it has none, at its mark."""
    if head.kind != Kind.PHASE:
        return head.size if head.kind == Kind.OP else live
    return following.size if following is not None and following.kind == Kind.OP else head.live
