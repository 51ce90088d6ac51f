"""``lowtide guard`` on real processes: recycling that changes nothing, causes, signals, workers, exit codes, output."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import textwrap
import time
import urllib.request

from command import TIMEOUT
from patience import gone, until
import psutil
import pytest
from forked import forked

from lowtide.guard.cause import Cause
from lowtide.guard.fence import cgroup
from lowtide.recording.reader import read
from lowtide.base.units import MIB

GROUP = cgroup(64 * MIB, f"lowtide-probe-{os.getpid()}")
if GROUP is not None:
    GROUP.remove()
FENCES = ["watch", *(["cgroup"] if GROUP is not None else [])]


def script(tmp_path, text, name="train.py"):
    path = tmp_path / name
    path.write_text(textwrap.dedent(text))
    return path


def started(*arguments, **options):
    """A guard with default signal handlers, whatever this process ignores."""
    return subprocess.Popen(
        [sys.executable, "-m", "lowtide", "guard", *map(str, arguments)], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: [signal.signal(n, signal.SIG_DFL) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)], **options,
    )


def guard(tmp_path, *arguments, timeout=TIMEOUT, **options):
    """Run a guard to its end: exit code, output, and figures."""
    process = started("--json", tmp_path / "guard.json", *arguments, **options)
    out, err = process.communicate(timeout=timeout)
    figures = json.loads((tmp_path / "guard.json").read_text()) if (tmp_path / "guard.json").exists() else None
    return process.returncode, out, err, figures


NUMPY = """
    import sys, time
    import numpy as np
    import lowtide

    folder, leak, total, pause = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    weights, random, kept = np.zeros(1000), np.random.default_rng(7), []
    state = {"weights": weights, "random": random, "log": (log := [])}
    at = lowtide.checkpoint.resume(folder, state)
    open(folder + ".begun", "w").close()
    for step in range(at.get("step", 0), total):
        weights += random.standard_normal(1000) * np.random.rand()
        log.append(float(weights[0]))
        kept.append(np.ones(leak * 128))
        time.sleep(pause)
        lowtide.checkpoint(folder, state, step=step + 1, epoch_end=step % 50 == 49, fraction=(step + 1) / total)
    print(weights.tobytes().hex()[:64], sum(log))
