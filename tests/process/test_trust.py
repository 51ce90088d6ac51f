"""Laws of ``lowtide run``: it never ends a run that goes well, and says truly whether the budget was held.

Its figures are there however the run ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lowtide.base.errors import INTERRUPTED
import pytest
from patience import PATIENCE, until
from command import PACKAGE, TIMEOUT, Done, environment, hears_interrupts, lowtide_in, script_in

NET = """
import os, signal, sys, time, pathlib
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, foreach=False)
x = torch.randn(64, 512)

def step(i, rows=64):
    optimizer.zero_grad()
    loss = net(torch.randn(rows, 512)).square().mean()
    loss.backward()
    optimizer.step()
    print(i, loss.item(), flush=True)
"""
READS_LATER = NET + """
for i in range(12):
    step(i)
    if i % 7 == 6:
        print("gradient", sum(p.grad.square().sum().item() for p in net.parameters()))
"""
GROWS = NET + """
for i in range(10):
    step(i, 64 if i < 6 else 6000)
"""


def _plain(folder: Path, script: str) -> Done:
    return subprocess.run(
        [sys.executable, script], cwd=folder, env=environment(), capture_output=True, text=True, timeout=TIMEOUT, check=True
    )


@pytest.mark.long
def test_reading_gradients_now_and_then_ends_no_run_and_keeps_the_bits(tmp_path: Path) -> None:
    """The budget needs move-gradients, and the script reads all gradients in every seventh step."""
    script = script_in(tmp_path, READS_LATER)
    done = lowtide_in(tmp_path, "run", "--budget", "28MiB", "--json", "f.json", script, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "f.json").read_text())
    assert [x["name"] for x in figures["levers"] if x["used"]] == ["move-gradients"]
    assert figures["held"]
    os.environ["OMP_NUM_THREADS"] = "1"
    assert done.stdout == _plain(tmp_path, script).stdout


@pytest.mark.long
def test_a_late_crossing_is_reported_at_once_and_ends_in_code_3(tmp_path: Path) -> None:
    """Even a size that no plan holds does not end a run after its third step."""
    script = script_in(tmp_path, GROWS)
    done = lowtide_in(tmp_path, "run", "--budget", "60MiB", "--no-offload", "--json", "f.json", script)
    assert done.returncode == 3, done.stderr
    assert len(done.stdout.splitlines()) == 10
    figures = json.loads((tmp_path / "f.json").read_text())
    assert not figures["held"]
    assert figures["exit_code"] == 3
    assert figures["over"] == [6, 7, 8, 9]
    lines = [line for line in done.stderr.splitlines() if line.startswith("lowtide: step 6 peaked at") and "over the budget:" in line]
    assert len(lines) == 1
    assert "step 7 peaked at" not in done.stderr.split("lowtide run")[0], "at most one line a minute"
    assert "the budget was not held in 4 of 10 steps" in " ".join(done.stderr.split())


HIGHEST_IN_FORWARD = """
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 784), nn.Sigmoid())
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
for i in range(6):
    data = torch.rand(2048, 784)
    optimizer.zero_grad()
    nn.functional.binary_cross_entropy(net(data), data, reduction="sum").backward()
    optimizer.step()
