"""Laws of marked checkpoints and safe points: a half-written checkpoint is never whole; a process stops when its rule says so.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from lowtide.checkpoint import Store, points, whole
from lowtide.checkpoint.request import Requests


def marked(path: Path, *, age: int = 0) -> Path:
    """A checkpoint folder of two files that was marked the given number of seconds ago."""
    path.mkdir()
    (path / "model.bin").write_bytes(b"weights")
    (path / "state.json").write_bytes(b"{}")
    whole.mark(path)
    note = path.parent / f"{path.name}{whole._SUFFIX}"
    then = note.stat().st_mtime - age
    os.utime(note, (then, then))
    return path


def test_a_marked_checkpoint_is_whole(tmp_path: Path) -> None:
    """A checkpoint is whole once it is marked, and only then."""
    assert whole.whole(marked(tmp_path / "a"))
    assert not whole.whole(tmp_path / "never-marked")


@pytest.mark.parametrize("harm", ["other bytes", "shorter", "gone"])
def test_a_marked_checkpoint_that_was_changed_is_not_whole(harm: str, tmp_path: Path) -> None:
    """Other bytes, a shorter file and a missing file are all noticed."""
    path = marked(tmp_path / "a")
    file = path / "model.bin"
    if harm == "gone":
        file.unlink()
    else:
        file.write_bytes(b"weightz" if harm == "other bytes" else b"weigh")
    assert not whole.whole(path)


def test_the_newest_whole_checkpoint_skips_a_damaged_one(tmp_path: Path) -> None:
    assert whole.newest(tmp_path) is None
    marked(tmp_path / "old", age=20)
    middle = marked(tmp_path / "middle", age=10)
    broken = marked(tmp_path / "new")
    assert whole.newest(tmp_path) == str(broken)
    (broken / "model.bin").unlink()
    assert whole.newest(tmp_path) == str(middle)


def test_forgetting_a_file_removes_its_mark(tmp_path: Path) -> None:
    """A single file may be marked, too; `forget` removes file and mark, and may be called again."""
    file = tmp_path / "epoch.ckpt"
    file.write_bytes(b"weights")
    whole.mark(file)
    assert whole.whole(file)
    whole.forget(file)
    assert not list(tmp_path.iterdir())
    whole.forget(file)  # calling it again is no error


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Requests:
    monkeypatch.setattr(Requests, "_listen", lambda _: None)
    return Requests()


@pytest.mark.parametrize(("kind", "every", "stops"), [
    ("every", 3, [False, False, True, True]), ("epoch", 0, [False, True, False, True]), ("", 0, [False] * 4),
])
def test_a_rule_stops_at_the_right_safe_point(requests: Requests, kind: str, every: int, stops: list[bool]) -> None:
    """"every" counts safe points, "epoch" waits for the end of an epoch (here every second safe point), and no rule never
    stops.
    """
    requests._kind, requests._every = kind, every
    assert [requests.at(epoch=bool(i % 2), last=False) for i in range(4)] == stops


@pytest.mark.parametrize("kind", ["every", "epoch"])
def test_no_rule_stops_a_process_at_its_last_safe_point(requests: Requests, kind: str) -> None:
    """At the last safe point only a person's request stops it."""
    requests._kind, requests._every = kind, 1
    assert not requests.at(epoch=True, last=True)
    requests._asked = True
    assert requests.at(epoch=True, last=True), "a person who asks is answered"


def test_a_save_reports_its_seconds_and_bytes_to_the_guard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[float, int]] = []
    clock = iter([100.0, 102.5])
    monkeypatch.setattr(points.beat, "teller", lambda: SimpleNamespace(saved=lambda *what: told.append(what)))
    monkeypatch.setattr(points, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    store = Store(tmp_path)
    points._save(store, {}, {"epoch": 1}, None, wait=True)
    assert told == [(2.5, store.saved()[-1].bytes)]