"""


# --- recycling changes nothing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["epoch", "every=70"])
def test_a_recycled_numpy_run_equals_an_uninterrupted_one(tmp_path, rule):
    path = script(tmp_path, "import numpy as np\nnp.random.seed(3)\n" + textwrap.dedent(NUMPY))
    plain = subprocess.run([sys.executable, path, tmp_path / "a", "1", "200", "0"], capture_output=True, text=True, check=True)
    code, out, err, figures = guard(tmp_path, "--recycle", rule, path, tmp_path / "b", "1", "200", "0")
    assert code == 0, err
    assert out == plain.stdout
    assert [g["reason"] for g in figures["generations"]] == ["recycled"] * (3 if rule == "epoch" else 2) + ["finished"]
    assert sum(g["safe_points"] for g in figures["generations"]) == 200


@pytest.mark.long("cgroup", "rlimit")
@pytest.mark.parametrize("fence", [*FENCES, "rlimit"])
def test_a_leaking_run_stays_under_the_cap_and_loses_nothing(tmp_path, fence):
    """It is recycled and prints what the uninterrupted script prints."""
    path = script(tmp_path, "import numpy as np\nnp.random.seed(3)\n" + textwrap.dedent(NUMPY))
    plain = subprocess.run([sys.executable, path, tmp_path / "a", "1", "400", "0"], capture_output=True, text=True, check=True)
    code, out, err, figures = guard(
        tmp_path, "--memory", "160MiB", "--enforce", fence, path, tmp_path / "b", "400", "400", "0.02"  # 400 KiB a step
    )
    assert code == 0, err
    assert out == plain.stdout
    assert figures["enforced_by"] == fence
    assert len(figures["generations"]) >= 2
    assert all(g["peak_bytes"] <= 160 * MIB for g in figures["generations"])
    assert {g["reason"] for g in figures["generations"]} == {"recycled", "finished"}
    assert sum(g["safe_points"] for g in figures["generations"]) == 400
    assert all(0 < g["start_seconds"] < g["seconds"] for g in figures["generations"])
    assert all(g["load_seconds"] > 0 for g in figures["generations"][1:])
    assert 0 < figures["overhead_seconds"] < figures["seconds"]


def test_a_script_that_runs_one_epoch_per_process_needs_no_change(tmp_path):
    """`--recycle exit` starts it again until the file of `--done` exists."""
    path = script(tmp_path, """
        from pathlib import Path
        count = Path("count")
        done = int(count.read_text()) + 1 if count.exists() else 1
        count.write_text(str(done))
        print("epoch", done)
        if done == 4:
            Path("done").touch()
    """)
    code, out, _, figures = guard(tmp_path, "--recycle", "exit", "--done", "done", path, cwd=tmp_path)
    assert code == 0
    assert out.split("\n")[:4] == ["epoch 1", "epoch 2", "epoch 3", "epoch 4"]
    assert len(figures["generations"]) == 4


def test_a_script_may_report_completion_by_its_exit_code(tmp_path):
    path = script(tmp_path, """
        import sys
        from pathlib import Path
        count = Path("count")
        done = int(count.read_text()) + 1 if count.exists() else 1
        count.write_text(str(done))
        sys.exit(9 if done == 3 else 0)
    """)
    code, _, _, figures = guard(tmp_path, "--recycle", "exit", "--done-code", "9", path, cwd=tmp_path)
    assert (code, len(figures["generations"])) == (0, 3)


def test_a_failing_process_is_not_restarted_by_recycle_exit(tmp_path):
    path = script(tmp_path, "raise ValueError('a bug')")
    code, _, err, figures = guard(tmp_path, "--recycle", "exit", "--done", tmp_path / "done", path)
    assert (code, len(figures["generations"])) == (1, 1)
    assert "a bug" in err


# --- causes ---------------------------------------------------------------------------------------------------------------

HOG = """
    import time
    kept = []
    while True:
        kept.append(b"x" * (8 << 20))
        time.sleep(0.01)
"""


@pytest.mark.parametrize("fence", FENCES)
def test_a_process_that_cannot_start_below_the_cap_is_given_up(tmp_path, fence):
    """The reason is "over the cap", the retry waits, and the message says to raise the cap."""
    code, _, err, figures = guard(
        tmp_path, "--memory", "120MiB", "--enforce", fence, "--restarts", "1", script(tmp_path, HOG)
    )
    assert code == 1
    assert [g["reason"] for g in figures["generations"]] == ["over the cap"] * 2
    assert figures["generations"][1]["waited_seconds"] >= 1
    assert "without a new checkpoint: it needs more than the cap to start: raise --memory" in err


def test_a_limit_on_data_ends_in_a_memory_error(tmp_path):
    code, _, _, figures = guard(
        tmp_path, "--memory", "200MiB", "--enforce", "rlimit", "--restarts", "0", script(tmp_path, HOG)
    )
    assert code == 1
    assert figures["generations"][0]["reason"] == "out-of-memory error"
    assert "MemoryError" in figures["generations"][0]["error"]


@pytest.mark.skipif(GROUP is None, reason="this machine allows no cgroup")
def test_a_worker_killed_by_the_oom_killer_is_the_reason(tmp_path):
    """The main process fails with an error of its own; the cgroup's counter shows why."""
    path = script(tmp_path, """
        import subprocess, sys
        sys.exit(subprocess.run([sys.executable, "-c", "kept = [b'x' * (8 << 20) for _ in range(100)]"]).returncode and 1)
    """)
    code, _, _, figures = guard(tmp_path, "--memory", "150MiB", "--restarts", "0", path)
    assert code == 1
    assert figures["generations"][0]["reason"] == "over the cap"


