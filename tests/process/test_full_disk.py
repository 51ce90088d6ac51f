"""Law: a full disk ends what Lowtide writes, with one line that says what to do, and does not end the training."""

from __future__ import annotations

import errno
import os
import resource
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from command import TIMEOUT
import numpy as np
import pytest
from lowtide.base import files
from lowtide.base.errors import RecordingError
from lowtide.recording.file_format import CARRIED, ENTRY, EntryKind, PhaseFigures, ProcessRow, StepRow
from lowtide.recording.journal import Journal
from lowtide.recording.reader import read
from lowtide.recording.writer import Writer
from small_disk import small_disk

STOPS = "lowtide: the recording stops: "
GOES_ON = "; training goes on"
ENTRY_OF_A_PHASE = (0.0, int(EntryKind.PHASE), *[0] * (len(ENTRY.names or ()) - 2))
NOBODY = np.zeros(0, dtype=CARRIED)
TRAINING = """
import pathlib, sys
import torch
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(int(sys.argv[1])):
    if step == 3 and len(sys.argv) > 2:
        exec(sys.argv[2])
    optimizer.zero_grad()
    loss = model(torch.randn(8, 32)).square().mean()
    loss.backward()
    optimizer.step()
print(loss.item().hex())
sys.exit(7)
"""


def _step(number: int) -> StepRow:
    phase = PhaseFigures(name="forward", start=0.0, seconds=1.0, start_bytes=1, end_bytes=2, peak_bytes=3, high_water_bytes=3)
    return StepRow(step=number, start=float(number), seconds=1.0, start_bytes=1, end_bytes=2, peak_bytes=3, high_water_bytes=3, complete=True, phases=(phase,))


def _row(number: int) -> ProcessRow:
    return ProcessRow(step=number, start=0.0, seconds=1.0, resident_bytes=1, highest_bytes=1, change_bytes=0, unique_bytes=0, children_bytes=0, heap_bytes=0, heap_peak_bytes=0, loss=None, marked=True)


def _said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith(STOPS)]


def _full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    made = Writer(tmp_path / "a.lowtide", {"script": "train.py", "arguments": []})
    yield made
    made.close()


def test_a_journal_reserves_disk_space_for_all_that_it_maps(tmp_path: Path) -> None:
    """The file has no holes, so that writing to the mapping cannot fail."""
    journal = Journal(tmp_path / "journal")
    journal.begin(0, 0.0, 0, 0, NOBODY)
    for _ in range(10_000):
        journal.add(*ENTRY_OF_A_PHASE)
        found = os.stat(tmp_path / "journal")
        assert found.st_blocks * 512 >= found.st_size >= journal._size, "no hole: what is written there must not fail"
    assert len(journal.entries()) == 10_000
    journal.close()


