"""Law: where temporary files find no room, sampling, guarding and offload stop or go on without them, and one line says so."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from command import TIMEOUT
import pytest
from lowtide.checkpoint import whole
from lowtide.data import wire
from lowtide.base.errors import CheckpointError
from lowtide.guard.process import PLACES
from lowtide.probe import beat
from lowtide.probe.marks import MarkSource
from lowtide.probe.sampler import Sampler
from lowtide.base.temporary_folders import Scratch
from small_disk import small_disk

GOES_ON = "make room there, or set TMPDIR to a folder with free space; training goes on"


def _full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


# --- the guard's beat -----------------------------------------------------------------------------------------------------


def test_a_beat_without_room_is_reported_once_and_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The guard's shared file cannot be written, so that the guard does not see the steps; a saved mark needs no room and is
    still written.
    """
    monkeypatch.setattr(beat, "reserve", _full)
    teller = beat.Teller(str(tmp_path))
    for _ in range(3):
        teller.stepped(MarkSource.OPTIMIZER, None)
        teller.passed(0.5)
    assert teller.beat.steps == 3
    (said,) = _said(capsys)
    assert said.startswith("lowtide: the guard cannot see the steps of this process: no space left on device")
    assert said.endswith(GOES_ON)
    assert not list(tmp_path.glob(f"{beat.SAVED}*"))
    teller.tell(stopped=1.0)
    assert [p.name for p in tmp_path.glob(f"{beat.SAVED}*")] == [f"{beat.SAVED}{os.getpid()}"], "a name takes no room"


def test_a_beat_reserves_disk_space_for_all_that_it_maps(tmp_path: Path) -> None:
    teller = beat.Teller(str(tmp_path))
    teller.passed(None)
    (path,) = tmp_path.iterdir()
    found = path.stat()
    assert found.st_blocks * 512 >= found.st_size > 0
    assert beat.read(path.read_bytes()).points == 1


TRAINED = """
import sys
import lowtide
at = lowtide.checkpoint.resume(sys.argv[1], {}).get("at", 0)
print("from", at, flush=True)
while at < 4:
    at += 1
    lowtide.checkpoint(sys.argv[1], {}, epoch_end=True, fraction=at / 4, at=at)
"""