def test_a_kill_from_outside_is_not_taken_for_memory(tmp_path):
    path = script(tmp_path, "import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(100000)")
    process = started("--json", tmp_path / "guard.json", path, cwd=tmp_path)
    until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    process.communicate(timeout=TIMEOUT)
    assert process.returncode == 137
    assert json.loads((tmp_path / "guard.json").read_text())["generations"][0]["reason"] == "killed from outside"


@pytest.mark.parametrize(("text", "code", "reason"), [
    ("raise ValueError('a bug')", 1, "error"), ("import sys; sys.exit(7)", 7, "error"),
    ("import os; os.abort()", 134, "crash"), ("import ctypes; ctypes.string_at(0)", 139, "crash"),
])
def test_failures_that_are_not_about_memory_are_not_restarted(tmp_path, text, code, reason):
    found, _, _, figures = guard(tmp_path, "--memory", "1GiB", script(tmp_path, text))
    assert (found, len(figures["generations"]), figures["generations"][0]["reason"]) == (code, 1, reason)


@pytest.mark.parametrize("code", ["raise MemoryError('probe')", "import torch; raise torch.OutOfMemoryError('probe')"])
def test_a_childs_memory_error_that_the_script_survived_is_no_reason(tmp_path, code):
    """A probe that is meant to fail: the script's own bug ended it, and would again."""
    path = script(tmp_path, f"""
        import subprocess, sys
        subprocess.run([sys.executable, "-c", {code!r}], capture_output=True)
        raise ValueError("a bug")
    """)
    found, _, _, figures = guard(tmp_path, "--memory", "1GiB", path)
    assert found == 1
    assert [g["reason"] for g in figures["generations"]] == ["error"]
    assert "a bug" in figures["generations"][0]["error"]


def test_a_process_near_the_cap_at_its_first_safe_point_is_given_up(tmp_path):
    """It would have to be recycled at its first safe point again and again."""
    path = script(tmp_path, """
        import os, sys, time, lowtide
        from lowtide.checkpoint.request import requests
        state = {"log": []}
        at = lowtide.checkpoint.resume(sys.argv[1], state)
        whole = bytearray(85 << 20)
        whole[::4096] = b"x" * len(whole[::4096])
        for step in range(at.get("step", 0), 1000):
            while not (requests()._asked or os.path.exists(requests()._stop)):  # its first step lasts until it is asked to stop
                time.sleep(0.05)
            lowtide.checkpoint(sys.argv[1], state, step=step + 1)
    """)
    code, _, err, figures = guard(tmp_path, "--memory", "130MiB", "--recycle", "watermark=70%", "--enforce", "watch", "--restarts", "1", path, tmp_path / "c")
    assert code == 1
    assert len(figures["generations"]) == 2
    assert "near the cap at its first safe point: raise --memory" in err


# --- signals and descendants ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_requested_by_a_person_saves_first(tmp_path, number):
    """The next run goes on from there."""
    path = script(tmp_path, NUMPY)
    process = started("--json", tmp_path / "guard.json", path, tmp_path / "c", "1", "100000", "0.01")
    until((tmp_path / "c.begun").exists)
    process.send_signal(number)
    _, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 75, err
    figures = json.loads((tmp_path / "guard.json").read_text())
    assert figures["generations"][0]["reason"] == "stopped"
    assert figures["generations"][0]["saves"] == 1
    code, _, err, again = guard(tmp_path, "--recycle", "every=5", path, tmp_path / "c", "1", str(figures["generations"][0]["safe_points"] + 7), "0")
    assert code == 0, err
    assert sum(g["safe_points"] for g in again["generations"]) == 7


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_script_without_checkpoints_gets_the_signal_itself(tmp_path, number, code):
    path = script(tmp_path, "import time\nopen('ready', 'w').close()\ntime.sleep(100000)")
    process = started(path, cwd=tmp_path)
    until(lambda: (tmp_path / "ready").exists())
    process.send_signal(number)
    process.communicate(timeout=TIMEOUT)
    assert process.returncode == code


