"""Reads a recording, even one whose process was killed; rejects impossible contents with a one-line error."""

from __future__ import annotations

import errno
import json
import math
import os
import sqlite3
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtide.base.errors import RecordingError
from lowtide.recording.file_format import (
    APPLICATION,
    CARRIED,
    ENTRY,
    FORMAT,
    LARGEST_BYTES,
    PHASES,
    EntryKind,
    PhaseFigures,
    ProcessRow,
    Role,
    StepRow,
    names_path,
    tail_path,
)
from lowtide.recording.journal import HEADER, MAGIC, entries_in
from lowtide.recording.summary import summarize_step


@dataclass(frozen=True, kw_only=True, eq=False)
class Recording:
    """The contents of a recording.

    Attributes:
        meta: facts about the run: ``script``, ``arguments``, ``torch``, ``device``, ``level``, ``exit_code``, ...
        names: the texts that entries refer to by index.
        steps: in order; entries only for the steps that kept them.
        process: memory of the whole process, in order.
    """

    path: Path
    meta: Mapping[str, Any]
    names: tuple[str, ...]
    steps: tuple[StepRow, ...]
    process: tuple[ProcessRow, ...] = ()


def read(file: str | os.PathLike[str]) -> Recording:
    """Read a recording, including what a killed process left of its last step.

    Raises:
        RecordingError: if the file is missing, empty, truncated, not a recording, or of a newer format.
    """
    path = Path(file)
    if not path.is_file():
        raise RecordingError(f"no such recording: {path}")
    if path.stat().st_size == 0:
        raise RecordingError(f"{path} is empty: record again with `lowtide record -o {path} SCRIPT`")
    if zipfile.is_zipfile(path):
        raise RecordingError(f"{path} holds recordings at several sizes: use `lowtide predict {path} --set NAME=VALUE`")
    try:
        base = sqlite3.connect(f"file:{path.resolve()}?mode=ro", uri=True)
        try:
            (application,) = base.execute("PRAGMA application_id").fetchone()
            if application != APPLICATION:
                raise RecordingError(f"{path} is not a Lowtide recording")
            meta = {key: json.loads(value) for key, value in base.execute("SELECT key, value FROM meta")}
            if meta.get("format", 0) > FORMAT:
                raise RecordingError(
                    f"{path} has format {meta['format']}, but this Lowtide reads up to format {FORMAT}: update Lowtide"
                )
            names = [text for (text,) in base.execute("SELECT text FROM names ORDER BY id")]
            steps = _steps(base)
            process = tuple(_process(base))
        finally:
            base.close()
        if tail_path(path).is_file() and names_path(path).is_file():
            names = max(names, _names_of(names_path(path)), key=len)  # the file also has names since the last step
        _check_meta(meta)
        _check(names, steps)
    except (sqlite3.Error, zlib.error, ValueError, TypeError, OverflowError) as error:
        raise RecordingError(f"{path} is damaged or not a Lowtide recording: {' '.join(str(error).split())}") from None
    if tail_path(path).is_file() and names_path(path).is_file():
        last = _tail(tail_path(path), len(names))
        if last is not None:
            steps = [*(s for s in steps if s.step != last.step), last]
            if "exit_code" in meta:  # it was closed, but its last step could not be stored
                meta.setdefault("stopped", os.strerror(errno.ENOSPC).lower())
            else:
                meta["died"] = True
    return Recording(path=path, meta=meta, names=tuple(names), steps=tuple(steps), process=process)


def _check_meta(meta: Mapping[str, Any]) -> None:
    """Check that facts about the run have the types that Lowtide writes: the file may come from anywhere.

    Raises:
        ValueError: naming the first that has another type.
    """
    kinds: dict[str, tuple[type, ...]] = {
        "format": (int,), "cap_bytes": (int, float, type(None)), "allocator": (dict, type(None)),
        "arguments": (list, type(None)), "script": (str, type(None)), "torch": (str, type(None)),
    }
    wrong = [key for key, kind in kinds.items() if not isinstance(meta.get(key), kind)]
    if wrong:
        raise ValueError(f"{wrong[0]} is {meta.get(wrong[0])!r}")


def _check(names: Sequence[str], steps: Iterable[StepRow]) -> None:
    """Check that names are text, and that kept entries and carried blocks are valid.

    Raises:
        ValueError: if not.
    """
    if not all(isinstance(name, str) for name in names):
        raise ValueError("a name is not a string")
    for row in steps:
        if row.entries is not None and _valid_prefix(row.entries, len(names)) < len(row.entries):
            raise ValueError(f"step {row.step} has invalid entries")
        if row.carried is not None and not _carried_soundly(row.carried, len(names)):
            raise ValueError(f"step {row.step} has invalid blocks")


def _valid_prefix(entries: NDArray[np.void], names: int) -> int:
    """The number of entries before the first invalid one."""
    kind = entries["kind"]
    operators = [EntryKind.OP, EntryKind.DENIED]
    named = [np.isin(kind, operators), np.isin(kind, [*operators, EntryKind.BORN, EntryKind.ROLE, EntryKind.HELD])]
    sizes = np.stack([entries[key] for key in ("size", "live", "peak")])
    wrong = (
        ~np.isin(kind, list(EntryKind))
        | (entries["phase"] >= len(PHASES))
        | ((kind == EntryKind.ROLE) & (entries["flags"] >= len(Role)))
        | (named[0] & ((entries["a"] >= names) | (entries["c"] >= names)))
        | (named[1] & (entries["b"] >= names))
        | ((kind == EntryKind.BORN) & (entries["size"] < 0))
        | (np.abs(sizes) > LARGEST_BYTES).any(axis=0)
        | ~np.isfinite(entries["time"])
    )
    return int(np.argmax(wrong)) if wrong.any() else len(entries)


def _carried_soundly(carried: NDArray[np.void], names: int) -> bool:
    """Whether the carried blocks (those that were live when a step began) are valid."""
    numbers = np.stack([carried[key] for key in ("name", "op", "module", "source", "label")])
    sizes, roles = carried["size"], carried["role"]
    wrong = (numbers >= names).any(axis=0) | (sizes < 0) | (sizes > LARGEST_BYTES)
    wrong |= (roles < -1) | (roles >= len(Role)) | (carried["phase"] >= len(PHASES))
    return not wrong.any()


def _row(kind: type[Any], values: Mapping[str, Any]) -> Any:
    """Builds a row after checking the types of its values: SQLite stores values of any type in any column.

    Raises:
        ValueError: naming the first that has another type than the row's field.
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
    """The unfinished step in a journal, up to its first invalid entry; None if it has no valid one."""
    data = path.read_bytes()
    if len(data) < HEADER.size:
        return None
    magic, step, start, _, live, high, count = HEADER.unpack_from(data)
    first = HEADER.size + count * CARRIED.itemsize
    sound = count >= 0 and math.isfinite(start) and max(abs(live), abs(high)) <= LARGEST_BYTES
    if magic != MAGIC or not sound or first > len(data):
        return None
    carried = np.frombuffer(data[HEADER.size : first], dtype=CARRIED)
    entries = entries_in(data[first:])
    entries = entries[: _valid_prefix(entries, names)]
    if not len(entries) or not _carried_soundly(carried, names):
        return None
    return summarize_step(step, start, live, high, entries, carried, complete=False)
