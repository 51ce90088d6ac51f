"""``lowtide record``, ``report`` and ``diff`` as their user meets them: files, figures, failures, bad input."""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

from command import TIMEOUT
import numpy as np
import pytest
from forked import forked
from lowtide.base.errors import RecordingError
from lowtide.runtime.device.heap_counters import library_path
from lowtide.base.package import PACKAGE
from lowtide.recording.explanation.explanation import explain
from lowtide.report.export import snapshot, speedscope, trace_events
from lowtide.report.html import page
from lowtide.report.recording import show_recording, to_json
from lowtide.recording.reader import read
from rich.console import Console


TRAINING = """
import os, signal, sys
import torch
torch.manual_seed(0)
torch.set_num_threads(1)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
        self.head = torch.nn.Linear(256, 10)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)))

model = Net()
optimizer = torch.optim.Adam(model.parameters())
for step in range(4):
    optimizer.zero_grad()
    out = model(torch.randn(int(sys.argv[1]), 256))
    loss = torch.nn.functional.cross_entropy(out, torch.randint(0, 10, (len(out),)))
    if len(sys.argv) > 2 and step == 2:
        os.kill(os.getpid(), getattr(signal, sys.argv[2]))
    loss.backward()
    optimizer.step()
    print(loss.item().hex())
"""