@pytest.mark.long
def test_a_process_that_does_not_stop_is_killed_after_the_patience(tmp_path):
    path = script(tmp_path, """
        import signal, time
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        open("ready", "w").close()
        time.sleep(100000)
    """)
    process = started("--patience", "1", "--json", tmp_path / "guard.json", path, cwd=tmp_path)
    until(lambda: (tmp_path / "ready").exists())
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=TIMEOUT)
    assert process.returncode == 143
    assert time.monotonic() - began > 1
    ended = json.loads((tmp_path / "guard.json").read_text())["generations"]
    assert [g["reason"] for g in ended] == [Cause.PATIENCE.value]


TREE = """
    import os, subprocess, sys, time
    depth = int(sys.argv[1])
    with open("pids", "a") as file:
        file.write(f"{os.getpid()}\\n")
    if depth:
        for _ in range(2):
            subprocess.Popen([sys.executable, __file__, str(depth - 1)], start_new_session=depth % 2 == 0)
    if depth == 3:
        while len(open("pids").read().split()) < 15:
            time.sleep(0.05)
        open("ready", "w").close()
        time.sleep(float(sys.argv[2]))
    else:
        time.sleep(100000)
"""


@pytest.mark.parametrize("ending", ["itself", "SIGTERM", "SIGKILL of the main process"])
def test_no_descendant_is_left_whatever_ends_the_run(tmp_path, ending):
    """Fifteen processes in several sessions, most of them orphans by then."""
    process = started(script(tmp_path, TREE), "3", "0.5" if ending == "itself" else "60", cwd=tmp_path)
    until(lambda: (tmp_path / "ready").exists())
    pids = [int(p) for p in (tmp_path / "pids").read_text().split()]
    if ending == "SIGTERM":
        process.send_signal(signal.SIGTERM)
    elif ending != "itself":
        os.kill(pids[0], signal.SIGKILL)
    process.communicate(timeout=TIMEOUT)
    assert len(pids) == 15
    assert not [p for p in pids if psutil.pid_exists(p)]


def test_orphans_are_reaped_while_the_guard_runs(tmp_path):
    """A child that abandons its own children leaves them to the guard."""
    path = script(tmp_path, """
        import subprocess, sys, time
        for _ in range(10):
            subprocess.run([sys.executable, "-c", "import subprocess, sys; subprocess.Popen(['sleep', '0.1'])"])
        open("ready", "w").close()
        time.sleep(100000)
    """)
    process = started(path, cwd=tmp_path)
    until(lambda: (tmp_path / "ready").exists())

    def script_alone() -> bool:
        """Whether the ten that were given up have ended, and were reaped."""
        found = []
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.status() == psutil.STATUS_ZOMBIE or "lowtide-warden" not in child.cmdline():
                    found.append(child.status())
        return len(found) == 1 and found[0] != psutil.STATUS_ZOMBIE

    until(script_alone)
    process.terminate()
    process.communicate(timeout=TIMEOUT)


@pytest.mark.parametrize("shell", [False, True])
def test_when_the_guard_is_killed_the_run_saves_and_stops(tmp_path, shell):
    """Also behind a shell, which does not forward signals. No other process of the guard's is left."""
    path = script(tmp_path, NUMPY)
    words = [sys.executable, path, tmp_path / "c", "1", "100000", "0.01"]
    process = started("--", *(["bash", "-c", f"{shlex.join(map(str, words))}; true"] if shell else words))
    until((tmp_path / "c.begun").exists)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) == 2 + shell
    process.kill()
    until(lambda: all(gone(c.pid) for c in children))
    assert list((tmp_path / "c").glob("0*"))


