"""Laws: names with bytes that are no text in the locale work in every verb; a terminal that can show only letters gets
letters.
"""

from __future__ import annotations

import ast
import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from command import TIMEOUT
import lowtide
import pytest
from lowtide.base import messages
from lowtide.base.outputs import write, write_json
from lowtide.runtime.agent.task import TASK, RunOptions, Task, environment_of, read_task
from lowtide.recording.reader import read

PLAIN = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii", "COLUMNS": "100"}
NAME = os.fsencode("trän_ü.py")
FOREIGN = "tr\udcc3\udca4n.py"
"""As the C locale reads what UTF-8 has as `trän.py`."""

TRAINING = """
import sys
import torch
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(60):
    optimizer.zero_grad()
    loss = model(torch.randn(256, 64)).square().mean()
    loss.backward()
    optimizer.step()
print("trained", *map(ascii, sys.argv[1:]))
"""


# --- text -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "known"), [("plain", "plain"), ("trän", "trän"), (FOREIGN, "trän.py"), ("\udcff", "\ufffd"), ("\ud800x", "?x")])
def test_bytes_of_a_name_are_read_as_utf_8(text: str, known: str) -> None:
    assert messages.readable(text) == known


@pytest.mark.parametrize("text", ["plain", "trän", "tr\udcffn", "\ud800"])
def test_a_name_from_a_file_can_be_passed_to_a_process(text: str) -> None:
    os.fsencode(messages.named_here(text))


def test_a_task_survives_the_environment_variable_unchanged() -> None:
    options = RunOptions(budget="1GiB", keep=("tür", FOREIGN), offload=True, plan=FOREIGN, save_plan=None, json=None, quiet=False)
    task = Task(target=FOREIGN, module=False, arguments=("\udcff", "ü", "\ud800"), preload=None, options=options, constants={"ü": "'ü'"})
    carried = environment_of(task)[TASK]
    assert carried.isascii(), "any locale can carry it"
    assert read_task(carried) == task


def test_files_for_people_contain_valid_text(tmp_path: Path) -> None:
    write_json(str(tmp_path / "a.json"), {"script": FOREIGN, "more": ["\udcff", "ü"]})
    assert json.loads((tmp_path / "a.json").read_bytes().decode()) == {"script": "trän.py", "more": ["\ufffd", "ü"]}
    write(str(tmp_path / "a.html"), f"<p>{FOREIGN}</p>")
    assert (tmp_path / "a.html").read_bytes().decode() == "<p>trän.py</p>"


# --- terminals ------------------------------------------------------------------------------------------------------------


def _written(text: str, encoding: str) -> str:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, errors="backslashreplace")
    shown = messages.shown(stream)
    shown.write(text)
    shown.flush()
    return raw.getvalue().decode(encoding)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_block_characters_gets_as_many_letters(encoding: str) -> None:
    """Bars of different heights stay different."""
    drawn = "█▒░ ▁▂▃▄▅▆▇█ a…"
    found = _written(drawn, encoding)
    assert found.isascii()
    assert len(found) == len(drawn)
    assert "\\" not in found
    assert len(set(found[4:12])) == 8, "heights differ"


def test_a_terminal_with_block_characters_gets_them() -> None:
    assert _written("█▁…ü", "utf-8") == "█▁…ü"
    assert _written("ü", "latin-1") == "ü"


def test_every_character_that_reports_draw_has_an_ascii_letter() -> None:
    folder = Path(lowtide.__file__).parent
    for path in sorted([*folder.glob("report/*.py"), *folder.glob("cli/*.py"), *folder.glob("guard/*.py")]):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                left = [c for c in node.value.translate(messages._PLAIN) if not c.isascii()]
                assert not left, f"{path.name}:{node.lineno} draws {left}"


