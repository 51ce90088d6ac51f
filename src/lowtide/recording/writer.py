"""Writes a recording, step by step; when the disk is full, it stops writing and lets the training go on."""

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
    """Refuse to overwrite a file that is not a recording; an empty file is fine.

    Raises:
        RecordingError: if the path is a folder, cannot be read, or holds something else.
    """
    if path.is_dir() or not path.name:
        raise RecordingError(f"cannot write {path}: it is a folder; give a file in it")
    try:
        with path.open("rb") as file:
            head = file.read(HEADER_BYTES)
    except FileNotFoundError:
        return
    except OSError as error:
        raise RecordingError(f"cannot write {path}: {error.strerror}") from None
    if head and int.from_bytes(head[APPLICATION_AT:HEADER_BYTES]) != APPLICATION:
        raise RecordingError(f"cannot write {path}: it exists and is not a recording; give another file, or remove it")


def _tell_of_set_aside(path: Path) -> None:
    """Point out earlier recordings that processes set aside next to this path and, being killed, never put back."""
    for found in path.parent.glob(f".{glob.escape(path.name)}.*"):
        owner = found.name.rpartition(".")[2]
        if owner.isdecimal() and not psutil.pid_exists(int(owner)):
            tell(f"lowtide: {found} is the previous {path.name}, set aside by a killed recording: rename it, or remove it")


FEW_LOOKS: Final = 30
"""Process rows, one per second, up to which a failed script without steps is taken to have failed while it was importing
(imports took ten seconds on a busy machine)."""
_META: Final = "INSERT OR REPLACE INTO meta VALUES (?, ?)"


def _meta_rows(meta: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(key, readable(json.dumps(value, ensure_ascii=False))) for key, value in meta.items()]


@final
class Writer:
    """Writes a recording. When the disk refuses a write, it says so once and writes nothing more.

    Attributes:
        stopped: why writing has stopped; None until then.
    """

    def __init__(self, path: Path, meta: Mapping[str, Any]) -> None:
        """Create the file. An earlier recording at the path is set aside until :meth:`close` decides which of the two to keep.

        Raises:
            RecordingError: if the file cannot be written. A full disk does not raise: that may happen at any time, and the
                training goes on.
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
        writer = weakref.ref(self)  # the interpreter keeps fork callbacks forever
        os.register_at_fork(after_in_child=lambda: _inherit(writer))

    def _create(self, meta: Mapping[str, Any]) -> None:
        if self._former is not None:
            self.path.replace(self._former)
        for old in (tail_path(self.path), names_path(self.path)):
            old.unlink(missing_ok=True)
        made = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)  # unlike SQLite, it says why it fails
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
        """Remove what was written, and put the earlier recording back."""
        self._release(keep=False)
        with contextlib.suppress(OSError):
            if self._former is not None and self._former.exists():
                self._former.replace(self.path)
            elif self._former is None:
                self.path.unlink(missing_ok=True)

    def _release(self, *, keep: bool) -> None:
        """Close all files. ``keep`` leaves the journal and the names on disk, as the only copy of an unstored step."""
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
        """Stop writing after an error, and say so once, from whichever thread fails first."""
        if not self._told.acquire(blocking=False):
            return
        self.stopped = files.why(error)
        self.journal.silent = True
        remedy = "make room there, or record to another disk" if files.is_full(error) else "record again"
        tell(f"lowtide: the recording stops: {self.stopped} at {self.path}: {remedy}; training goes on")

    def _is_there(self) -> bool:
        """Whether the path still leads to the file that was written: on Unix, writes to a removed file succeed."""
        try:
            return self.path.stat().st_ino == self._inode
        except OSError:
            return False

    def _change(self, change: Callable[[sqlite3.Connection], object], *, last: bool = False) -> bool:
        """Change the SQLite file in one transaction. Nothing else writes to the file.

        Args:
            change: makes the change on the connection that it is given.
            last: try even after an earlier write failed: a short row may fit into a page that exists.

        Returns:
            Whether the change was committed.
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
        """Store facts about the run; ``last`` tries even after an earlier write failed."""
        rows = _meta_rows(meta)
        self._change(lambda base: base.executemany(_META, rows), last=last)

    def name(self, text: str) -> int:
        """The id of a name, which is written to the names file when it is new; 0 for a new one after writing has stopped."""
        found = self._names.get(text)
        if found is not None:
            return found
        if self._inherited or self.stopped is not None:
            return 0
        with self._naming:  # keeps the lines of the file in the order of the ids
            found = self._names.get(text)
            if found is None:
                found = self._names[text] = len(self._names)
                try:
                    files.write(self._names_file, json.dumps(readable(text)).encode() + b"\n")
                except OSError as error:
                    self._stop(error)
        return found

    def step(self, row: StepRow) -> None:
        """Store a step that has ended, with the names that are new since the last one."""
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
        """Drop the entries of a stored step; its figures stay."""
        self._change(lambda base: base.execute("UPDATE steps SET entries = NULL, carried = NULL WHERE step = ?", (step,)))

    def process(self, row: ProcessRow) -> None:
        """Store one row of the process's memory; may be called from any thread."""
        values = tuple(asdict(row).values())
        if self._change(lambda base: base.execute("INSERT INTO process VALUES (?,?,?,?,?,?,?,?,?,?,?,?)", values)):
            self._looks += 1

    def close(self, *, code: int = 0, error: BaseException | None = None, always: bool = False) -> bool:
        """Complete the recording: store how the script ended, and remove the earlier recording or put it back.

        Args:
            code: the script's exit code.
            error: the exception that ended it; None without one.
            always: keep the recording even if it has no steps.

        Returns:
            Whether this recording is kept. If the script failed before any step, an earlier recording is put back instead.
        """
        if self._inherited:
            return True
        if self._base is None:
            return False
        if self.stopped is None and not self._is_there():
            self._stop(FileNotFoundError(errno.ENOENT, "the file was removed or replaced"))
        stopped = self.stopped
        said = None if error is None else f"{type(error).__name__}: {error}"[:500]
        self.put_meta({"exit_code": code, "error": said}, last=True)
        if stopped is not None:
            self.put_meta({"stopped": stopped}, last=True)
        bare = not always and not self._steps and self._looks <= FEW_LOOKS
        empty = self._former is not None and bare and (code != 0 or stopped is not None)
        self._release(keep=self.stopped is not None and not empty)
        with contextlib.suppress(OSError):  # the folder may be gone
            if self._former is not None and empty:
                self._former.replace(self.path)
            elif self._former is not None:
                self._former.unlink(missing_ok=True)
        return not empty


def _roll_back(base: sqlite3.Connection) -> None:
    """Roll back a transaction, unless SQLite has ended it already."""
    with contextlib.suppress(sqlite3.Error):
        if base.in_transaction:
            base.execute("ROLLBACK")


def _inherit(known: weakref.ref[Writer]) -> None:
    """Silence a recording in a forked child: it belongs to the parent."""
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
