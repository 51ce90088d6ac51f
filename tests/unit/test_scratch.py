"""Law: a temporary folder is removed with its process; that of a killed process is removed by the next process that makes one.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command import TIMEOUT
from lowtide.base.temporary_folders import Scratch

HOLDS = """
import sys
from lowtide.base.temporary_folders import Scratch
with Scratch() as folder:
    (folder / "inside").write_text("x")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def _holder(place: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen([sys.executable, "-c", HOLDS], env={**os.environ, "TMPDIR": str(place)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_folder_is_removed_with_its_contents(place: Path) -> None:
    with Scratch() as folder:
        (folder / "deep").mkdir()
        (folder / "deep" / "file").touch()
        assert folder.parent == place
    assert not list(place.iterdir())


def test_the_folder_of_a_killed_process_is_removed_by_the_next_one(place: Path) -> None:
    """The folders of a running process and of a user (which has no lock) stay."""
    killed, of_killed = _holder(place)
    running, of_running = _holder(place)
    killed.send_signal(signal.SIGKILL)
    killed.wait(TIMEOUT)
    assert (of_killed / "inside").exists()
    (place / "lowtide-of-a-user").mkdir()
    with Scratch():
        assert not of_killed.exists()
        assert (of_running / "inside").exists()
        assert (place / "lowtide-of-a-user").exists(), "not made by us: it has no lock"
    running.communicate("", timeout=TIMEOUT)
    assert not of_running.exists()


def test_the_next_place_is_used_where_the_first_one_fails(place: Path) -> None:
    """If no place can be used, the last error is raised."""
    (place / "file").touch()
    (place / "other").mkdir()
    with Scratch((str(place / "file"), str(place / "other"))) as folder:
        assert folder.parent == place / "other"
    with pytest.raises(NotADirectoryError):
        Scratch((str(place / "file"), str(place / "missing")))


def test_a_folder_that_cannot_be_locked_is_removed_only_by_its_owner(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network file systems have no locks."""
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with monkeypatch.context() as without:
        without.setattr("lowtide.base.temporary_folders.fcntl.flock", unsupported)
        unlocked = Scratch()
    with Scratch():
        assert unlocked.path.exists()
    unlocked.remove()
    assert not list(place.iterdir())
