"""Writing a recording: its tables, steps as they end, and what happens when the disk is full."""

from __future__ import annotations

import contextlib
import errno
import glob
import itertools
import json
import os
import sqlite3
import sys
import threading
import weakref
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, final

import psutil

from lowtide.base import files
from lowtide.base.errors import RecordingError
from lowtide.base.messages import readable, tell
from lowtide.recording.file_format import (
    APPLICATION,
    APPLICATION_AT,
    FORMAT,
    HEADER_BYTES,
    PhaseFigures,
    ProcessRow,
    StepRow,
    names_path,
    tail_path,
)
from lowtide.recording.journal import Journal

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


def _check_place(path: Path) -> None:
    """Whether a recording may be written here: what is no recording is not replaced by one.

    Raises:
        RecordingError: if it may not.
    """
    if path.is_dir() or not path.name:
        raise RecordingError(f"cannot write {path}: it is a folder; name a file in it")
    try:
        with path.open("rb") as file:
            head = file.read(HEADER_BYTES)
    except FileNotFoundError:
        return
    except OSError as error:
        raise RecordingError(f"cannot write {path}: {error.strerror}") from None
    if head and int.from_bytes(head[APPLICATION_AT:HEADER_BYTES]) != APPLICATION:
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