def _lowtide(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    if arguments[0] in ("report", "diff"):
        return forked(*arguments, cwd=cwd, columns=140)
    return subprocess.run(
        [sys.executable, "-m", "lowtide", *arguments], cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT, check=False,
        env={**os.environ, "COLUMNS": "140"},
    )


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a script and its recording."""
    folder = tmp_path_factory.mktemp("record")
    (folder / "train.py").write_text(TRAINING)
    done = _lowtide("record", "-o", "a.lowtide", "--json", "a.json", "train.py", "512", cwd=folder)
    assert done.returncode == 0, done.stderr
    plain = subprocess.run([sys.executable, "train.py", "512"], cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout == plain.stdout
    return folder


def _json(path: Path) -> Any:
    return json.loads(path.read_text())


def test_the_json_has_steps_phases_peak_and_findings(home: Path) -> None:
    found = _json(home / "a.json")
    assert [s["index"] for s in found["steps"]] == [0, 1, 2, 3]
    for step in found["steps"]:
        assert {"forward", "loss", "backward", "optimizer"} <= {p["name"] for p in step["phases"]}
        for p in step["phases"]:
            assert p["high_water_bytes"] >= p["peak_bytes"] >= max(p["start_bytes"], p["end_bytes"]) > 0
    assert sum(found["peak"]["by_role"].values()) == found["peak"]["bytes"]
    assert found["peak"]["bytes"] == max(s["peak_bytes"] for s in found["steps"])
    assert {"bytes", "role", "name", "module", "source"} <= set(found["peak"]["top"][0])
    assert any(t["module"].startswith("Net.body") and "train.py" in t["source"] for t in found["peak"]["top"])
    assert {f["id"] for f in found["findings"]} >= {"second-step", "backward-extra", "optimizer-states", "memory-floor"}
    assert all({"id", "text", "saving_bytes"} <= set(f) for f in found["findings"])


def test_backward_blocks_belong_to_the_module_of_their_forward(home: Path) -> None:
    """At least 95 % of the bytes made in backward have the module, or the loss's line."""
    from lowtide.recording.recorded_step import laid_out
    from lowtide.recording.reader import read

    step = next(s for s in laid_out(read(home / "a.lowtide")) if s.row.step == 1)
    made = [b for b in step.blocks if b.phase == "backward" and b.born >= 0 and b.counted]
    known = sum(b.bytes for b in made if b.module.startswith("Net") and "train.py" in b.source)
    loss = sum(b.bytes for b in made if not b.module and "train.py" in b.source)
    assert known + loss >= 0.95 * sum(b.bytes for b in made)
    assert known > 0


def test_report_shows_what_record_showed(home: Path) -> None:
    done = _lowtide("report", "a.lowtide", "--json", "b.json", cwd=home)
    assert done.returncode == 0, done.stderr
    assert _json(home / "b.json")["peak"] == _json(home / "a.json")["peak"]
    assert "high-water mark" in done.stderr
    assert "forward" in done.stderr


@pytest.mark.long
def test_level_phases_has_the_peaks_of_level_ops(home: Path) -> None:
    """Within 64 bytes: the dispatcher wraps numbers as tensors."""
    done = _lowtide("record", "-o", "p.lowtide", "--level", "phases", "--json", "p.json", "train.py", "512", cwd=home)
    assert done.returncode == 0, done.stderr
    coarse, fine = _json(home / "p.json"), _json(home / "a.json")
    for a, b in zip(coarse["steps"], fine["steps"], strict=True):
        assert abs(a["peak_bytes"] - b["peak_bytes"]) <= 64  # a number wrapped as a tensor by the dispatcher
    assert coarse["peak"] is None


def test_diff_names_what_changed(home: Path) -> None:
    assert _lowtide("record", "-o", "big.lowtide", "--quiet", "train.py", "1024", cwd=home).returncode == 0
    done = _lowtide("diff", "a.lowtide", "big.lowtide", "--json", "d.json", cwd=home)
    assert done.returncode == 0, done.stderr
    found = _json(home / "d.json")
    activations = found["by_role"]["activation"]
    assert activations["after_bytes"] > 1.9 * activations["before_bytes"]
    assert found["by_role"]["parameter"]["after_bytes"] == found["by_role"]["parameter"]["before_bytes"]
    assert any(t["what"].startswith("activation Net.body") for t in found["top"])
    assert not any(t["what"].endswith(".default") for t in found["top"])
    assert found["scripts"] == {"before": "train.py 512", "after": "train.py 1024"}
    assert "aten.addmm" in done.stderr


def test_a_killed_run_leaves_its_last_step(home: Path) -> None:
    """The step that was cut off has the bytes of an uninterrupted run up to there."""
    done = _lowtide("record", "-o", "k.lowtide", "train.py", "512", "SIGKILL", cwd=home)
    assert done.returncode == -signal.SIGKILL
    assert _lowtide("report", "k.lowtide", "--json", "k.json", cwd=home).returncode == 0
    found = _json(home / "k.json")
    assert [s["complete"] for s in found["steps"]] == [True, True, False]
    assert found["steps"][2]["phases"][-1]["name"] in ("loss", "data")
    from lowtide.recording.recorded_step import Role, laid_out
    from lowtide.recording.reader import read

    last = laid_out(read(home / "k.lowtide"))[-1]
    assert last.row.step == 2
    whole = next(s for s in laid_out(read(home / "a.lowtide")) if s.row.step == 2)
    count = len(last.ops)
    assert (last.before[:, Role.PARAMETER] == whole.before[:count, Role.PARAMETER]).all()
    assert (last.before.sum(axis=1) == whole.before[:count].sum(axis=1)).all()


@pytest.mark.skipif(library_path() is None, reason="the heap counter was not built")
def test_the_report_on_a_killed_run_says_where_it_was(home: Path) -> None:
    """Law: the report on a run that was killed names the last operator and the live bytes; that on a run with a normal end
    does not.
    """
    _lowtide("record", "-o", "k2.lowtide", "train.py", "512", "SIGKILL", cwd=home)
    done = _lowtide("report", "k2.lowtide", "--json", "k2.json", cwd=home)
    ended = _json(home / "k2.json")["ended"]
    assert ended["step"] == 2
    assert ended["phase"] in ("forward", "loss")
    assert ended["source"].startswith("train.py:")
    assert sum(ended["by_role"].values()) == ended["bytes"]
    assert "killed (the recording has no end)" in done.stdout + done.stderr
    assert _json(home / "a.json")["ended"] is None


@pytest.mark.skipif(library_path() is None, reason="the heap counter was not built")
def test_the_page_of_a_killed_run_draws_its_last_step(home: Path) -> None:
    """The last operator has a width in the chart. The forward without a backward is not taken for an evaluation."""
    script = home / "cut.py"
    script.write_text(TRAINING.replace("        os.kill(", "        more = torch.randn(2048, 1024)\n        os.kill("))
    _lowtide("record", "-o", "k3.lowtide", "cut.py", "512", "SIGKILL", cwd=home)
    _lowtide("report", "k3.lowtide", "--html", "k3.html", "--json", "k3.json", cwd=home)
    text = (home / "k3.html").read_text()
    assert "Killed (the recording has no end)" in text
    steps = json.loads(text.partition('type="application/json">')[2].partition("</script>")[0])["steps"]
    assert [s["step"] for s in steps] == [0, 1, 2]
    last = steps[-1]
    times, kib = (np.frombuffer(base64.b64decode(last[k]), dtype="<f4") for k in ("time", "kib"))
    assert times[-1] > times[-2] >= times[-3], "its last operator has a width"
    assert kib.reshape(len(times), -1)[-1].sum() * 1024 == pytest.approx(_json(home / "k3.json")["ended"]["bytes"], rel=1e-3)
    assert "evaluation-graph" not in [f["id"] for f in _json(home / "k3.json")["findings"]]


SLOW = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
total = 0.0
for step in range(150):
    x = torch.randn(32, 64)
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total = total + model(x[:4]).mean()  # with its graph: a little more is held in every step
"""


@pytest.mark.long
def test_a_run_that_grows_slowly_keeps_its_highest_step(tmp_path: Path) -> None:
    """Law: the step whose bytes are shown peaks within 2 % of the highest, and the memory held with its graphs is found there.
    """
    (tmp_path / "slow.py").write_text(SLOW)
    done = _lowtide("record", "-o", "slow.lowtide", "--json", "slow.json", "slow.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = _json(tmp_path / "slow.json")
    highest, first = max(s["peak_bytes"] for s in found["steps"]), found["steps"][2]["peak_bytes"]
    assert highest > 2 * first
    assert found["peak"]["bytes"] * 1.02 >= highest
    held = max((f["saving_bytes"] for f in found["findings"] if f["id"] == "graph-kept"), default=0)
    assert held > 0.8 * (highest - first)


@pytest.mark.long
def test_memory_kept_by_onednn_is_not_unknown(tmp_path: Path) -> None:
    """Law: under autocast, where oneDNN keeps some hundred kilobytes per shape, less than 1 % of the peak is unknown."""
    (tmp_path / "bf16.py").write_text("""
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256 + 16 * i) if i == 0 else
    torch.nn.Linear(256 + 16 * (i - 1), 256 + 16 * i) for i in range(5)))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(4):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.randn(256, 256)).float().square().mean()
    loss.backward()
    optimizer.step()