def test_standard_error_on_a_full_disk_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowtide.report.terminal import console

    class Full(io.StringIO):
        def write(self, _: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        def flush(self) -> None:
            self.write("")

    monkeypatch.setattr(sys, "stderr", Full())
    messages.tell("a line")
    console().print("a table")
    with pytest.raises(OSError, match="No space"):
        sys.stderr.write("the test's own")


def test_a_broken_pipe_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reaches whoever writes, so that the console can stop."""

    class Gone(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        messages.shown(Gone()).write("x")


# --- verbs ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A folder with a script and its recording, whose names the C locale cannot read."""
    made = os.path.join(os.fsencode(tmp_path_factory.mktemp("plain")), os.fsencode("ö"))
    os.mkdir(made)
    with open(os.path.join(made, NAME), "w") as file:
        file.write(TRAINING)
    done = _lowtide(made, "record", "-o", "ü.lowtide", NAME, "ß")
    assert done.stdout == b"trained '\\udcc3\\udc9f'\n"
    return made


def _lowtide(folder: bytes, *words: str | bytes, code: int = 0) -> subprocess.CompletedProcess[bytes]:
    command: list[Any] = [sys.executable, "-m", "lowtide", *(w if isinstance(w, bytes) else w.encode() for w in words)]
    done = subprocess.run(command, cwd=folder, env={**os.environ, **PLAIN}, capture_output=True, timeout=TIMEOUT, check=False)
    assert done.returncode == code, done.stderr
    assert b"Traceback" not in done.stderr
    assert done.stderr.isascii()
    assert not any(drawn in done.stderr for drawn in (b"\\u2", b"\\udc")), done.stderr
    return done


def test_a_recording_stores_names_as_text(folder: bytes) -> None:
    found = read(os.fsdecode(os.path.join(folder, "ü.lowtide".encode())))
    assert found.meta["script"] == "trän_ü.py"
    assert found.meta["arguments"] == ["ß"]
    assert any(name.startswith("trän_ü.py:") for name in found.names)


def test_a_report_draws_letters_and_its_files_contain_text(folder: bytes) -> None:
    done = _lowtide(folder, "report", "ü.lowtide", "--json", "ü.json", "--html", "ü.html", "--snapshot", "ü.pickle", "--perfetto", "ü.trace", "--speedscope", "ü.speed")
    assert b"####" in done.stderr
    for name in ("ü.json", "ü.html"):
        with open(os.path.join(folder, name.encode()), encoding="utf-8") as file:
            assert "trän_ü.py" in file.read()


@pytest.mark.parametrize("words", [("record", "nö.py"), ("report", "nö.lowtide"), ("record", "-o", "nö/x", NAME), ("run", "--budget", "1GiB", "nö.py"), ("leak", "nö.py"), ("guard", "--", "nö"), ("plan", "nö.json")])
def test_a_missing_file_is_named_in_the_error(folder: bytes, words: tuple[str | bytes, ...]) -> None:
    (line,) = _lowtide(folder, *words, code=2).stderr.splitlines()
    assert line.startswith(b"lowtide: error: ")
    assert b"n\\xf6" in line


@pytest.mark.slow("leak")
@pytest.mark.long("leak", "guard", "sweep", "plan", "diff", "saved")
@pytest.mark.parametrize("words", [
    pytest.param(("run", "--budget", "64MiB", "--json", "ü.run.json", NAME), id="run"),
    pytest.param(("run", "--budget", "90%", "--save-plan", "ü.plan", NAME), id="saved"),
    pytest.param(("plan", "ü.lowtide", "--budget", "90%", "--json", "ü.plan.json"), id="plan"),
    pytest.param(("diff", "ü.lowtide", "ü.lowtide", "--html", "ü.diff.html"), id="diff"),
    pytest.param(("leak", "--steps", "55", "--processes", "1", "--json", "ü.leak.json", "--html", "ü.leak.html", NAME), id="leak"),
    pytest.param(("guard", "--record", "ü.guard.lowtide", "--json", "ü.guard.json", NAME), id="guard"),
    pytest.param(("sweep", "ü.toml", "--json", "ü.sweep.json", "--html", "ü.sweep.html"), id="sweep"),
])
def test_every_verb_accepts_any_name(folder: bytes, words: tuple[str | bytes, ...]) -> None:
    with open(os.path.join(folder, "ü.toml".encode()), "w", encoding="utf-8") as file:
        file.write('command = "python trän_ü.py"\nsteps = 55\n[axes]\na = {env = "A", values = ["ö"]}\n')
    _lowtide(folder, *words)


def test_a_process_name_cut_inside_a_character_is_readable() -> None:
    """`/proc/PID/status` then is not valid UTF-8; the signals that the process catches are read from it all the same."""
    import signal

    from lowtide.guard.process import _catches

    comm = Path("/proc/self/comm")
    before = comm.read_bytes().strip()
    handler = signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        comm.write_bytes(b"tr\xc3")
        assert _catches(os.getpid(), signal.SIGUSR2)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        assert not _catches(os.getpid(), signal.SIGUSR2)
    finally:
        comm.write_bytes(before)
        signal.signal(signal.SIGUSR2, handler)