def test_when_the_guard_is_killed_a_deaf_process_is_killed_too(tmp_path):
    """A process that ignores SIGTERM is killed, after the patience."""
    path = script(tmp_path, """
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open("ready", "w").close()
        time.sleep(100000)
    """)
    process = started("--patience", "2", "--", "bash", "-c", f"{sys.executable} {path}; true", cwd=tmp_path)
    until(lambda: (tmp_path / "ready").exists())
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    until(lambda: all(gone(c.pid) for c in children))


def test_a_run_behind_a_pipe_is_recycled_though_the_pipe_exits_with_zero(tmp_path):
    path = script(tmp_path, NUMPY)
    code, out, err, figures = guard(
        tmp_path, "--recycle", "every=30", "--", "bash", "-c", f"{sys.executable} {path} {tmp_path / 'c'} 1 100 0 | cat"
    )
    assert code == 0, err
    assert [g["reason"] for g in figures["generations"]] == ["recycled"] * 3 + ["finished"]
    assert len(out.split()) == 2


def test_a_stopped_run_behind_a_pipe_that_saved_exits_with_75(tmp_path):
    path = script(tmp_path, NUMPY)
    process = started("--", "bash", "-c", f"{sys.executable} {path} {tmp_path / 'c'} 1 100000 0.01 | cat")
    until((tmp_path / "c.begun").exists)
    process.terminate()
    process.communicate(timeout=TIMEOUT)
    assert process.returncode == 75


def test_a_run_goes_on_when_nothing_reads_the_guards_output(tmp_path):
    path = script(tmp_path, NUMPY)
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "lowtide", "guard", "--recycle", "every=30", path, tmp_path / "c", "1", "100", "0"], stdout=subprocess.PIPE,
        stderr=writing, text=True,
    )
    os.close(writing)
    os.close(reading)
    out, _ = process.communicate(timeout=TIMEOUT)
    assert len(out.split()) == 2


def test_a_guard_under_nohup_ignores_sighup(tmp_path):
    path = script(tmp_path, "import os, time\nopen('ready', 'w').close()\nwhile not os.path.exists('sent'): time.sleep(0.05)\nprint('done')")
    process = subprocess.Popen(
        [sys.executable, "-m", "lowtide", "guard", "--quiet", path], stdout=subprocess.PIPE, text=True, cwd=tmp_path,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    until(lambda: (tmp_path / "ready").exists())
    process.send_signal(signal.SIGHUP)
    (tmp_path / "sent").touch()
    out, _ = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, out) == (0, "done\n")


def test_exit_code_75_without_a_save_is_the_programs_own(tmp_path):
    code, _, _, figures = guard(tmp_path, script(tmp_path, "raise SystemExit(75)"))
    assert (code, [g["reason"] for g in figures["generations"]]) == (75, ["error"])


def test_memory_shared_by_forks_is_counted_once(tmp_path):
    """200 MiB, and children that are forked again and again while the guard reads memory only now and then."""
    path = script(tmp_path, """
        import os, sys, time
        import numpy as np
        import lowtide
        whole = np.ones(25 << 20)
        state = {"log": []}
        lowtide.checkpoint.resume(sys.argv[1], state)
        for step in range(60):
            children = [os.fork() for _ in range(4)]
            if 0 in children:
                time.sleep(0.2)
                os._exit(0)
            time.sleep(0.05)
            lowtide.checkpoint(sys.argv[1], state, step=step)
            while len(children) and step % 4 == 3:
                os.waitpid(-1, 0)
                children.pop()
    """)
    code, _, err, figures = guard(tmp_path, "--memory", "420MiB", "--enforce", "watch", path, tmp_path / "c")
    assert code == 0, err
    assert len(figures["generations"]) == 1
    assert figures["generations"][0]["peak_bytes"] < 400 * MIB