""")
    done = _lowtide("record", "-o", "b.lowtide", "--json", "b.json", "bf16.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    peak = _json(tmp_path / "b.json")["peak"]
    assert peak["by_role"].get("unknown", 0) <= 0.01 * peak["bytes"]
    assert sum(peak["by_role"].values()) == peak["bytes"]


def test_out_of_memory_names_the_request_and_a_sufficient_change(home: Path) -> None:
    (home / "held.py").write_text(TRAINING.replace("optimizer.zero_grad()", "optimizer.zero_grad(set_to_none=False)"))
    assert _lowtide("record", "-o", "h.lowtide", "--json", "h.json", "held.py", "512", cwd=home).returncode == 0
    roomy = _json(home / "h.json")
    gradients = roomy["peak"]["by_role"]["gradient"]
    cap = roomy["peak"]["bytes"] - gradients // 2
    done = _lowtide("record", "-o", "oom.lowtide", "--cap", str(cap), "--json", "oom.json", "held.py", "512", cwd=home)
    assert done.returncode == 1
    assert "can't allocate memory" in done.stderr
    assert "out of memory" in done.stderr
    assert "enough on its own" in done.stderr
    found = _json(home / "oom.json")
    assert found["peak"]["asked_bytes"] > 0
    assert found["peak"]["bytes"] <= cap < found["peak"]["bytes"] + found["peak"]["asked_bytes"]
    best = next(f for f in found["findings"] if f["id"] == "zeroed-gradients")
    assert best["changed_peak_bytes"] <= cap


@pytest.mark.parametrize("place", [".", "notes.txt", "none/there.lowtide"])
def test_only_a_recording_is_replaced_by_a_recording(place: str, tmp_path: Path) -> None:
    """A script given in place of the output file is not lost."""
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "s.py").write_text("import torch\ntorch.ones(4)\n")
    done = _lowtide("record", "-o", place, "s.py", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1
    assert (tmp_path / "notes.txt").read_text() == "mine"
    (tmp_path / "twice.py").write_text(f"import lowtide\nwith lowtide.record({place!r}):\n    pass\n")
    done = subprocess.run([sys.executable, "twice.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "RecordingError: cannot write" in done.stderr
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_the_exit_code_and_the_traceback_are_the_scripts(home: Path) -> None:
    """Without frames of Lowtide; a recording that ended so can be shown."""
    (home / "fails.py").write_text("import sys\nimport torch\ntorch.ones(4)\nsys.exit(3)\n")
    assert _lowtide("record", "-o", "f.lowtide", "fails.py", cwd=home).returncode == 3
    (home / "raises.py").write_text("import torch\ntorch.ones(4)\nraise KeyError('mine')\n")
    done = _lowtide("record", "-o", "f.lowtide", "raises.py", cwd=home)
    assert done.returncode == 1
    assert "KeyError: 'mine'" in done.stderr
    assert str(PACKAGE) not in done.stderr, "a frame of Lowtide is shown"
    assert _lowtide("report", "f.lowtide", cwd=home).returncode == 0


FORKS = """
import multiprocessing, os, sys
import torch

