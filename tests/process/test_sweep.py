"""``lowtide sweep``: every cell once, whatever happens; figures, trends and recommendations that follow from the numbers."""

from __future__ import annotations

import contextlib
import time
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import textwrap

from command import TIMEOUT
from patience import gone, until
import pytest
from forked import forked



def sweep(*arguments, cwd, timeout=TIMEOUT, env=None):
    return subprocess.run(
        [sys.executable, "-m", "lowtide", "sweep", *map(str, arguments)], capture_output=True, text=True, timeout=timeout, cwd=cwd,
        env={**{k: v for k, v in os.environ.items() if k != "VIRTUAL_ENV"}, **(env or {})}, check=False,
    )


def write(folder, toml, script=""):
    (folder / "s.toml").write_text(textwrap.dedent(toml))
    (folder / "job.py").write_text(textwrap.dedent(script))


GROWING = """
    import os, sys, time, lowtide
    kept, size = [], int(os.environ.get("GROWTH", "0"))
    for _ in range(200):
        kept.append(b"x" * size)
        time.sleep(0.001)
        lowtide.step()
"""
PACED = """
    import os, time, lowtide
    kept, size, pause = [], int(os.environ["GROWTH"]), int(float(os.environ["PAUSE"]) * 1e9)
    now = time.perf_counter_ns()
    time.perf_counter_ns = lambda: now     # a clock that does not depend on what else the machine does
    for _ in range(200):
        kept.append(b"x" * size)
        now += pause
        lowtide.step()
"""


