"""``lowtide leak`` on programs whose leaks are known: verdicts, books, suspects, exit codes, and failures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

from command import TIMEOUT
from patience import gone, in_time, until
import numpy as np
import pytest
from forked import forked

from lowtide.studies.leak.books import close
from lowtide.studies.leak.study import audits_of
from lowtide.studies.leak.series import series_of
from lowtide.base.processes import python
from lowtide.studies.leak.watch import Progress, Watch, Watched
from lowtide.probe.marks import MarkSource

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "benchmarks" / "leaks" / "programs.py"
BUCKETS = ROOT / "benchmarks" / "leaks" / "buckets.py"


def leak(*arguments, env=None, cwd=None, timeout=TIMEOUT):
    return subprocess.run(
        [sys.executable, "-m", "lowtide", "leak", *map(str, arguments)], capture_output=True, text=True, timeout=timeout,
        env={**os.environ, **(env or {})}, cwd=cwd, check=False,
    )


def judged(tmp_path, *arguments, **options):
    done = leak("--quiet", "--json", tmp_path / "found.json", *arguments, **options)
    assert done.returncode == 0, done.stderr
    return json.loads((tmp_path / "found.json").read_text())


def script(tmp_path, text, name="script.py"):
    path = tmp_path / name
    path.write_text(textwrap.dedent(text))
    return path


def watched(path, *arguments, steps=300, **options):
    with Watched(python(str(path), module=False, arguments=arguments), Watch(steps=steps, audits=audits_of(steps), **options)) as p:
        return p.wait(Progress())


# --- verdicts -------------------------------------------------------------------------------------------------------------


@pytest.mark.long("shared", "files", "maps")
@pytest.mark.parametrize(("name", "kind"), [
    ("objects_in_a_list", "python"), ("native_blocks", "heap"), ("anonymous_maps", "maps"), ("shared_segments", "shared"),
    ("mapped_files", "files"), ("arrays_kept_beside_batches_of_many_sizes", "heap"),
])
def test_a_leak_of_twice_the_tolerance_is_found_with_its_kind(tmp_path, name, kind):
    found = judged(tmp_path, "--no-who", PROGRAMS, name, 101)
    assert found["verdict"] == "leak"
    assert found["kind"] == kind
    low, high = found["interval_bytes"]
    assert 1024 < low <= found["bytes_per_step"] <= high


@pytest.mark.long("mapped_file", "late_first")
@pytest.mark.parametrize("name", ["arrays_of_many_sizes", "mapped_file", "cache_per_epoch", "late_first_validation"])
def test_a_program_that_does_not_leak_is_clean(tmp_path, name):
    assert judged(tmp_path, PROGRAMS, name, 101)["verdict"] == "clean"


@pytest.mark.long
def test_shared_segments_left_behind_are_reported_as_inconclusive(tmp_path):
    """They are closed but not unlinked, and might belong to another process."""
    path = script(tmp_path, """
        import multiprocessing.shared_memory as shared, multiprocessing.resource_tracker as tracker, lowtide
        names = []
        try:
            for _ in range(120):
                segment = shared.SharedMemory(create=True, size=1 << 16)
                segment.buf[:] = b"x" * (1 << 16)
                names.append(segment.name)
                segment.close()
                lowtide.step()
        finally:
            for name in names:
                segment = shared.SharedMemory(name)
                segment.close()
                segment.unlink()
    """)
    found = judged(tmp_path, "--no-who", "--steps", "100", path)
    assert found["verdict"] == "inconclusive"
    assert found["kind"] == "segments"
    assert any("/dev/shm" in note for note in found["notes"])


def test_growth_that_flattens_is_bounded(tmp_path):
    """A cache that fills up is clean, and a note says that its growth is bounded."""
    found = judged(tmp_path, PROGRAMS, "memo_that_fills", 101)
    assert found["verdict"] == "clean"
    assert found["bounded"]
    assert any("bounded" in note for note in found["notes"])


def test_bytes_held_are_known_after_two_collections_only(tmp_path):
    """An ablation runs the collector itself and reads what is held only right after it; two such readings are enough."""
    run = watched(script(tmp_path, "import lowtide\nfor _ in range(25):\n    lowtide.step()\n"), collect_every=10)
    held = series_of(run, collected_every=10)["held"]
    assert len(held) == 25
    assert np.flatnonzero(np.isfinite(held)).tolist() == [9, 19]


@pytest.mark.long("enable")
@pytest.mark.parametrize(("switch", "verdict"), [("enable", "clean"), ("disable", "leak")])
def test_cyclic_garbage_leaks_only_if_the_collector_never_runs(tmp_path, switch, verdict):
    """With many live objects the collector visits old ones ever more rarely, and garbage grew for hundreds of steps."""
    path = script(tmp_path, """
        import collections, gc, sys, lowtide
        getattr(gc, sys.argv[1])()
        kept = [{} for _ in range(300_000)]
        recent = collections.deque(maxlen=60)
        for _ in range(310):
            mine = []
            for _ in range(400):
                ring = {}
                ring["me"] = ring
                mine.append(ring)
            recent.append(mine)
            lowtide.step()
    """)
    found = judged(tmp_path, "--no-who", path, switch)
    assert found["verdict"] == verdict
    assert any("were collected every" in note for note in found["notes"]) == (verdict == "clean")


def test_the_tolerance_follows_from_memory_left_and_planned_steps(tmp_path):
    """A leak by default is clean in a job that has memory enough for all its steps."""
    program = (PROGRAMS, "arrays_in_a_list", 101)
    found = judged(tmp_path, "--memory-left", "4GiB", "--planned-steps", "100000", *program)
    assert found["tolerance_bytes"] == pytest.approx(42949.67)
    assert found["verdict"] == "clean"


# --- the books ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket", ["python", "heap_in_use", "heap_free", "anonymous_maps", "files", "shared"])
def test_the_books_balance_and_the_planted_bucket_dominates(bucket):
    """Buckets add up to the resident bytes within 5 %, and the planted bucket holds over 90 % of them."""
    books = close(watched(BUCKETS, bucket, "7"))
    assert books.dominant == bucket
    assert abs(books.residual_bytes) <= max(1 << 20, 0.05 * books.resident_bytes)
    assert books.buckets[bucket] > 0.9 * books.resident_bytes


def test_untouched_memory_is_a_residual_and_not_resident(tmp_path):
    path = script(tmp_path, """
        import ctypes, lowtide
        libc = ctypes.CDLL(None); libc.malloc.restype = ctypes.c_void_p
        for _ in range(200):
            libc.malloc(1 << 20)
            lowtide.step()
    """)
    books = close(watched(path, steps=100))
    assert books.buckets["heap_in_use"] > 70 << 20
    assert books.resident_bytes < 5 << 20
    assert books.residual_bytes < -60 << 20


# --- who ------------------------------------------------------------------------------------------------------------------


def line_of(path, text):
    return next(i for i, line in enumerate(path.read_text().splitlines(), 1) if text in line)


def test_the_allocating_line_and_the_holding_list_are_named(tmp_path):
    """A list of constant length is not named."""
    path = script(tmp_path, """
        import lowtide
        def train():
            kept, ring = [], []
            for step in range(400):
                kept.append([step] * 300)  # here
                ring.append(bytearray(4000))
                del ring[:-10]
                lowtide.step()
        train()
    """)
    found = judged(tmp_path, path, cwd=tmp_path)
    assert found["verdict"] == "leak"
    first = found["suspects"][0]
    assert (first["kind"], first["source"]) == ("line", f"script.py:{line_of(path, '# here')}")
    assert first["bytes_per_step"] == pytest.approx(2456, rel=0.1)
    holders = [s["holder"] for s in found["suspects"] if s["kind"] == "container"]
    assert any(h.startswith("kept (local of train") for h in holders)
    assert not any("ring" in h for h in holders)


@pytest.mark.long
def test_a_census_of_a_million_objects_gets_the_time_it_needs(tmp_path, monkeypatch):
    path = script(tmp_path, """
        import lowtide
        many, kept = [[] for _ in range(1_000_000)], []
        for _ in range(400):
            kept.append({"step": object()})
            lowtide.step()
    """)
    monkeypatch.setattr("lowtide.studies.leak.watch.PATIENCE_SECONDS", 0.0)
    lines = [line for looked in watched(path, census=True).census for line in looked["lines"]]
    assert any(line["source"] == f"{path}:5" for line in lines)


@pytest.mark.parametrize("known", [None, MarkSource.SCRIPT])
def test_growth_during_imports_is_not_growth_by_steps(tmp_path, known):
    """Clock ticks are steps only if nothing else marks any; on a slow machine imports alone take many ticks."""
    path = script(tmp_path, """
        import time
        import lowtide
        imported = []
        for _ in range(300):
            imported.append({"module": object()})  # imports
            time.sleep(0.005)
        kept = []
        for _ in range(400):
            kept.append({"step": object()})  # steps
            lowtide.step()
    """)
    looks = watched(path, census=True, census_kind=known, every_seconds=0.01, steps=60).census
    assert len(looks) == 1
    sources = {line["source"] for line in looks[0]["lines"]}
    assert f"{path}:{line_of(path, '# steps')}" in sources
    assert f"{path}:{line_of(path, '# imports')}" not in sources


@pytest.mark.long
def test_tensors_are_named_by_line_and_a_growing_graph_by_its_holder(tmp_path):
    path = script(tmp_path, """
        import torch
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        kept, total = [], 0.0
        for _ in range(400):
            optimizer.zero_grad()
            y = model(torch.randn(16, 64))  # here
            loss = y.square().mean()
            loss.backward()
            optimizer.step()
            kept.append(y.detach())
            total = total + loss
    """)
    found = judged(tmp_path, path, cwd=tmp_path)
    assert found["verdict"] == "leak"
    tensors = [s for s in found["suspects"] if s["kind"] == "tensor"]
    assert "[16, 64]" in tensors[0]["name"]
    assert tensors[0]["source"].startswith("script.py:")
    graph = next(s for s in found["suspects"] if s["kind"] == "graph")
    assert graph["holder"] == "__main__.total"
    assert graph["count_per_step"] >= 3


@pytest.mark.long
def test_an_unbounded_memo_is_named(tmp_path):
    found = judged(tmp_path, PROGRAMS, "memo_on_a_method", 101)
    assert any(s["holder"].endswith("Model.features") for s in found["suspects"])


@pytest.mark.skipif(__import__("importlib.util").util.find_spec("memray") is None, reason="memray is not installed")
def test_native_stacks_are_reported_with_deep(tmp_path):
    found = judged(tmp_path, "--deep", PROGRAMS, "arrays_in_a_list", 101)
    native = [s for s in found["suspects"] if s["kind"] == "native"]
    assert any(s["source"].startswith(("benchmarks/leaks/programs.py", "programs.py")) and 1500 < s["bytes_per_step"] < 2500 for s in native)


# --- steps ----------------------------------------------------------------------------------------------------------------


def test_steps_are_counted_once_for_two_optimizers(tmp_path):
    path = script(tmp_path, """
        import torch
        a, b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        optimizers = [torch.optim.SGD(a.parameters(), 0.1), torch.optim.SGD(b.parameters(), 0.1)]
        for _ in range(80):
            for optimizer in optimizers:
                optimizer.zero_grad()
            b(a(torch.ones(2, 4))).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
        print("done")
    """)
    run = watched(path, steps=0)
    assert (run.kind, run.steps, run.ended, run.code) == (MarkSource.OPTIMIZER, 80, "itself", 0)
    assert "done" in run.tail


def test_matching_lines_of_output_mark_steps(tmp_path):
    path = script(tmp_path, """
        for step in range(120):
            print("step", step)
            print("something else")
    """)
    run = watched(path, steps=0, lines=r"^step \d+")
    assert (run.kind, run.steps) == (MarkSource.SCRIPT, 120)


def test_without_marks_steps_are_ticks_of_the_clock(tmp_path):
    """As often as was asked for, or less often on a busy machine."""
    path = script(tmp_path, "while True:\n    sum(range(1000))\n")
    run = watched(path, steps=30, every_seconds=0.05, least_seconds=0.0)
    assert (run.kind, run.ended) == (MarkSource.CLOCK, "enough")
    assert run.steps >= 30
    assert run.steps <= np.ptp(run.column("time_ns")) / 1e9 / 0.05 + 2


CHILD = """
    import multiprocessing, sys, time
    import lowtide

    def work(pipe):
        kept = []
        while True:
            pipe.recv()
            if "keep" in sys.argv:
                kept.append(b"x" * 102400)
            pipe.send(1)

    if __name__ == "__main__":
        ours, theirs = multiprocessing.get_context("fork").Pipe()
        multiprocessing.get_context("fork").Process(target=work, args=(theirs,), daemon=True).start()
        for _ in range(400):
            ours.send(1)
            ours.recv()
            time.sleep(0.002)
            lowtide.step()