def fit(steps):
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()

fit(int(sys.argv[1]))
for _ in range(2):
    child = multiprocessing.get_context("fork").Process(target=fit, args=(3,))
    child.start()
    child.join()
    assert not child.exitcode
number = os.fork()
if not number:
    fit(2)
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) == 7
fit(4)
sys.exit(3)
"""


@pytest.mark.long("-2", "record")
@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("verb", ["record", "run"])
def test_forked_children_train_unwatched_and_no_parent_step_is_lost(
    verb: str, before: int, tmp_path: Path
) -> None:
    """A child used to write into its parent's recording, which ended the parent."""
    (tmp_path / "forks.py").write_text(FORKS)
    how = ("-o", "f.lowtide") if verb == "record" else ("--budget", "1GiB")
    done = _lowtide(verb, *how, "--json", "f.json", "forks.py", str(before), cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("lowtide run") == (verb == "run")
    assert len(_json(tmp_path / "f.json")["steps"]) == before + 4


@pytest.mark.long("stdout", "record")
@pytest.mark.parametrize("closed", ["stdout", "both"])
@pytest.mark.parametrize("verb", ["record", "run"])
def test_the_exit_code_is_the_scripts_with_closed_streams(verb: str, closed: str, tmp_path: Path) -> None:
    """Streams that the shell, or the script itself, has closed, and a recursion limit that the script has made too small for a
    summary.
    """
    (tmp_path / "quiet.py").write_text("""
import sys, torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
if len(sys.argv) > 1:
    sys.stdout.close()
    sys.stderr.close()
sys.setrecursionlimit(60)
sys.exit(3)
""")
    how = "-o q.lowtide" if verb == "record" else "--budget 1GiB"
    shut = {"stdout": ">&-", "both": "own"}[closed]
    command = f"{sys.executable} -m lowtide {verb} {how} quiet.py {shut}"
    assert subprocess.run(command, shell=True, cwd=tmp_path, timeout=TIMEOUT, check=False).returncode == 3


def _damaged(home: Path, kind: str) -> str:
    path = home / f"{kind}.lowtide"
    if kind == "missing":
        path.unlink(missing_ok=True)
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "truncated":
        path.write_bytes((home / "a.lowtide").read_bytes()[:5000])
    elif kind == "foreign":
        path.write_bytes(b"\x80\x05 a pickle of something else" * 100)
    elif kind == "foreign-database":
        path.unlink(missing_ok=True)
        with sqlite3.connect(path) as base:
            base.execute("CREATE TABLE x (y)")
    else:
        shutil.copy(home / "a.lowtide", path)
        with sqlite3.connect(path) as base:
            base.execute("UPDATE meta SET value = '99' WHERE key = 'format'")
    return path.name


def test_a_cap_without_a_unit_is_refused_before_anything_runs(home: Path) -> None:
    """A cap of 300 bytes used to end in a traceback of the script's first import."""
    done = _lowtide("record", "-o", "n.lowtide", "--cap", "300", "held.py", cwd=home)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "lowtide: error: --cap 300 is too small to run anything: give a unit, as in --cap 300MiB"
    ]
    assert not (home / "n.lowtide").exists()