"""


@pytest.mark.long("307200")
@pytest.mark.parametrize("missing", [10 << 10, 300 << 10])
def test_a_budget_at_the_floor_is_held_and_one_just_below_refused(tmp_path: Path, missing: int) -> None:
    """The first step has no optimizer states yet, and its floor is lower: it does not cross the budget. The states stay."""
    script, resident = script_in(tmp_path, HIGHEST_IN_FORWARD), ("--without", "move-states")
    lowtide_in(tmp_path, "run", "--budget", "1GiB", "--json", "f.json", script)
    floor = json.loads((tmp_path / "f.json").read_text())["plan"]["bound"]["peak_bytes"]
    held = lowtide_in(tmp_path, "run", "--budget", str(floor), *resident, "--json", "f.json", script)
    assert held.returncode == 0, held.stderr
    assert json.loads((tmp_path / "f.json").read_text())["held"]
    refused = lowtide_in(tmp_path, "run", "--budget", str(floor - missing), *resident, "--json", "f.json", script)
    assert refused.returncode == 1, refused.stderr
    figures = json.loads((tmp_path / "f.json").read_text())
    assert len(figures["steps"]) < 3
    assert figures["steps"][0]["peak_bytes"] <= floor - missing


def test_with_keep_going_the_exit_code_is_always_the_scripts(tmp_path: Path) -> None:
    script = script_in(tmp_path, NET + "\nfor i in range(5): step(i)\n")
    done = lowtide_in(tmp_path, "run", "--budget", "1MiB", "--keep-going", "--json", "f.json", script)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 5
    assert not json.loads((tmp_path / "f.json").read_text())["held"]


@pytest.mark.long
def test_a_failing_script_keeps_its_code_though_the_budget_was_crossed(tmp_path: Path) -> None:
    done = lowtide_in(tmp_path, "run", "--budget", "60MiB", "--no-offload", script_in(tmp_path, GROWS + "\nsys.exit(7)\n"))
    assert done.returncode == 7, done.stderr


# --- however it ends -------------------------------------------------------------------------------------------------

WAITS = NET + """
for i in range(4):
    step(i)
time.sleep(1.5)
step(4)
step(5)
pathlib.Path("ready").touch()
while True: time.sleep(0.05)
"""


def _started(folder: Path, text: str, *options: str) -> subprocess.Popen[str]:
    script = script_in(folder, text)
    process = subprocess.Popen(
        [sys.executable, "-m", "lowtide", "run", "--budget", "1GiB", "--json", "f.json", *options, script],
        cwd=folder, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        preexec_fn=hears_interrupts,  # noqa: PLW1509 - no threads between fork and exec here
    )  # fmt: skip
    deadline = time.monotonic() + TIMEOUT
    while not (folder / "ready").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process


def _figures(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "f.json").read_text())
    return found


@pytest.mark.long("SIGHUP")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda n: n.name)
def test_a_signal_shows_the_summary_and_then_ends_the_run(tmp_path: Path, number: signal.Signals) -> None:
    """The JSON file has all steps, and 128 + N as its exit code."""
    process = _started(tmp_path, WAITS)
    process.send_signal(number)
    _, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode == -number
    assert "lowtide run" in errors
    assert "Traceback" not in errors
    assert (len(_figures(tmp_path)["steps"]), _figures(tmp_path)["exit_code"]) == (6, 128 + number)


def test_the_scripts_own_signal_handler_is_left_alone(tmp_path: Path) -> None:
    text = NET + """