"""


def test_a_leak_in_a_child_process_is_found(tmp_path):
    """It is blamed on "workers"."""
    found = judged(tmp_path, script(tmp_path, CHILD), "keep")
    assert (found["verdict"], found["kind"]) == ("leak", "workers")
    assert found["bytes_per_step"] == pytest.approx(102400, rel=0.1)
    assert any("in child processes" in note for note in found["notes"])
    assert not found["suspects"]


def test_a_child_process_that_keeps_nothing_is_clean(tmp_path):
    assert judged(tmp_path, script(tmp_path, CHILD))["verdict"] == "clean"


@pytest.mark.long
@pytest.mark.parametrize(("keeps", "kind"), [("keep", "workers"), ("nothing", "held")])
def test_data_loader_workers_that_keep_samples_leak(tmp_path, keeps, kind):
    """Workers that keep nothing are clean."""
    found = judged(tmp_path, script(tmp_path, """
        import sys
        import numpy as np
        import torch

        class Images(torch.utils.data.Dataset):
            def __init__(self):
                self.cache = {}

            def __len__(self):
                return 4000

            def __getitem__(self, i):
                image = np.full((3, 32, 32), i % 7, dtype=np.float32)
                if "keep" in sys.argv:
                    self.cache[i] = image
                return torch.from_numpy(image).mean((1, 2)), i % 10

        if __name__ == "__main__":
            model = torch.nn.Linear(3, 10)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for x, t in torch.utils.data.DataLoader(Images(), batch_size=10, num_workers=2):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x), t).backward()
                optimizer.step()
    """), keeps)
    assert (found["verdict"], found["kind"]) == ("leak" if keeps == "keep" else "clean", kind)


def test_a_process_beside_the_training_one_counts_too(tmp_path):
    """It is not a child of that one: a shell started both."""
    train = script(tmp_path, "import time, lowtide\nfor _ in range(400):\n    time.sleep(0.002)\n    lowtide.step()\n")
    beside = script(tmp_path, """
        import time
        kept = []
        while True:  # until the shell ends it
            kept.append(bytes(20480))
            time.sleep(0.002)
    """, "beside.py")
    both = f"env -u LOWTIDE_PROBE {sys.executable} {beside} & {sys.executable} {train}; kill $!"
    found = judged(tmp_path, "--no-who", "--", "sh", "-c", both)
    assert (found["verdict"], found["kind"]) == ("leak", "workers")


def test_forked_workers_take_no_samples(tmp_path):
    path = script(tmp_path, """
        import multiprocessing, lowtide
        def work(_):
            for _ in range(50):
                lowtide.step()
        if __name__ == "__main__":
            with multiprocessing.get_context("fork").Pool(2) as pool:
                for _ in range(60):
                    pool.map(work, range(4))
                    lowtide.step()
    """)
    assert watched(path, steps=0).steps == 60


# --- the script is left alone -----------------------------------------------------------------------------------------------


def test_the_script_sees_its_arguments_and_the_machines_sitecustomize(tmp_path):
    """Its folder is first on the path, and the probe's is not on it."""
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import builtins\nbuiltins.machines_own = True\n")
    path = script(tmp_path, """
        import sys
        print(sys.argv[1:], sys.path[0] == __file__.rpartition("/")[0], machines_own, any("probe" in p for p in sys.path))
    """)
    with Watched(python(str(path), module=False, arguments=["--steps", "7"]), Watch(steps=0),
                 environment={**os.environ, "PYTHONPATH": str(own)}) as process:
        run = process.wait(Progress())
    assert run.tail == "['--steps', '7'] True True False"