@pytest.mark.parametrize("kind", ["missing", "empty", "truncated", "foreign", "foreign-database", "newer"])
@pytest.mark.parametrize("verb", ["report", "diff", "diff-second"])
def test_bad_recordings_are_one_line_and_exit_code_2(home: Path, kind: str, verb: str) -> None:
    name = _damaged(home, kind)
    arguments = {"report": ["report", name], "diff": ["diff", name, "a.lowtide"], "diff-second": ["diff", "a.lowtide", name]}
    done = forked(*arguments[verb], cwd=home)
    assert done.returncode == 2
    assert done.stderr.startswith("lowtide: error: ")
    assert len(done.stderr.splitlines()) == 1
    assert name in done.stderr


@pytest.mark.long("-names", "-tail")
@pytest.mark.parametrize("part", ["", "-tail", "-names"])
def test_a_corrupted_recording_is_refused_in_one_line_or_shown(home: Path, part: str) -> None:
    """Law: whatever bytes of a killed run's recording, journal or names are changed or cut off, nothing fails with a
    traceback.
    """
    _lowtide("record", "-o", "harm.lowtide", "train.py", "512", "SIGKILL", cwd=home)
    files = [home / f"harm.lowtide{suffix}" for suffix in ("", "-tail", "-names")]
    whole = {file: file.read_bytes() for file in files}
    target = home / f"harm.lowtide{part}"
    used = len(whole[target].rstrip(b"\0"))
    chance = random.Random(part)
    outcomes = set()
    for _ in range(60):
        changed = bytearray(whole[target])
        for at in chance.sample(range(used), chance.choice([1, 1, 30])):
            changed[at] = chance.randrange(256)
        target.write_bytes(bytes(changed[: chance.choice([used, used, chance.randrange(used)])]))
        try:
            found = explain(read(home / "harm.lowtide"))
            to_json(found)
            show_recording(found, Console(file=io.StringIO(), width=100))
            page(found)
            snapshot(found)
            trace_events(found)
            speedscope(found)
        except RecordingError as error:
            assert "\n" not in str(error)
            outcomes.add("refused")
        else:
            outcomes.add("shown")
    target.write_bytes(whole[target])
    assert "shown" in outcomes
    assert part or "refused" in outcomes


