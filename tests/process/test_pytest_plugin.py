"""Law: a marked test fails exactly when its tensors take more than their limit, and says what they were."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from command import TIMEOUT
import pytest

TESTS = """
import pytest
import torch

def _train():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(4)))
    model(torch.randn(1024, 128)).square().mean().backward()

@pytest.mark.peak_memory({size})
def test_all():
    _train()

@pytest.mark.peak_memory({size}, phase="backward")
def test_backward():
    _train()

@pytest.mark.peak_memory("1 KiB", phase="optimizer")
def test_no_such_phase():
    _train()

@pytest.mark.peak_memory({size})
def test_in_a_thread():
    import threading

    thread = threading.Thread(target=_train)
    thread.start()
    thread.join()

def test_unmarked():
    _train()
"""


def _pytest(folder: Path, size: str, tests: str = TESTS) -> str:
    (folder / "test_it.py").write_text(tests.replace("{size}", size))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--strict-markers", "test_it.py"], cwd=folder,
        capture_output=True, text=True, timeout=TIMEOUT, check=False,
    )
    return done.stdout


@pytest.mark.long
def test_limits_are_exact_to_the_byte_and_reproducible(tmp_path: Path) -> None:
    told = _pytest(tmp_path, '"1 KiB"')
    assert "4 failed, 1 passed" in told
    assert "there is" not in told
    assert "activation" in told
    assert "Sequential.0" in told
    assert "test_it.py" in told
    assert "no phase 'optimizer'" in told
    peaks = [int(x.replace(",", "")) for x in re.findall(r"\(([\d,]+) bytes\) in the test", told)]
    assert "FAILED test_it.py::test_all" not in _pytest(tmp_path, str(peaks[0]))
    assert "FAILED test_it.py::test_all" in _pytest(tmp_path, str(peaks[0] - 1))


@pytest.mark.long("-1", "None", "True", "backward")
@pytest.mark.parametrize("wrong", ["'lots'", "-1", "None", "True", "'1 MiB', phase='optimizr'", "'1 MiB', 'backward', 3"])
def test_invalid_marks_are_refused_before_any_test_runs(wrong: str, tmp_path: Path) -> None:
    """Also for a test that is expected to fail (xfail)."""
    (tmp_path / "test_it.py").write_text(
        f"import pytest\n@pytest.mark.peak_memory({wrong})\n@pytest.mark.xfail\ndef test_hidden(): assert False\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "peak_memory: " in done.stderr + done.stdout


FULL = """
import errno, os
import pytest, torch
from lowtide import api
from lowtide.base import files

def _full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

@pytest.fixture
def no_room(monkeypatch):
    monkeypatch.setattr(files, "reserve", _full)

@pytest.mark.peak_memory("1 GiB")
def test_begun_without_room(no_room):
    torch.ones(4).sum()

@pytest.mark.peak_memory("1 GiB")
def test_stopped_on_the_way():
    api._running[-1].state.writer._stop(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    torch.ones(4).sum()

@pytest.mark.peak_memory("1 GiB")
def test_whole():
    torch.ones(4).sum()
"""


@pytest.mark.long
def test_no_test_passes_on_a_recording_without_room(tmp_path: Path) -> None:
    said = _pytest(tmp_path, "'1 GiB'", FULL)
    assert "2 failed, 1 passed" in said
    assert "peak_memory: nothing was recorded: no such recording" in said
    assert "peak_memory: the recording stopped before the test did: make room there" in said