def test_a_late_stop_request_does_not_kill_a_finished_script(tmp_path):
    """The script is already in its exit handlers, which run to their end."""
    path = script(tmp_path, """
        import atexit, os, sys, time
        def slowly():
            open("ending", "w").close()
            while not os.path.exists("asked"):
                time.sleep(0.02)
            open("ended", "w").close()
        atexit.register(slowly)     # runs last
        import lowtide
        state = {"log": []}
        lowtide.checkpoint.resume(sys.argv[1], state)
        lowtide.checkpoint(sys.argv[1], state)
    """)
    process = started("--json", tmp_path / "guard.json", path, tmp_path / "c", cwd=tmp_path)
    until(lambda: (tmp_path / "ending").exists())
    process.send_signal(signal.SIGTERM)
    assert any("saves and stops at its" in line or "SIGTERM" in line for line in iter(process.stderr.readline, ""))
    (tmp_path / "asked").touch()
    process.communicate(timeout=TIMEOUT)
    (found,) = json.loads((tmp_path / "guard.json").read_text())["generations"]
    assert (found["exit"], found["reason"]) == (0, "finished")
    assert (tmp_path / "ended").exists()


def test_a_stop_is_obeyed_although_the_script_exits_with_zero(tmp_path):
    """It is not started again."""
    path = script(tmp_path, "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\nopen('ready', 'w').close()\ntime.sleep(30)")
    process = started("--recycle", "exit", "--done", "done", "--json", tmp_path / "guard.json", path, cwd=tmp_path)
    until(lambda: (tmp_path / "ready").exists())
    process.terminate()
    process.communicate(timeout=TIMEOUT)
    assert process.returncode == 143
    assert len(json.loads((tmp_path / "guard.json").read_text())["generations"]) == 1


def test_a_run_that_was_already_done_is_not_started(tmp_path):
    (tmp_path / "done").touch()
    process = started("--recycle", "exit", "--done", "done", script(tmp_path, "open('ran', 'w')"), cwd=tmp_path)
    _, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0
    assert "already done: " in err
    assert not (tmp_path / "ran").exists()


def test_a_third_signal_kills_a_process_that_ignores_two(tmp_path):
    path = script(
        tmp_path, "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nopen('ready', 'w').close()\ntime.sleep(100000)"
    )
    process = started(path, cwd=tmp_path)
    until(lambda: (tmp_path / "ready").exists())
    for said in ("SIGTERM forwarded", "SIGTERM again", "SIGTERM a third time: killed"):
        process.terminate()
        assert any(said in line for line in iter(process.stderr.readline, ""))
    process.communicate(timeout=TIMEOUT)
    assert process.returncode == 143


# --- output ---------------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_same_figures_are_recorded_served_and_written(tmp_path):
    """The recording, Prometheus, TensorBoard, the JSON file and the report's page."""
    path = script(tmp_path, NUMPY)
    port = 20000 + os.getpid() % 20000
    process = started(
        "--memory", "600MiB", "-o", tmp_path / "run.lowtide", "--prometheus", port, "--tensorboard", tmp_path / "events", "--json",
        tmp_path / "guard.json", path, tmp_path / "c", "100", "500", "0.01",
    )
    served = ""

    def answers():
        nonlocal served
        with contextlib.suppress(OSError):
            served = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
        held = re.search(r"^lowtide_memory_bytes (\S+)$", served, re.MULTILINE)
        return held is not None and float(held[1]) > 15 * MIB

    until(answers)
    process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0
    told = {m[1]: float(m[2]) for m in re.finditer(r"^(lowtide_\w+) (\S+)$", served, re.MULTILINE)}
    assert told["lowtide_cap_bytes"] == 600 * MIB
    assert 15 * MIB < told["lowtide_memory_bytes"] < 600 * MIB
    assert told["lowtide_generation"] == 0
    assert list((tmp_path / "events").glob("events.*"))
    recording = read(tmp_path / "run.lowtide")
    peak = json.loads((tmp_path / "guard.json").read_text())["generations"][0]["peak_bytes"]
    assert len(recording.process) >= 4
    assert max(r.highest_bytes for r in recording.process) == peak
    page = tmp_path / "run.html"
    shown = subprocess.run(
        [sys.executable, "-m", "lowtide", "report", tmp_path / "run.lowtide", "--html", page], capture_output=True, text=True, check=True
    )
    assert "MiB" in shown.stderr + shown.stdout
    assert "finished" in page.read_text()
    assert f'"cap":{600 * MIB}' in page.read_text()