def test_exports_have_the_recorded_peak_in_their_tools_formats(home: Path) -> None:
    """torch's memory_viz opens the snapshot; the Perfetto and speedscope files are checked for their structure and the peak.
    """
    done = _lowtide("report", "a.lowtide", "--snapshot", "s.pickle", "--perfetto", "p.trace.json", "--speedscope",
                    "s.speedscope.json", cwd=home)
    assert done.returncode == 0, done.stderr
    peak = _json(home / "a.json")["peak"]
    told = subprocess.run(
        [sys.executable, "-m", "torch.cuda._memory_viz", "stats", "s.pickle"], cwd=home, capture_output=True, text=True,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    page = subprocess.run(
        [sys.executable, "-m", "torch.cuda._memory_viz", "trace_plot", "s.pickle", "-o", "plot.html"], cwd=home,
        capture_output=True, text=True, check=False,
    )
    assert page.returncode == 0, page.stderr
    assert _highest(pickle.loads((home / "s.pickle").read_bytes())["device_traces"][0]) >= 0.99 * peak["bytes"]  # noqa: S301
    events = _json(home / "p.trace.json")["traceEvents"]
    assert {"X", "C", "M"} == {e["ph"] for e in events}
    assert max(sum(e["args"].values()) for e in events if e["ph"] == "C") == peak["bytes"]
    assert {"forward", "backward", "optimizer"} <= {e["name"] for e in events if e["ph"] == "X"}
    scope = _json(home / "s.speedscope.json")
    assert max(sum(p["weights"]) for p in scope["profiles"]) == peak["bytes"]
    names = [f["name"] for f in scope["shared"]["frames"]]
    assert all(0 <= i < len(names) for p in scope["profiles"] for sample in p["samples"] for i in sample)
    assert {"activation", "parameter", "Net"} <= set(names)


def _highest(events: list[dict[str, Any]]) -> int:
    live = highest = 0
    for event in events:
        live += {"alloc": event["size"], "free_completed": -event["size"]}.get(event["action"], 0)
        highest = max(highest, live)
    return highest


@pytest.mark.long
@pytest.mark.skipif(library_path() is None, reason="the heap counter was not built")
def test_lapack_workspaces_are_reported_as_outside_the_allocator(home: Path) -> None:
    (home / "svd.py").write_text(
        "import torch\nm = torch.nn.Linear(500, 500)\no = torch.optim.SGD(m.parameters())\n"
        "for _ in range(3):\n    y = m(torch.randn(500, 500))\n    s = torch.linalg.svdvals(y).sum() + "
        "torch.linalg.eigh(y @ y.T)[0].sum()\n    s.backward()\n    o.step()\n    o.zero_grad()\n"
    )
    done = _lowtide("record", "-o", "svd.lowtide", "--json", "svd.json", "svd.py", cwd=home)
    assert done.returncode == 0, done.stderr
    assert "outside torch's allocator" in done.stderr
    warm = {p["name"]: p["outside_bytes"] for p in _json(home / "svd.json")["steps"][2]["phases"] if p["outside_bytes"]}
    assert warm["loss"] > warm["forward"] + (1 << 20)


@pytest.mark.long
@pytest.mark.skipif(library_path() is None, reason="the heap counter was not built")
def test_the_batch_fraction_said_to_fit_does_fit(home: Path) -> None:
    whole, half = (
        max(s["peak_bytes"] for s in _recorded_at(home, batch)["steps"]) for batch in ("2048", "1024")
    )
    cap = str((whole + half) // 2)
    done = _lowtide("record", "-o", "c.lowtide", "--cap", cap, "--json", "c.json", "train.py", "2048", cwd=home)
    assert done.returncode == 1
    found = next(f for f in _json(home / "c.json")["findings"] if f["id"] == "smaller-batch")
    assert "1/2" in found["text"]
    assert _lowtide("record", "-o", "c.lowtide", "--cap", cap, "--quiet", "train.py", "1024", cwd=home).returncode == 0


def _recorded_at(home: Path, batch: str) -> Any:
    assert _lowtide("record", "-o", "b.lowtide", "--quiet", "--json", "n.json", "train.py", batch, cwd=home).returncode == 0
    return _json(home / "n.json")


@pytest.mark.long
def test_a_script_that_fails_before_its_first_step_keeps_the_former(tmp_path: Path) -> None:
    """Law: a recording is replaced by one that has something to show, not by an empty one."""
    file = tmp_path / "kept.lowtide"

    def recorded(script: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "script.py").write_text(script)
        return _lowtide("record", "-o", str(file), "script.py", "64", cwd=tmp_path)

    assert recorded(TRAINING).returncode == 0
    before = file.read_bytes()
    failed = recorded("import torch\nraise RuntimeError('at once')\n")
    assert failed.returncode == 1
    assert "is unchanged" in failed.stderr
    assert file.read_bytes() == before
    later = recorded(TRAINING + "raise RuntimeError('after steps')\n")
    assert later.returncode == 1
    assert file.read_bytes() != before
    assert [p.name for p in tmp_path.glob("kept.lowtide*")] == ["kept.lowtide"]


@pytest.mark.long
def test_a_recording_set_aside_by_a_killed_one_is_named_and_readable(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TRAINING)
    (tmp_path / "killed.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")

    def recorded(script: str) -> subprocess.CompletedProcess[str]:
        return _lowtide("record", "-o", "kept.lowtide", "--quiet", script, "64", cwd=tmp_path)

    assert recorded("script.py").returncode == 0
    before = (tmp_path / "kept.lowtide").read_bytes()
    recorded("killed.py")
    (aside,) = tmp_path.glob(".kept.lowtide.*")
    assert aside.read_bytes() == before
    told = recorded("script.py").stderr
    assert str(aside.name) in told
    assert "rename it" in told
    assert _lowtide("report", aside.name, cwd=tmp_path).returncode == 0


def test_a_recording_is_explained_once_for_all_reports(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each report used to lay out the steps and to look for findings by itself."""
    from lowtide.cli import report
    from lowtide.recording.explanation import explanation

    asked: list[str] = []
    for name in ("laid_out", "findings"):
        original = getattr(explanation, name)
        monkeypatch.setattr(explanation, name, lambda *a, n=name, f=original: (asked.append(n), f(*a))[1])
    outputs = {option: home / f"once.{option}" for option in ("json", "html", "snapshot", "perfetto", "speedscope")}
    options = [text for option, file in outputs.items() for text in (f"--{option}", str(file))]
    report.report.main(
        [str(home / "a.lowtide"), *options], standalone_mode=False
    )
    assert asked == ["laid_out", "findings"]
    assert all(file.stat().st_size for file in outputs.values())
    assert "high-water mark" in capsys.readouterr().err