@pytest.mark.long
def test_trends_and_recommendation_are_those_of_the_planted_effects(tmp_path):
    """Two axes with known effects: bytes kept per step, and time per step."""
    write(tmp_path, """
        command = "python job.py"
        steps = 100
        repeats = 2
        samples_per_step = 10
        [axes]
        growth = {env = "GROWTH", values = [262144, 65536]}
        pause = {env = "PAUSE", values = [0.008, 0.002]}
    """, PACED)
    done = sweep("s.toml", "--json", "s.json", "--csv", "s.csv", "--html", "s.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "s.json").read_text())
    assert len(found["cells"]) == 8
    for cell in found["cells"]:
        assert cell["ended"] == "ok"
        assert cell["growth_bytes"] == pytest.approx(cell["config"]["growth"], rel=0.25)
        assert cell["samples_per_second"] == pytest.approx(10 / cell["config"]["pause"])
    growth = next(t for t in found["trends"] if t["axes"] == ["growth"] and t["response"] == "growth_bytes")
    assert growth["change"] == pytest.approx(65536 - 262144, rel=0.1)
    assert growth["low"] <= growth["change"] <= growth["high"] < 0
    assert growth["text"].startswith("growth=65536 lowers growth per step by ")
    rate = next(t for t in found["trends"] if t["axes"] == ["pause"] and t["response"] == "samples_per_second")
    assert rate["low"] > 0
    assert found["recommended"] == {"growth": 65536, "pause": 0.002}
    assert "export GROWTH=65536" in found["paste"]
    assert done.stdout.splitlines()[0].startswith("| growth | pause | min (KB) | Q1 (KB) | median (KB)")
    assert len(done.stdout.splitlines()) == 2 + 4
    assert len((tmp_path / "s.csv").read_text().splitlines()) == 1 + 8
    assert "Growth against rate" in (tmp_path / "s.html").read_text()
    again = sweep("s.toml", cwd=tmp_path, timeout=TIMEOUT)
    assert again.stdout == done.stdout


@pytest.mark.long
def test_a_recommendation_that_fails_on_the_second_command_is_withdrawn(tmp_path):
    write(tmp_path, """
        command = "python job.py"
        confirm = "python larger.py"
        steps = 60
        [axes]
        growth = {env = "GROWTH", values = [65536, 8192]}
    """, GROWING)
    (tmp_path / "larger.py").write_text(textwrap.dedent(GROWING).replace('"GROWTH", "0"))', '"GROWTH", "0")) % 65536 * 9'))
    assert sweep("s.toml", "--json", "s.json", cwd=tmp_path).returncode == 0
    found = json.loads((tmp_path / "s.json").read_text())
    assert found["recommended"] is None
    assert "was best, but on the second command it grows more" in found["reason"]


@pytest.mark.long
def test_cells_that_crash_or_are_killed_are_recorded_as_results(tmp_path):
    write(tmp_path, """
        command = "python job.py"
        steps = 20
        [axes]
        fate = {argument = "", values = ["well", "crashes", "killed", "silent"]}
    """, """
        import os, signal, sys, time, lowtide
        for step in range(30):
            if sys.argv[1] != "silent":
                lowtide.step()
            if step == 10 and sys.argv[1] == "crashes":
                raise SystemExit(3)
            if step == 10 and sys.argv[1] == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
    """)
    done = sweep("s.toml", "--json", "s.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "s.json").read_text())
    ended = {cell["config"]["fate"]: cell["ended"] for cell in found["cells"]}
    assert ended == {"well": "ok", "crashes": "exit code 3", "killed": "killed by SIGKILL", "silent": "no steps seen"}
    assert found["recommended"] == {"fate": "well"}


@pytest.mark.long
def test_a_cell_that_hangs_is_recorded_as_a_timeout(tmp_path):
    write(tmp_path, """
        command = "python job.py"
        steps = 20
        timeout_seconds = 4
        [axes]
        fate = {argument = "", values = ["hangs"]}
    """, "import time, lowtide\nlowtide.step()\ntime.sleep(100000)\n")
    done = sweep("s.toml", "--json", "s.json", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    found = json.loads((tmp_path / "s.json").read_text())
    assert [cell["ended"] for cell in found["cells"]] == ["timeout"]
    assert found["recommended"] is None


def test_files_are_written_although_standard_output_is_full(tmp_path):
    write(tmp_path, """
        command = "python job.py"
        steps = 20
        [axes]
        arenas = ["default"]
    """, "import lowtide\nfor _ in range(25):\n    lowtide.step()\n")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "lowtide", "sweep", "s.toml", "--csv", "/dev/full", "--json", "s.json", "--html", "s.html"],
            cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "lowtide: error: /dev/full: No space left on device"
    assert "Traceback" not in done.stderr
    assert json.loads((tmp_path / "s.json").read_text())["complete"]
    assert (tmp_path / "s.html").exists()


def test_a_cell_is_limited_to_its_memory(tmp_path):
    write(tmp_path, """
        command = "python job.py"
        memory = "1GiB"
        steps = 20
        [axes]
        arenas = ["default"]
    """, "import lowtide\nx = bytearray(2 << 30)\nlowtide.step()\n")
    done = sweep("s.toml", "--json", "s.json", cwd=tmp_path)
    assert done.returncode == 1, "no configuration ran well"
    assert "exit code 1: MemoryError" in done.stderr, "what the cell printed last is told"
    cell = json.loads((tmp_path / "s.json").read_text())["cells"][0]
    assert cell["ended"] == "exit code 1"
    assert cell["tail"].rstrip().endswith("MemoryError")


@pytest.mark.long("False")
@pytest.mark.parametrize("active", [True, False])
def test_python_means_the_active_environments_or_else_lowtides_own(tmp_path, active):
    folder = tmp_path / "env" / "bin"
    folder.mkdir(parents=True)
    (folder / "python").write_text(f'#!/bin/sh\nOTHER=1 exec {sys.executable} "$@"\n')
    (folder / "python").chmod(0o755)
    write(tmp_path, """
        command = "python job.py"
        steps = 5
        [axes]
        arenas = ["default"]
    """, "import os, lowtide\nopen('other', 'w').write(os.environ.get('OTHER', ''))\nfor _ in range(9): lowtide.step()\n")
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "VIRTUAL_ENV": str(tmp_path / "env") if active else sys.prefix}
    assert sweep("s.toml", cwd=tmp_path, env=env).returncode == 0
    assert (tmp_path / "other").read_text() == ("1" if active else "")


def test_settings_are_applied_before_the_script_imports_anything(tmp_path):
    write(tmp_path, """
        command = ["python", "job.py", "--fixed"]
        framework = "torch"
        steps = 3
        environment = {COMMON = "yes"}
        [axes]
        threads = [1]
        onednn = ["off"]
        arenas = [2]
        size = {argument = "--size", values = [7]}
        import_time = {option = "importtime", values = ["on"]}
    """, """
        import os, sys, torch, lowtide
        said = [sys.argv[1:], os.environ["OMP_NUM_THREADS"], os.environ["MALLOC_ARENA_MAX"], os.environ["COMMON"],
                torch.get_num_threads(), torch.backends.mkldnn.enabled, sys._xoptions]
        open("said", "w").write(repr(said))
        for _ in range(4):
            lowtide.step()
    """)
    done = sweep("s.toml", "--json", "s.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "said").read_text() == repr(
        [["--fixed", "--size", "7"], "1", "2", "yes", 1, False, {"importtime": True}]
    )
    paste = json.loads((tmp_path / "s.json").read_text())["paste"]
    assert "torch.backends.mkldnn.set_flags(False)" in paste


def killed_again_and_again(folder, *, kills, seed, cells):
    """Kill a sweep of `cells` cells at random moments, up to `kills` times, then let it end; returns the number of kills."""
    write(folder, f"""
        command = "python job.py"
        steps = 0x7fffffff
        [axes]
        number = {{argument = "", values = {list(range(cells))}}}
    """, """
        import sys, time, lowtide
        for _ in range(20):
            time.sleep(0.01)
            lowtide.step()
        with open("log", "a") as log:
            log.write(sys.argv[1] + "\\n")
    """)
    r = random.Random(seed)
    done = 0
    while done < kills:
        process = subprocess.Popen([sys.executable, "-m", "lowtide", "sweep", "s.toml", "--quiet"], cwd=folder)
        seen, changes, most = set(), 0, r.randint(0, 6)
        while process.poll() is None and changes < most:  # some while it begins, others while cells run and end
            now = _state_of(folder)
            changes, seen = changes + (now not in seen), seen | {now}
            time.sleep(0.005)
        time.sleep(r.uniform(0, 0.3))
        if process.poll() is not None:
            assert process.returncode == 0
            break
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        done += 1
    assert sweep("s.toml", "--quiet", "--json", "s.json", cwd=folder).returncode == 0
    return done


def _state_of(folder):
    """The files that a sweep has written so far, with their sizes."""
    found = []
    for path in (*folder.glob("s.results*"), *folder.glob("s.results.cells/*"), folder / "log"):
        with contextlib.suppress(OSError):
            found.append((path.name, path.stat().st_size))
    return tuple(sorted(found))


def check_once(folder, cells):
    found = json.loads((folder / "s.json").read_text())
    assert found["complete"]
    assert sorted(c["config"]["number"] for c in found["cells"]) == list(range(cells))
    assert all(c["ended"] == "ok" and c["steps"] == 20 for c in found["cells"])
    assert sorted(int(line) for line in (folder / "log").read_text().split()) == list(range(cells))
    rows = sqlite3.connect(folder / "s.results").execute("SELECT count(*), count(result) FROM cells").fetchone()
    assert rows == (cells, cells)
    assert not (folder / "s.results.cells").exists()


@pytest.mark.long
def test_a_killed_sweep_resumes_and_no_cell_is_lost_or_run_twice(tmp_path):
    assert killed_again_and_again(tmp_path, kills=8, seed=1, cells=10) >= 4
    check_once(tmp_path, 10)


def test_ctrl_c_ends_the_cell_and_keeps_the_results(tmp_path):
    write(tmp_path, """
        command = "python job.py"
        steps = 20
        [axes]
        number = {argument = "", values = [0, 1, 2]}
    """, """
        import os, pathlib, sys, time, lowtide
        for step in range(21 if pathlib.Path("first").exists() is False else 1000000):
            lowtide.step()
            time.sleep(0.01 if not pathlib.Path("second").exists() else 100000)
            if step == 15:
                pathlib.Path("second" if pathlib.Path("first").exists() else "first").write_text(str(os.getpid()))
    """)
    process = subprocess.Popen(
        [sys.executable, "-m", "lowtide", "sweep", "s.toml", "--quiet"], cwd=tmp_path, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # these tests may themselves run in the background
    )
    until(lambda: (tmp_path / "second").exists() and (tmp_path / "second").read_text())
    process.send_signal(signal.SIGINT)
    assert process.wait(TIMEOUT) == 130
    until(lambda: gone(int((tmp_path / "second").read_text())))
    rows = sqlite3.connect(tmp_path / "s.results").execute("SELECT count(result) FROM cells").fetchone()
    assert rows == (1,)


@pytest.mark.long
def test_dask_runs_the_cells_of_a_lost_worker_again(tmp_path):
    """A cluster of two workers on this machine, one of which dies midway."""
    pytest.importorskip("distributed")
    write(tmp_path, """
        command = "python job.py"
        steps = 20
        [axes]
        number = {argument = "", values = [0, 1, 2, 3, 4, 5]}
    """, """
        import os, pathlib, signal, sys, time, lowtide
        def ancestors(pid):
            while pid > 1:
                pid = int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
                yield pid
        for step in range(25):
            time.sleep(0.02)
            lowtide.step()
            if sys.argv[1] == "3" and step == 5 and not pathlib.Path("killed").exists():
                pathlib.Path("killed").touch()
                os.kill(os.getppid(), signal.SIGKILL)
    """)
    done = sweep("s.toml", "--executor", "dask", "--json", "s.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "killed").exists()
    found = json.loads((tmp_path / "s.json").read_text())
    assert found["complete"]
    assert all(c["ended"] == "ok" for c in found["cells"])


@pytest.mark.parametrize(("toml", "said"), [
    ("command = ", "Invalid"),
    ("steps = 3\n[axes]\narenas = [1]", "command"),
    ('command = "python job.py"\nsteps = "many"\n[axes]\narenas = [1]', "steps"),
    ('command = "python job.py"\nstep = 3\n[axes]\narenas = [1]', "step"),
    ('command = "python job.py"\n[axes]', "no axes"),
    ('command = "no-such-command"\n[axes]\narenas = [1]', "no such command: no-such-command"),
    ('command = "python job.py"\n[axes]\nwarp = [1]', "unknown axis 'warp'"),
    ('command = "python job.py"\n[axes]\narenas = [-1]', "axis arenas: -1"),
    ('command = "python job.py"\n[axes]\narenas = []', "has no values"),
    ('command = "python job.py"\n[axes]\narenas = [1, 1]', "two values that are the same"),
    ('command = "python job.py"\n[axes]\na = {values = [1]}', "exactly one of env, argument and option"),
    ('command = "python job.py"\nexclude = [{b = 1}]\n[axes]\narenas = [1]', "unknown axis: b"),
    ('command = "python job.py"\nexclude = [{arenas = 1}]\n[axes]\narenas = [1]', "no cell is left"),
    ('command = "python job.py"\nrepeats = 0\n[axes]\narenas = [1]', "repeats = 0"),
    ('command = "python job.py"\n[axes]\n' + "\n".join(
        f'a{i} = {{env = "A{i}", values = {list(range(100))}}}' for i in range(3)), "1,000,000 cells"),
])
def test_a_bad_file_is_one_line_before_anything_runs(tmp_path, toml, said):
    (tmp_path / "s.toml").write_text(toml)
    (tmp_path / "job.py").touch()
    done = forked("sweep", "s.toml", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stderr.startswith("lowtide: error: s.toml: ")
    assert said in done.stderr
    assert not (tmp_path / "s.results").exists()


@pytest.mark.long
def test_results_of_another_definition_are_refused(tmp_path):
    """`--fresh` replaces them."""
    write(tmp_path, 'command = "python job.py"\nsteps = 3\n[axes]\narenas = [1]\n', "import lowtide\nfor _ in range(9): lowtide.step()\n")
    assert sweep("s.toml", "--quiet", cwd=tmp_path).returncode == 0
    (tmp_path / "s.toml").write_text('command = "python job.py"\nsteps = 4\n[axes]\narenas = [1]\n')
    done = sweep("s.toml", cwd=tmp_path)
    assert done.returncode == 2
    assert "another definition" in done.stderr
    assert sweep("s.toml", "--quiet", "--fresh", cwd=tmp_path).returncode == 0