def test_a_journal_grows_under_several_threads(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.begin(0, 0.0, 0, 0, NOBODY)
    threads = [threading.Thread(target=lambda: [journal.add(*ENTRY_OF_A_PHASE) for _ in range(5_000)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(journal.entries()) == 40_000
    journal.close()


def test_a_journal_that_cannot_grow_stops_and_keeps_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure is reported once, and later entries are ignored."""
    failed: list[OSError] = []
    journal = Journal(tmp_path / "journal", failed.append)
    journal.begin(0, 0.0, 0, 0, NOBODY)
    monkeypatch.setattr(files, "reserve", _full)
    for _ in range(10_000):
        journal.add(*ENTRY_OF_A_PHASE)
    assert [e.errno for e in failed] == [errno.ENOSPC], "told once"
    assert journal.silent
    assert not len(journal.entries())
    journal.close(keep=True)
    assert (tmp_path / "journal").exists()


def test_a_truncated_journal_is_not_touched_again(tmp_path: Path) -> None:
    failed: list[OSError] = []
    journal = Journal(tmp_path / "journal", failed.append)
    journal.begin(0, 0.0, 0, 0, NOBODY)
    journal.add(*ENTRY_OF_A_PHASE)
    os.truncate(tmp_path / "journal", 0)
    assert not len(journal.entries())
    journal.begin(1, 0.0, 0, 0, NOBODY)
    journal.add(*ENTRY_OF_A_PHASE)
    assert len(failed) == 1
    journal.close()


def test_reserving_writes_zeros_where_fallocate_is_not_supported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "not here")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    files.reserve(file, 100_000)
    os.pwrite(file, b"x", 5)
    files.reserve(file, 200_000, since=100_000)
    assert os.fstat(file).st_size == 200_000
    assert os.pread(file, 6, 0) == b"\0\0\0\0\0x", "what was there is as it was"
    os.close(file)


def test_a_partly_written_name_stops_the_recording(writer: Writer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    writer.journal.begin(0, 0.0, 0, 0, NOBODY)
    known = writer.name("forward")
    real = os.write
    taken = iter([4])

    def nearly(file: int, data: Any) -> int:
        if file != writer._names_file:
            return real(file, data)
        for some in taken:
            return real(file, bytes(data)[:some])
        return _full()

    monkeypatch.setattr(os, "write", nearly)
    writer.name("a name that does not fit")
    assert len(_said(capsys)) == 1
    assert writer.name("forward") == known
    assert writer.name("another") == 0, "nothing more is numbered"
    writer.journal.add(*ENTRY_OF_A_PHASE)
    writer.step(_step(0))
    assert not _said(capsys), "it is said once"


class _Unwilling:
    """A connection that fails at every statement that begins with a text."""

    def __init__(self, base: sqlite3.Connection, what: str) -> None:
        self._base, self._what = base, what

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)

    def execute(self, text: str, *rest: Any) -> Any:
        if text.startswith(self._what):
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        return self._base.execute(text, *rest)

    def executemany(self, text: str, rows: Any) -> Any:
        return self.execute(text, ()) if text.startswith(self._what) else self._base.executemany(text, rows)


@pytest.mark.parametrize("what", ["BEGIN", "INSERT INTO names", "INSERT OR REPLACE INTO steps", "INSERT INTO phases", "COMMIT"])
def test_a_failing_sqlite_statement_stops_the_recording(tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever statement fails, one line says so, no transaction is left open, the steps before stay, and the exit code is
    still written.
    """
    path = tmp_path / "a.lowtide"
    writer = Writer(path, {"script": "train.py", "arguments": []})
    writer.journal.begin(0, 0.0, 0, 0, NOBODY)
    writer.name("forward")
    writer.step(_step(0))
    base = writer._base
    assert base is not None
    writer._base = _Unwilling(base, what)  # type: ignore[assignment]
    writer.name("backward")
    writer.step(_step(1))
    (said,) = _said(capsys)
    assert str(path) in said
    assert "no space left on device" in said
    assert "make room" in said
    assert said.endswith(GOES_ON)
    assert not base.in_transaction
    writer.step(_step(2))
    writer.process(_row(0))
    writer.forget(0)
    writer._base = base
    assert writer.close(code=7)
    assert not _said(capsys)
    found = read(path)
    assert [s.step for s in found.steps] == [0]
    assert found.meta["exit_code"] == 7, "what is short still fits"
    assert found.meta["stopped"] == "no space left on device"
    assert not found.meta.get("died")


def test_a_failure_seen_by_all_threads_is_reported_once(writer: Writer, capsys: pytest.CaptureFixture[str]) -> None:
    assert writer._base is not None
    writer._base = _Unwilling(writer._base, "INSERT")  # type: ignore[assignment]
    threads = [threading.Thread(target=lambda: [writer.process(_row(i)) for i in range(20)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(_said(capsys)) == 1


def test_an_interrupted_change_leaves_no_transaction(writer: Writer) -> None:
    def interrupted(_: sqlite3.Connection) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        writer._change(interrupted)
    assert writer._base is not None
    assert not writer._base.in_transaction
    writer.step(_step(0))
    assert writer.stopped is None


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EACCES, "Permission denied")])
def test_a_recording_that_cannot_begin_keeps_the_former_one(tmp_path: Path, error: OSError, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.lowtide"
    Writer(path, {"script": "before.py", "arguments": []}).close()

    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(files, "reserve", fails)
    if files.is_full(error):
        writer = Writer(path, {"script": "train.py", "arguments": []})
        assert len(_said(capsys)) == 1
        writer.journal.begin(0, 0.0, 0, 0, NOBODY)
        writer.journal.add(*ENTRY_OF_A_PHASE)
        writer.step(_step(0))
        assert writer.name("forward") == 0
        assert not writer.close()
    else:
        with pytest.raises(RecordingError, match="permission denied"):
            Writer(path, {"script": "train.py", "arguments": []})
    assert read(path).meta["script"] == "before.py"
    assert os.listdir(tmp_path) == ["a.lowtide"], "nothing is left lying about"


def test_a_recording_stopped_before_its_first_step_keeps_the_former(tmp_path: Path) -> None:
    path = tmp_path / "a.lowtide"
    Writer(path, {"script": "before.py", "arguments": []}).close()
    writer = Writer(path, {"script": "train.py", "arguments": []})
    writer._stop(OSError(errno.ENOSPC, "No space left on device"))
    assert not writer.close(code=0)
    assert read(path).meta["script"] == "before.py"
    assert os.listdir(tmp_path) == ["a.lowtide"]


def test_names_that_are_not_valid_text_are_written_readably(tmp_path: Path) -> None:
    """Bytes that are UTF-8 are decoded; lone surrogates do not stop the recording."""
    path = tmp_path / "a.lowtide"
    raw = os.fsdecode("trän.py".encode()) if sys.getfilesystemencoding() != "utf-8" else "tr\udcc3\udca4n.py"
    writer = Writer(path, {"script": raw, "arguments": ["\ud800", "\udcff"]})
    writer.name(f"{raw}:3 in f")
    writer.name("\ud800")
    writer.step(_step(0))
    writer.close()
    found = read(path)
    assert found.meta["script"] == "trän.py"
    assert found.names[0] == "trän.py:3 in f"
    assert len(found.names) == 2


# --- whole processes ------------------------------------------------------------------------------------------------------


def _train(folder: Path, *arguments: str, before: Any = None, command: tuple[str, ...] = ("-m", "lowtide", "record", "--quiet")) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(TRAINING)
    return subprocess.run([sys.executable, *command, *arguments], cwd=folder, capture_output=True, text=True, timeout=TIMEOUT, check=False, preexec_fn=before)


def _report(path: Path) -> None:
    from lowtide.recording.explanation.explanation import explain
    from lowtide.report.recording import show_recording
    from rich.console import Console

    with open(os.devnull, "w") as nowhere:
        show_recording(explain(read(path)), Console(file=nowhere))


def _one_line(done: subprocess.CompletedProcess[str]) -> None:
    (line,) = done.stderr.splitlines()
    assert line.startswith(STOPS)
    assert line.endswith(GOES_ON)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the script prints without Lowtide."""
    done = _train(tmp_path_factory.mktemp("plain"), "train.py", "60", command=())
    assert done.returncode == 7
    return done.stdout


@pytest.mark.long("8", "16", "64", "96")
@pytest.mark.parametrize("kib", [8, 16, 32, 48, 64, 96])
def test_training_on_a_small_disk_goes_on(tmp_path: Path, plain: str, kib: int) -> None:
    with small_disk(tmp_path / "disk", f"{kib}k") as disk_:
        done = _train(tmp_path, "-o", str(disk_ / "a.lowtide"), "train.py", "60")
        assert done.returncode == 7, done.stderr
        assert done.stdout == plain
        _one_line(done)
        if kib > 48:
            assert len(read(disk_ / "a.lowtide").steps)
            _report(disk_ / "a.lowtide")


def test_a_disk_that_fills_up_keeps_the_steps_before(tmp_path: Path, plain: str) -> None:
    with small_disk(tmp_path / "disk", "4m") as disk_:
        fills = f"file = open({str(disk_ / 'filler')!r}, 'wb', buffering=0)\ntry:\n    while file.write(bytes(4096)) == 4096: pass\nexcept OSError: pass"
        done = _train(tmp_path, "-o", str(disk_ / "a.lowtide"), "train.py", "60", fills)
        assert done.returncode == 7, done.stderr
        assert done.stdout == plain
        _one_line(done)
        found = read(disk_ / "a.lowtide")
        assert [s.step for s in found.steps if s.step >= 0][:3] == [0, 1, 2]
        assert found.meta["exit_code"] == 7
        assert "no space left" in found.meta["stopped"]
        _report(disk_ / "a.lowtide")


@pytest.mark.long("1", "40", "60")
@pytest.mark.parametrize("kib", [1, 20, 40, 60])
def test_training_under_a_quota_goes_on(tmp_path: Path, plain: str, kib: int) -> None:
    """A limit on the size of files fails as a quota does: at whichever write first reaches it."""
    done = _train(tmp_path, "-o", "a.lowtide", "train.py", "60", before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (kib << 10, kib << 10)))
    assert done.returncode == 7, done.stderr
    assert done.stdout == plain
    _one_line(done)


@pytest.mark.long("rmtree", "5000", "names", "truncate")
@pytest.mark.parametrize(("trouble", "is_whole"), [
    ("shutil.rmtree(folder)", False), ("(folder / 'a.lowtide').unlink()", False), ("os.truncate(folder / 'a.lowtide', 0)", False),
    ("os.truncate(folder / 'a.lowtide-names', 0)", True), ("os.truncate(folder / 'a.lowtide', 5000)", False),
])
def test_training_goes_on_when_the_recording_is_removed_or_truncated(tmp_path: Path, plain: str, trouble: str, is_whole: bool) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    done = _train(tmp_path, "-o", "there/a.lowtide", "train.py", "60", f"import os, shutil; folder = pathlib.Path('there'); {trouble}")
    assert done.returncode == 7, done.stderr
    assert done.stdout == plain
    if is_whole:
        assert done.stderr == ""
        assert len(read(folder / "a.lowtide").steps) == 61
    else:
        _one_line(done)


def test_figures_that_cannot_be_written_keep_the_exit_code(tmp_path: Path, plain: str) -> None:
    done = _train(tmp_path, "-o", "a.lowtide", "--json", "/dev/full", "train.py", "60")
    assert done.returncode == 7
    assert done.stdout == plain
    assert done.stderr == "lowtide: error: /dev/full: No space left on device\n"


@pytest.mark.long
def test_a_recording_removed_before_its_report_keeps_the_exit_code(tmp_path: Path, plain: str) -> None:
    done = _train(tmp_path, "-o", "a.lowtide", "train.py", "60", "pathlib.Path('a.lowtide').unlink()", command=("-m", "lowtide", "record"))
    assert done.returncode == 7
    assert done.stdout == plain
    assert [line for line in done.stderr.splitlines() if "a.lowtide" in line]
    assert "Traceback" not in done.stderr
