"""Stores the results of a sweep in one SQLite file, from which a killed sweep resumes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from lowtide.base.errors import LowtideError, UsageError
from lowtide.base.files import is_full, why
from lowtide.studies.sweep.definition import Config, Definition

MAIN: Final = "sweep"
CONFIRM: Final = "confirm"
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS about (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS cells (
    id INTEGER PRIMARY KEY, part TEXT NOT NULL, config TEXT NOT NULL, repeat INTEGER NOT NULL,
    result TEXT, UNIQUE (part, config, repeat)
);
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run of one configuration.

    Attributes:
        id: row number in the file; cells run in this order.
        part: ``sweep`` or ``confirm``.
        config: the configuration.
        repeat: which repeat of the configuration this is, from 0.
        result: the figures from :mod:`lowtide.studies.sweep.cell`; None if the cell has not run to its end.
    """

    id: int
    part: str
    config: Config
    repeat: int
    result: dict[str, Any] | None


@final
class SweepResults:
    """The results file; only one sweep at a time may have it open."""

    def __init__(self, path: Path, definition: Definition) -> None:
        """Open or create the file.

        Raises:
            UsageError: if another sweep has it open, if it belongs to another definition, or if it is not a results file.
            LowtideError: if it cannot be written.
        """
        self.path = path
        self._lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise UsageError(f"another sweep is writing to {path}: wait for it, or give another file with --results") from None
        try:
            self._base = sqlite3.connect(path, isolation_level=None)
            self._base.executescript(_SCHEMA)
            self._base.execute("PRAGMA synchronous = FULL")
            digest = self._base.execute("SELECT value FROM about WHERE name = 'digest'").fetchone()
        except sqlite3.DatabaseError as error:
            os.close(self._lock)
            if is_full(error):
                raise self._trouble(error) from None
            raise UsageError(f"{path} is not a results file: {error}") from None
        if digest is not None and digest[0] != definition.digest:
            self.close()
            raise UsageError(f"{path} has results of another definition: give another file with --results, or --fresh")
        try:
            self._change([("INSERT OR IGNORE INTO about VALUES ('digest', ?)", [(definition.digest,)])])
            self.add(MAIN, definition.order())
        except LowtideError:
            self.close()
            raise

    def close(self) -> None:
        """Close the file, so that another sweep may open it."""
        self._base.close()
        Path(f"{self.path}.lock").unlink(missing_ok=True)
        os.close(self._lock)

    def add(self, part: str, cells: Iterable[tuple[Config, int]]) -> None:
        """Add the cells that are not in the file yet, in their order.

        Raises:
            LowtideError: if they cannot be written.
        """
        rows = [(part, json.dumps(config), repeat) for config, repeat in cells]
        self._change([("INSERT OR IGNORE INTO cells (part, config, repeat) VALUES (?, ?, ?)", rows)])

    def _change(self, statements: Iterable[tuple[str, list[tuple[Any, ...]]]]) -> None:
        """Run statements in one transaction: all of them, or none."""
        try:
            self._base.execute("BEGIN IMMEDIATE")
            for text, rows in statements:
                self._base.executemany(text, rows)
            self._base.execute("COMMIT")
        except sqlite3.Error as error:
            with contextlib.suppress(sqlite3.Error):
                if self._base.in_transaction:
                    self._base.execute("ROLLBACK")
            raise self._trouble(error) from None

    def _trouble(self, error: sqlite3.Error) -> LowtideError:
        remedy = "make room there and start the same sweep again" if is_full(error) else "start the same sweep again"
        return LowtideError(f"results cannot be written: {why(error)} at {self.path}: {remedy}; finished cells are kept")

    def cells(self, part: str) -> list[Cell]:
        """All cells of a part, in the order in which they run."""
        rows = self._base.execute("SELECT id, part, config, repeat, result FROM cells WHERE part = ? ORDER BY id", (part,))
        return [
            Cell(
                id=i,
                part=p,
                config=tuple((a, v) for a, v in json.loads(config)),
                repeat=repeat,
                result=None if result is None else json.loads(result),
            )
            for i, p, config, repeat, result in rows
        ]

    def finish(self, cell: int, result: dict[str, Any]) -> None:
        """Store the result of a cell that has run; it is on disk when this returns.

        Raises:
            LowtideError: if it cannot be written.
        """
        self._change([("UPDATE cells SET result = ? WHERE id = ?", [(json.dumps(result), cell)])])