for i in range(2): step(i)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
pathlib.Path("ready").touch()
while True: time.sleep(0.05)
"""
    process = _started(tmp_path, text)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=TIMEOUT)
    assert process.returncode == 9
    assert _figures(tmp_path)["exit_code"] == 9


def test_figures_exist_after_a_kill(tmp_path: Path) -> None:
    process = _started(tmp_path, WAITS)
    process.kill()
    process.communicate(timeout=TIMEOUT)
    assert process.returncode == -signal.SIGKILL
    assert len(_figures(tmp_path)["steps"]) >= 1
    assert _figures(tmp_path)["exit_code"] is None
    assert [f.name for f in tmp_path.glob("*.partial")] == []


def test_figures_exist_after_os_exit(tmp_path: Path) -> None:
    done = lowtide_in(tmp_path, "run", "--budget", "1GiB", "--json", "f.json", script_in(tmp_path, NET + "step(0)\nstep(1)\nos._exit(5)\n"))
    assert done.returncode == 5
    assert "lowtide run" in done.stderr
    assert (len(_figures(tmp_path)["steps"]), _figures(tmp_path)["exit_code"]) == (2, 5)


def test_a_forked_child_that_calls_os_exit_writes_nothing(tmp_path: Path) -> None:
    text = NET + "step(0)\npid = os.fork()\nif pid == 0:\n    os._exit(4)\nprint(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\nstep(1)\n"
    done = lowtide_in(tmp_path, "run", "--budget", "1GiB", "--json", "f.json", script_in(tmp_path, text))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("lowtide run") == 1
    assert "\n4\n" in done.stdout


@pytest.mark.long("0---json", "7---save-plan", "0---save-plan")
@pytest.mark.parametrize("option", ["--json", "--save-plan"])
@pytest.mark.parametrize("code", [0, 7])
def test_a_file_that_cannot_be_written_keeps_exit_code_and_summary(tmp_path: Path, option: str, code: int) -> None:
    (tmp_path / "out").mkdir()
    text = NET + f"import shutil\nfor i in range(3): step(i)\nshutil.rmtree('out')\nsys.exit({code})\n"
    done = lowtide_in(tmp_path, "run", "--budget", "1GiB", option, "out/f", script_in(tmp_path, text))
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert "lowtide run" in done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("lowtide: error:")] == [
        f"lowtide: error: {tmp_path / 'out' / 'f'}: No such file or directory"
    ]


def _maps(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/maps").read_text()
    return ""


def test_ctrl_c_before_the_script_begins_shows_no_frame_of_lowtide(tmp_path: Path) -> None:
    """Whenever it comes once Lowtide has begun: while the command line is imported, torch, or anything after it."""
    script = script_in(tmp_path, "import time, pathlib\npathlib.Path('ready').touch()\ntime.sleep(100000)\n")
    for loaded in ("msgspec", "_decimal", "libtorch_cpu", "libtorch_python", "ready"):
        (tmp_path / "ready").unlink(missing_ok=True)
        process = subprocess.Popen(
            [sys.executable, "-m", "lowtide", "run", "--budget", "1GiB", script],
            cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True,
            preexec_fn=hears_interrupts,  # noqa: PLW1509 - no threads between fork and exec here
        )  # fmt: skip
        until(lambda: (tmp_path / "ready").exists() or loaded in _maps(process.pid))
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode in (-signal.SIGINT, INTERRUPTED), errors
        assert errors.splitlines()[-1:] in ([], ["KeyboardInterrupt"])
        assert PACKAGE not in errors, errors


# --- figures ---------------------------------------------------------------------------------------------------------

EVALUATES = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36864, 10))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(8):
    if step == EVALUATED:
        with torch.no_grad():
            net(torch.randn(200, 1, 28, 28))
    loss = net(torch.randn(16, 1, 28, 28)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, flush=True)
"""


@pytest.mark.long("1")
@pytest.mark.parametrize("before_step", [1, 5])
def test_an_evaluation_above_the_training_peak_counts(tmp_path: Path, before_step: int) -> None:
    """For the baseline peak, for the floor, and for a refusal while little work is lost."""
    script = script_in(tmp_path, EVALUATES.replace("EVALUATED", str(before_step)))
    done = lowtide_in(tmp_path, "run", "--budget", "20MiB", "--json", "f.json", script)
    figures = _figures(tmp_path)
    assert done.returncode == (1 if before_step == 1 else 3), done.stderr
    assert "an evaluation without gradients needs" in done.stderr
    peak = max(s["peak_bytes"] for s in figures["steps"])
    assert peak > 60 << 20
    assert figures["plan"]["baseline_peak_bytes"] == figures["plan"]["bound"]["peak_bytes"] == peak
    assert not figures["held"]


