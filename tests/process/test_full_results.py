"""Law: results that find no room end with one error line or are no longer kept; those kept stay, and a sweep resumes from
them.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

from command import TIMEOUT
import pytest
from lowtide.base.errors import LowtideError, RecordingError
from lowtide.studies.size import throughput, trial
from lowtide.studies.size.throughput import Point, Rate
from lowtide.studies.size.vary import ScriptSetting
from lowtide.studies.sweep import cell as runner
from lowtide.studies.sweep import run as sweep_run
from lowtide.studies.sweep.definition import Definition, File, OwnAxis, define
from lowtide.studies.sweep.results import MAIN, SweepResults
from small_disk import small_disk


def _full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _definition(values: list[int] | None = None) -> Definition:
    return define(File(command="python -c 0", axes={"a": OwnAxis(values=values or [1, 2], env="A")}))


class _Unwilling:
    """A connection that fails at every statement that begins with a text."""

    def __init__(self, base: sqlite3.Connection, what: str) -> None:
        self._base, self._what = base, what

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)

    def _tried(self, text: str) -> None:
        if text.startswith(self._what):
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error

    def execute(self, text: str, *rest: Any) -> Any:
        self._tried(text)
        return self._base.execute(text, *rest)

    def executemany(self, text: str, rows: Any) -> Any:
        self._tried(text)
        return self._base.executemany(text, rows)


@pytest.mark.parametrize("what", ["BEGIN", "UPDATE", "COMMIT"])
def test_a_result_that_cannot_be_written_is_one_error(tmp_path: Path, what: str) -> None:
    """No transaction is left open, and finished cells are kept."""
    path = tmp_path / "r.results"
    results = SweepResults(path, _definition())
    first, second = results.cells(MAIN)
    results.finish(first.id, {"ended": "ok"})
    base = results._base
    results._base = _Unwilling(base, what)  # type: ignore[assignment]
    with pytest.raises(LowtideError, match="no space left on device at .*make room there and start the same sweep again; finished cells are kept"):
        results.finish(second.id, {"ended": "ok"})
    assert not base.in_transaction
    results._base = base
    results.close()
    results = SweepResults(path, _definition())
    assert [c.result for c in results.cells(MAIN)] == [{"ended": "ok"}, None]
    results.close()


def test_a_sweep_on_a_full_disk_says_so_and_can_be_resumed(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text('command = "python -c 0"\nsteps = 60\n[axes]\na = {env = "A", values = [1, 2]}\n')
    command = [sys.executable, "-m", "lowtide", "sweep", "s.toml", "--quiet", "--results"]
    with small_disk(tmp_path / "disk", "8k") as disk:
        done = subprocess.run([*command, disk / "r"], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT, check=False)
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert line.startswith("lowtide: error: results cannot be written: no space left on device at ")
        subprocess.run(["mount", "-o", "remount,size=1m", disk], check=True)
        done = subprocess.run([*command, disk / "r"], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT, check=False)
        assert "no space" not in done.stderr
        results = sqlite3.connect(disk / "r")
        assert results.execute("SELECT count(*) FROM cells WHERE result IS NOT NULL").fetchone() == (2,)
        results.close()


def test_a_cell_without_room_for_its_result_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = tmp_path / "1.task"
    task.write_text('{"command": [], "environment": {}, "watch": {}}')
    monkeypatch.setattr(runner, "reserve", _full)
    monkeypatch.setattr(runner, "measure", lambda *_: pytest.fail("it ran"))
    monkeypatch.setattr(runner, "end_on_sigterm", lambda: None)
    monkeypatch.setattr(sys, "argv", ["cell", str(task)])
    with pytest.raises(SystemExit) as left:
        runner.main()
    assert left.value.code == runner.NO_ROOM
    assert not (tmp_path / "1.result").exists()


def test_a_result_file_is_as_long_as_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The space reserved for it is cut off."""
    task = tmp_path / "1.task"
    task.write_text('{"command": [], "environment": {}, "watch": {}}')
    monkeypatch.setattr(runner, "measure", lambda *_: {"ended": "ok"})
    runner._run(task)
    assert (tmp_path / "1.result").read_text() == '{"ended": "ok"}'


def test_a_sweep_whose_cells_find_no_room_enters_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends with an error that says how to go on."""
    definition = _definition()
    results = SweepResults(tmp_path / "r.results", definition)

    def start(self: Any, task: sweep_run.Task) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-S", "-c", f"raise SystemExit({runner.NO_ROOM})"])

    monkeypatch.setattr(sweep_run.Local, "_start", start)

    class Told:
        def begins(self, *_: Any) -> None: ...
        def finished(self, *_: Any) -> None: ...

    with pytest.raises(LowtideError, match="no room for the result of a cell .* start the same sweep again"):
        sweep_run.go(definition, results, MAIN, sweep_run.Local(tmp_path / "cells"), Told())
    assert all(c.result is None for c in results.cells(MAIN))
    results.close()


# --- `lowtide batch` ------------------------------------------------------------------------------------------------------


def _point(value: str) -> Point:
    return Point(values=(value,), how="plain", ended="ok", message="", rate=Rate(low=1, median=1, high=1), cold_peak_bytes=1, peak_bytes=1)


def test_points_without_room_are_reported_once_and_still_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    results = throughput.SizeResults(tmp_path / "r", {}, fresh=False)
    results.add(_point("1"))
    with monkeypatch.context() as patch:
        patch.setattr(throughput, "write", _full)
        results.add(_point("2"))
        results.add(_point("3"))
    results.close()
    assert results.known == 3
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("lowtide: results are no longer kept: no space left on device at ")
    assert said.endswith("make room there; measuring goes on")
    again = throughput.SizeResults(tmp_path / "r", {}, fresh=False)
    assert again.known == 1
    again.close()


def test_kept_points_survive_a_start_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A half-written line at the end of the file is dropped."""
    results = throughput.SizeResults(tmp_path / "r", {}, fresh=False)
    results.add(_point("1"))
    results.close()
    with (tmp_path / "r").open("ab") as file:
        file.write(b'{"half')
    monkeypatch.setattr(throughput, "write", _full)
    throughput.SizeResults(tmp_path / "r", {}, fresh=False).close()
    monkeypatch.undo()
    again = throughput.SizeResults(tmp_path / "r", {}, fresh=False)
    assert again.known == 1
    again.add(_point("2"))
    again.close()
    assert throughput.SizeResults(tmp_path / "r", {}, fresh=False).known == 2


@pytest.mark.parametrize("left", [[], ["a.lowtide", "a.lowtide-tail", "a.lowtide-names"]])
def test_no_prediction_is_made_from_a_recording_without_room(tmp_path: Path, left: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def recorded(*_: Any) -> int:
        for name in left:
            (tmp_path / name).touch()
        return 0

    monkeypatch.setattr(trial, "_process", recorded)
    target = trial.Target(script="t.py", module=False, seconds=1)
    with pytest.raises(RecordingError, match="no room for the recording in .*: make room there"):
        trial.record(target, ScriptSetting(arguments=(), environment={}, constants={}, sizes={}), 3, tmp_path / "a.lowtide")