def test_a_python_without_lowtide_is_watched_too(tmp_path):
    """Another interpreter's packages are not Lowtide's: only the probe is lent to it, which needs nothing but the standard
    library.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True, timeout=TIMEOUT)
    path = script(tmp_path, """
        import importlib.util, lowtide
        kept = []
        for _ in range(120):
            kept.append(bytearray(3000))
            lowtide.step()
        print(importlib.util.find_spec("numpy"))
    """)
    with Watched([str(tmp_path / "venv" / "bin" / "python"), str(path)], Watch(steps=0)) as process:
        run = process.wait(Progress())
    assert run.tail == "None"
    assert run.steps == 120
    assert run.column("heap_bytes")[-1] - run.column("heap_bytes")[60] > 59 * 3000


@pytest.mark.long
def test_a_script_that_refuses_to_end_is_ended(tmp_path):
    """It catches everything and sleeps."""
    path = script(tmp_path, """
        import time, lowtide
        try:
            while True:
                lowtide.step()
        except BaseException:
            time.sleep(100000)
    """)
    run = watched(path, steps=60)
    assert (run.ended, run.code) == ("enough", 0)
    assert run.steps >= 60


def test_no_process_or_file_is_left_behind(tmp_path):
    """Neither the process nor its children outlive the study, nor do files of it."""
    path = script(tmp_path, """
        import pathlib, subprocess, sys, lowtide
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        pathlib.Path(sys.argv[1]).write_text(str(child.pid))
        while True:
            lowtide.step()
    """)
    note = tmp_path / "pid"
    (tmp_path / "temporary").mkdir()
    done = leak("--quiet", "--processes", "1", "--steps", "60", path, note, env={"TMPDIR": str(tmp_path / "temporary")})
    assert done.returncode == 0, done.stderr
    assert not list((tmp_path / "temporary").iterdir())
    until(lambda: gone(int(note.read_text())))


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_watched_script_ends_with_lowtide(tmp_path, how):
    """Also when Lowtide is killed."""
    path = script(tmp_path, """
        import os, pathlib, sys, lowtide
        pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
        while True:
            lowtide.step()
    """)
    note = tmp_path / "pid"
    process = subprocess.Popen([sys.executable, "-m", "lowtide", "leak", "--quiet", "--steps", "100000000", str(path), str(note)])
    until(lambda: note.exists() and note.read_text())
    process.send_signal(how)
    assert process.wait(TIMEOUT) == (143 if how == signal.SIGTERM else -9)
    until(lambda: gone(int(note.read_text())))


def test_the_sampler_itself_does_not_grow(tmp_path):
    """20,000 steps that do nothing: 10 bytes per step would be 200 KB."""
    path = script(tmp_path, """
        import lowtide
        for _ in range(20_000):
            lowtide.step()
    """)
    run = watched(path, steps=0)
    held = run.column("heap_bytes")
    assert run.steps == 20_000
    assert (held[-1] - held[2000]) / 18_000 <= 10


# --- the command line -----------------------------------------------------------------------------------------------------------


def test_fail_turns_a_leak_into_exit_code_1(tmp_path):
    program = (PROGRAMS, "arrays_in_a_list", 5)
    done = leak("--fail", "--no-who", "--html", tmp_path / "page.html", "--", sys.executable, *program)
    assert done.returncode == 1
    assert "leak: malloc's blocks in use" in " ".join(done.stderr.split())
    assert "Counters" in (tmp_path / "page.html").read_text()
    assert leak("--fail", "--no-who", PROGRAMS, "arrays", 5).returncode == 0


def test_a_page_that_cannot_be_written_loses_nothing_else(tmp_path):
    """The verdict is shown and the JSON file written all the same; one line says what is wrong."""
    done = leak("--no-who", "--html", "/dev/full", "--json", tmp_path / "found.json", PROGRAMS, "arrays_in_a_list", 5)
    assert done.returncode == 2
    assert "leak: malloc's blocks in use" in " ".join(done.stderr.split())
    assert done.stderr.splitlines()[-1] == "lowtide: error: /dev/full: No space left on device"
    assert json.loads((tmp_path / "found.json").read_text())["verdict"] == "leak"


def test_files_are_written_though_the_program_timed_out(tmp_path):
    path = script(tmp_path, "import time, lowtide\nlowtide.step()\nopen('stepped', 'w').close()\ntime.sleep(100000)\n")
    done = in_time(
        lambda seconds: leak("--timeout", str(seconds), "--json", tmp_path / "x.json", "--html", tmp_path / "x.html", path, cwd=tmp_path),
        lambda _: (tmp_path / "stepped").exists(), first=3,
    )
    assert done.returncode == 2
    assert json.loads((tmp_path / "x.json").read_text())["verdict"] == "inconclusive"
    assert (tmp_path / "x.html").exists()


def test_a_script_that_crashes_has_no_verdict_and_keeps_its_exit_code(tmp_path):
    path = script(tmp_path, "import lowtide\nlowtide.step()\nraise SystemExit(7)\n")
    done = leak("--html", "/dev/full", path)
    assert done.returncode == 7
    assert "lowtide: error: /dev/full: No space left on device" in done.stderr.splitlines()
    assert "no verdict" in done.stderr


def test_too_few_steps_are_inconclusive_and_say_how_many_would_do(tmp_path):
    path = script(tmp_path, "import lowtide\nfor _ in range(20):\n    lowtide.step()\n")
    found = judged(tmp_path, path)
    assert found["verdict"] == "inconclusive"
    assert found["more_steps"] > 20


@pytest.mark.parametrize(("arguments", "said"), [
    (("nothing.py",), "no such script: nothing.py"),
    (("--", "no-such-command"), "no such command: no-such-command"),
    (("--tolerance", "much", "x.py"), "cannot read the size"),
    (("--memory-left", "1GiB", "x.py"), "--planned-steps together"),
    (("--step-line", "(", "x.py"), "not a regular expression"),
    (("--json", "/no/such/folder/x.json", "x.py"), "does not exist"),
    (("--", "sleep", "0.2"), "before any step was seen"),
    (("--timeout", "1", "forever.py"), "killed by --timeout"),
])
def test_bad_input_is_one_line_and_exit_2(tmp_path, arguments, said):
    script(tmp_path, "", "x.py")
    script(tmp_path, "import time\ntime.sleep(60)\n", "forever.py")
    done = forked("leak", *arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("lowtide: error: ")
    assert said in last