@pytest.mark.parametrize("arguments", [
    ["--recycle", "sometimes"], ["--memory", "much"], ["--recycle", "exit"], ["--done", "x"], ["--", "no-such-command"], ["missing.py"],
    ["--json", "/no/such/folder/x.json"], ["-o", "/no/such/folder/x.lowtide"], ["--json", "/tmp"], ["-o", "/tmp"],
])
def test_bad_usage_is_one_line_before_anything_runs(tmp_path, arguments):
    path = script(tmp_path, "open('ran', 'w')")
    last = [] if arguments[-1] in {"no-such-command", "missing.py"} else [str(path)]
    done = forked("guard", *arguments, *last, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("lowtide: error: ")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "ran").exists()


def test_a_file_that_cannot_be_run_is_bad_usage(tmp_path):
    path = tmp_path / "tool"
    path.write_text("no first line\n")
    path.chmod(0o755)
    process = started("--", path)
    _, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 2
    assert "cannot start" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(("text", "told"), [
    ("raise ValueError('bad [/foo] x')", "bad [/foo] x"), ("raise ValueError('sur \\udcff')", "sur \ufffd"),
])
def test_any_error_message_is_shown_unchanged(tmp_path, text, told):
    """Also one that looks like markup, or is not valid text."""
    code, _, err, figures = guard(tmp_path, script(tmp_path, text))
    assert code == 1
    assert figures["generations"][0]["error"] == f"ValueError: {told}"
    assert f"error: ValueError: {told}" in " ".join(err.split())


def test_a_port_in_use_is_bad_usage(tmp_path):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = started("--prometheus", taken.getsockname()[1], script(tmp_path, "pass"))
        _, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 2
    assert "give another port" in err


def test_the_summary_says_what_enforced_the_cap(tmp_path):
    process = started("--memory", "500MiB", "--enforce", "watch", script(tmp_path, "print('hello')"))
    out, err = process.communicate(timeout=TIMEOUT)
    assert out == "hello\n"
    assert "enforced by watching" in err
    assert "finished" in err


def test_a_script_by_its_name_runs_like_a_command(tmp_path):
    path = script(tmp_path, "import sys; print(sys.argv[1:])")
    for command in ([path, "--memory", "3"], ["--", sys.executable, path, "--memory", "3"]):
        process = started("--quiet", *command)
        out, err = process.communicate(timeout=TIMEOUT)
        assert (out, err) == ("['--memory', '3']\n", "")




def test_the_scripts_lines_appear_once_above_the_panel(tmp_path):
    """In a terminal every line that the script prints appears whole and exactly once, although the panel is drawn again and
    again.
    """
    path = script(tmp_path, """
        import sys, time
        for i in range(20):
            print(f"line {i} [not markup]")
            time.sleep(0.05)
        print("bad news", file=sys.stderr)
    """)
    parent, child = pty.openpty()
    with (tmp_path / "kept").open("w") as kept:
        for out in (child, kept):
            process = subprocess.Popen([sys.executable, "-m", "lowtide", "guard", path], stdin=child, stdout=out, stderr=child, close_fds=True)
            shown = b""
            while process.poll() is None or select.select([parent], [], [], 0.2)[0]:
                if select.select([parent], [], [], 0.2)[0]:
                    shown += os.read(parent, 65536)
            told = shown if out is child else (tmp_path / "kept").read_bytes()
            assert process.returncode == 0
            assert [told.count(b"line %d [not markup]" % i) for i in range(20)] == [1] * 20
            assert b"bad news" in shown
            assert b"generation" in shown
    os.close(parent)
    os.close(child)