EVALUATES_BEFORE_BACKWARD = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(12)])
optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
for step in range(6):
    loss = net(torch.randn(2048, 256)).square().mean()
    with torch.no_grad():
        found = net(torch.randn(8192, 256)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex(), found.item().hex(), flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize("share", [0.85, 0.65])
def test_saved_values_are_evicted_for_an_evaluation(tmp_path: Path, share: float) -> None:
    """It runs while a graph waits for its backward: values that the graph has saved, and gradients of the step before, are
    evicted.
    """
    script = script_in(tmp_path, EVALUATES_BEFORE_BACKWARD)
    plain = lowtide_in(tmp_path, "run", "--budget", "1GiB", "--json", "f.json", script)
    peak = max(s["peak_bytes"] for s in _figures(tmp_path)["steps"])
    done = lowtide_in(tmp_path, "run", "--budget", str(int(share * peak)), "--json", "f.json", script)
    figures = _figures(tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain.stdout
    assert figures["held"]
    assert max(s["peak_bytes"] for s in figures["steps"][2:]) <= int(share * peak)
    assert any(s["offloaded_bytes"] or s["recomputed_ops"] for s in figures["steps"][2:])


@pytest.mark.long
def test_existing_gradients_are_offloaded_as_soon_as_their_lever_is_used(tmp_path: Path) -> None:
    """They live until ``zero_grad``, which this script calls only after its forward and its evaluation."""
    script = script_in(tmp_path, EVALUATES_BEFORE_BACKWARD.replace("256", "512").replace("2048", "512").replace("8192", "2048"))
    done = lowtide_in(tmp_path, "run", "--budget", "36MiB", "--json", "f.json", script)
    figures = _figures(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "move-gradients" in done.stderr
    assert max(s["peak_bytes"] for s in figures["steps"][2:]) <= figures["budget_bytes"]


@pytest.mark.long
def test_an_output_of_the_former_step_does_not_raise_reported_figures(tmp_path: Path) -> None:
    """Bound, lowest plan and baseline peak are not above the baseline run's real peak, and are in this order."""
    text = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Embedding(2000, 64), nn.Linear(64, 4000))
optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
x = torch.randint(0, 2000, (1000,))
for step in range(5):
    optimizer.zero_grad()
    out = torch.log_softmax(net(x), 1)
    loss = nn.functional.nll_loss(out, x)
    loss.backward()
    optimizer.step()
"""
    script = script_in(tmp_path, text)
    assert lowtide_in(tmp_path, "run", "--budget", "1GiB", "--json", "f.json", script).returncode == 0
    plain = max(s["peak_bytes"] for s in _figures(tmp_path)["steps"])
    done = lowtide_in(tmp_path, "run", "--budget", "50%", "--json", "f.json", script)
    assert done.returncode == 1, done.stderr
    plan = _figures(tmp_path)["plan"]
    assert plan["bound"]["peak_bytes"] <= plan["lowest_peak_bytes"] <= plan["baseline_peak_bytes"] <= plain


LAYERS = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(12)])
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
for step in range(6):
    optimizer.zero_grad()
    loss = net(torch.randn(16384 * (1 + (step >= GROWS)), 256)).square().mean()
    loss.backward()
    optimizer.step()
    print(step, loss.item(), flush=True)
"""


@pytest.mark.long
def test_the_first_step_of_a_percentage_fits_into_the_machines_memory(tmp_path: Path) -> None:
    """Under `ulimit -d` the plain step does not fit. Values it saved are evicted, and the percentage is of what it would have
    taken.
    """
    text = LAYERS.replace("GROWS", "99").replace("range(12)", "range(6)").replace("16384", "40000").replace("range(6):", "range(4):")
    script = script_in(tmp_path, text)  # blocks so large that the heap gives them back to the system
    plain = _plain(tmp_path, script).stdout
    command = f"ulimit -d 650000; exec {sys.executable} -m lowtide run --budget 50% --json f.json {script}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env={**environment(), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=TIMEOUT, check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain
    assert _figures(tmp_path)["plan"]["baseline_peak_bytes"] > 400 << 20


@pytest.mark.long
def test_a_percentage_is_of_the_largest_step_seen(tmp_path: Path) -> None:
    """Later steps take twice as much: the budget is raised, and its line names the step."""
    script = script_in(tmp_path, LAYERS.replace("GROWS", "2").replace("range(6)", "range(9)"))
    done = lowtide_in(tmp_path, "run", "--budget", "50%", "--json", "f.json", script)
    found = _figures(tmp_path)
    largest = found["plan"]["baseline_peak_bytes"]
    assert largest > 700 << 20
    assert abs(found["budget_bytes"] - (largest + found["plan"]["resident_bytes"]) / 2) < 8 << 20
    assert "50% is" in done.stderr
    assert found["over"] in ([], [2])
    assert done.returncode == (0 if found["held"] else 3)


def test_a_budget_that_is_still_open_when_the_script_ends_is_silent(tmp_path: Path) -> None:
    """A notebook, or a script that never leaves the block: the interpreter takes it apart."""
    text = NET + """
import lowtide
block = lowtide.budget("1 GiB")
block.__enter__()
for i in range(2):
    step(i)
"""
    (tmp_path / "open.py").write_text(text)
    assert not _plain(tmp_path, "open.py").stderr