def test_a_process_whose_beat_has_no_room_is_still_recycled(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINED)
    with small_disk(tmp_path / "temporary", "4k") as disk:
        done = subprocess.run(
            [sys.executable, "-m", "lowtide", "guard", "--recycle", "epoch", "--json", tmp_path / "g.json", script, tmp_path / "checkpoints"],
            env={**os.environ, "TMPDIR": str(disk)}, capture_output=True, text=True, timeout=TIMEOUT, check=False,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["from", "0", "from", "1", "from", "2", "from", "3"]
    said = "lowtide: the guard cannot see the steps of this process"
    assert done.stderr.count(said) == 4, "the room is what says where to stop"
    assert "Traceback" not in done.stderr
    assert json.loads((tmp_path / "g.json").read_text())["exit_code"] == 0


# --- samples --------------------------------------------------------------------------------------------------------------


def _sampler(folder: Path, **task: Any) -> Sampler:
    return Sampler({
        "folder": str(folder), "watcher": 0, "steps": 0, "audits": [2], "lines": "", "every_seconds": 0, "least_seconds": 0, "census": False,
        "census_kind": None, "deep": False, "arm": None, "collect_every": 0, **task,
    })


@pytest.mark.parametrize("what", ["open", "write", "both"])
def test_samples_without_room_are_reported_once_and_end_nothing(tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps are still counted, and the samples written before are removed, so that no verdict rests on a part."""
    sampler = _sampler(tmp_path)
    sampler.marked(MarkSource.OPTIMIZER, None)
    sampler._finish()
    assert next(tmp_path.glob("rows-*")).stat().st_size
    with monkeypatch.context() as patch:
        if what != "open":
            patch.setattr("lowtide.probe.sampler.write", _full)
        if what != "write":
            patch.setattr("builtins.open", _full)  # the audit's
        for _ in range(200):
            sampler.marked(MarkSource.OPTIMIZER, None)
        sampler._finish()
    (said,) = _said(capsys)
    assert said.startswith(f"lowtide: memory sampling stops: no space left on device in {tmp_path}: ")
    assert said.endswith(GOES_ON)
    assert sampler._count == 201, "steps are counted on"
    assert not next(tmp_path.glob("rows-*")).stat().st_size, "no verdict is founded on a part"


@pytest.mark.parametrize("kib", [4, 16])
def test_no_leak_verdict_is_given_from_samples_without_room(tmp_path: Path, kib: int) -> None:
    script = tmp_path / "steps.py"
    script.write_text("import lowtide\nfor _ in range(300):\n    lowtide.step()\n")
    with small_disk(tmp_path / "temporary", f"{kib}k") as disk:
        done = subprocess.run(
            [sys.executable, "-m", "lowtide", "leak", "--steps", "200", "--processes", "1", "--quiet", script],
            env={**os.environ, "TMPDIR": str(disk)}, capture_output=True, text=True, timeout=TIMEOUT, check=False,
        )
    assert done.returncode == 2
    *_, said, verdict = done.stderr.splitlines()
    assert said.endswith(GOES_ON)
    assert verdict.startswith(f"lowtide: error: no verdict: there is no room for samples in {disk}")


# --- shared memory and checkpoints ----------------------------------------------------------------------------------------


def test_shared_memory_without_room_raises_a_memory_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays allocated before stay usable."""
    slot = wire.Slot()
    kept = slot.array((4,), "f8")
    monkeypatch.setattr(wire, "reserve", _full)
    with pytest.raises(MemoryError, match="no room for .* bytes of shared memory: no space left on device"):
        slot.array((1 << 20,), "f8")
    kept[:] = 1.0
    slot.close()


def test_shared_memory_is_reserved_before_it_is_written() -> None:
    slot = wire.Slot()
    for _ in range(3):
        slot.begin()
        slot.array((100_000,), "f8")
        slot.place(memoryview(bytes(300_000)))
        found = os.fstat(slot.file)
        assert found.st_blocks * 512 >= slot._used
    assert found.st_blocks * 512 < 1_200_000, "no more than is used"
    slot.close()


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("[enforce fail at inline_container.cc:778] . PytorchStreamWriter failed writing file data/0: file write failed")])
def test_a_checkpoint_a_framework_cannot_write_names_the_last_whole_one(tmp_path: Path, error: Exception) -> None:
    """A full disk, reported by the system or by torch's writer, becomes a CheckpointError."""
    (tmp_path / "a.ckpt").write_text("state")
    whole.mark(tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match="a.ckpt is unchanged: make room"), whole.written(tmp_path / "b.ckpt"):
        raise error
    assert whole.newest(tmp_path) == str(tmp_path / "a.ckpt")


def test_other_errors_pass_unchanged(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the script's own"), whole.written(tmp_path / "b.ckpt"):
        raise RuntimeError("the script's own")


def test_a_mark_that_cannot_be_written_keeps_the_former_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.ckpt").write_text("state")
    whole.mark(tmp_path / "a.ckpt")
    (tmp_path / "b.ckpt").write_text("state")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", _full)
        with pytest.raises(CheckpointError, match="no space left on device; .*a.ckpt is unchanged: make room"):
            whole.mark(tmp_path / "b.ckpt")
    assert not list(tmp_path.glob("*.undone"))
    assert whole.newest(tmp_path) == str(tmp_path / "a.ckpt")


def test_a_store_whose_folder_is_gone_raises_a_checkpoint_error(tmp_path: Path) -> None:
    from lowtide.checkpoint import Store

    store = Store(tmp_path / "store")
    store.save({"x": 1})
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="No such file or directory"):
        store.save({"x": 2})


@pytest.mark.parametrize("fails", [1, 2, 3])
def test_the_guard_tries_other_folders_for_its_files(tmp_path: Path, fails: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """If none has room, the last error is raised."""
    real, left = tempfile.mkdtemp, [fails]

    def made(**how: Any) -> str:
        left[0] -= 1
        if left[0] >= 0:
            _full()
        return real(prefix=how["prefix"], dir=tmp_path)

    monkeypatch.setattr(tempfile, "mkdtemp", made)
    if fails < 3:
        assert Scratch(PLACES).path.is_dir()
    else:
        with pytest.raises(OSError, match="No space left"):
            Scratch(PLACES)
