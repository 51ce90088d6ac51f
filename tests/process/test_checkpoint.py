"""Checkpoints: whole or absent, whatever kills, fills or locks; states that come back bit for bit; ranks that agree."""

from __future__ import annotations

import contextlib
import collections
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

from command import TIMEOUT
from patience import PATIENCE, until
import numpy as np
from small_disk import small_disk
import pytest
import torch

import lowtide
from lowtide.checkpoint import Batches, Store, resume
from lowtide.checkpoint import store as store_module
from lowtide.checkpoint.sharded import assembled
from lowtide.base.errors import CheckpointError, StateError

KILLS = 1000 if os.environ.get("LOWTIDE_FULL") else 200


def script(tmp_path, text, name="train.py"):
    path = tmp_path / name
    path.write_text(textwrap.dedent(text))
    return path


def run(path, *arguments, code=0, **options):
    done = subprocess.run([sys.executable, path, *map(str, arguments)], capture_output=True, text=True, timeout=TIMEOUT, check=False, **options)
    assert done.returncode == code, done.stderr
    return done.stdout


class Tagged(torch.Tensor):
    """A tensor subclass."""


# --- saving and loading ---------------------------------------------------------------------------------------------------


def same(a, b):
    assert type(a) is type(b), (a, b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert torch.equal(a, b)
        assert a.dim() < 2 or a.stride() == b.stride()  # memory formats are restored; gaps between elements are not
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, (list, tuple, collections.deque)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    else:
        assert a == b or (math.isnan(a) and math.isnan(b))


def test_every_kind_of_value_is_loaded_as_it_was_saved(tmp_path):
    state = {
        "plain": [None, True, 3, -(1 << 200), 2.5, math.inf, -math.inf, math.nan, "text", (1, (2,)), {1: "int", (2, 3): "tuple"}, {4, 5}],
        "bytes": [b"\0\xff", bytearray(b"x"), complex(1, math.inf), collections.deque([1, 2], maxlen=5)],
        "maps": [collections.OrderedDict(b=1, a=2), collections.Counter("hello"), collections.defaultdict(list, a=[1])],
        "torch": [torch.randn(3, 4), torch.tensor(7), torch.empty(0, 3), torch.randn(4, 4).t(), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
                  torch.arange(10)[::2], torch.randn(3).bfloat16(), torch.tensor([True]), torch.randn(2, dtype=torch.complex64), torch.randn(2, 2, dtype=torch.complex128), torch.randn(2).to(torch.float8_e4m3fn).view(torch.uint8)],
        "other": [torch.float16, torch.device("cpu"), torch.Size([1, 2])],
        "numpy": [np.arange(6).reshape(2, 3), np.asfortranarray(np.random.rand(3, 4)), np.float32(2.5), np.zeros((0, 2)), np.array(3, np.uint8), np.array([1 + 2j]), np.complex128(1 + 2j)],
    }
    store = Store(tmp_path)
    store.save(state)
    same(store.load(), state)


def test_a_shared_tensor_is_saved_once_and_stays_shared(tmp_path):
    shared = torch.randn(1000, 100)
    Store(tmp_path).save({"a": shared, "b": shared, "c": shared.view(100, 1000)})
    size = sum(f.stat().st_size for f in tmp_path.rglob("*.safetensors"))
    assert size < 2.1 * shared.nbytes
    found = Store(tmp_path).load()
    assert found["a"] is found["b"]
    same(found["c"], shared.view(100, 1000))


def test_overlapping_tensors_are_loaded_with_their_own_values(tmp_path):
    whole = torch.arange(100.0)
    Store(tmp_path).save([whole, whole[10:20], whole[:50]])
    same(Store(tmp_path).load(), [whole, whole[10:20], whole[:50]])


@pytest.mark.parametrize("value", [
    object(), lambda: 0, collections.defaultdict(lambda: 3), torch.sparse_coo_tensor([[0], [1]], [1.0], (2, 2)), torch.empty(2, device="meta"), np.array(["text"]), np.array([object()]),
    np.ma.masked_array([1.0, 2.0], [True, False]), np.array([1.0], dtype=">f8"), Tagged(torch.ones(2)),
])
def test_a_value_that_cannot_be_saved_is_named_and_nothing_is_written(tmp_path, value):
    store = Store(tmp_path)
    with pytest.raises(StateError, match=r"state\['deep'\]\[0\]"):
        store.save({"deep": [value]})
    assert store.saved() == []


def test_a_users_dict_subclass_is_refused(tmp_path):
    class Mine(dict):
        pass

    with pytest.raises(StateError, match="Mine"):
        Store(tmp_path).save({"x": Mine(a=1)})


def test_parts_of_every_kind_are_restored_in_place(tmp_path):
    """Models, optimizers, arrays, containers and every random number generator, global ones included."""
    model, parts = torch.nn.Linear(3, 2), {}
    parts = {
        "model": model, "optimizer": torch.optim.Adam(model.parameters()), "array": np.arange(3.0), "tensor": torch.ones(2),
        "generator": np.random.default_rng(1), "old": np.random.RandomState(2), "python": random.Random(3), "torch": torch.Generator().manual_seed(4),
        "log": [1, 2], "table": {"w": np.zeros(2), "n": 1}, "scaler": torch.amp.GradScaler("cpu"),
    }
    model(torch.ones(1, 3)).sum().backward()
    parts["optimizer"].step()
    lowtide.checkpoint(tmp_path, parts, save=True, epoch=3, best=0.25)
    before = {"w": model.weight.detach().clone(), "draw": [parts["generator"].random(), parts["old"].rand(), parts["python"].random(),
              torch.rand(1, generator=parts["torch"]).item(), random.random(), np.random.rand(), torch.rand(1).item()]}
    with torch.no_grad():
        model.weight.zero_()
    parts["array"][:] = 9
    parts["tensor"].fill_(9)
    parts["log"].append(3)
    held = parts["table"]["w"]
    parts["table"].update(n=2, extra=3)
    held[:] = 9
    values = resume(tmp_path, parts)
    assert values == {"epoch": 3, "best": 0.25}
    assert torch.equal(model.weight, before["w"])
    assert parts["array"].tolist() == [0, 1, 2] and parts["tensor"].tolist() == [1, 1] and parts["log"] == [1, 2]
    assert parts["table"]["w"] is held and held.tolist() == [0, 0] and parts["table"]["n"] == 1 and "extra" not in parts["table"]
    again = [parts["generator"].random(), parts["old"].rand(), parts["python"].random(), torch.rand(1, generator=parts["torch"]).item(),
             random.random(), np.random.rand(), torch.rand(1).item()]
    assert again == before["draw"]


def test_a_state_that_does_not_fit_is_an_error_with_its_name(tmp_path):
    lowtide.checkpoint(tmp_path, {"model": torch.nn.Linear(3, 2), "a": np.zeros(3)}, save=True)
    with pytest.raises(StateError, match="model"):
        resume(tmp_path, {"model": torch.nn.Linear(4, 2), "a": np.zeros(3)})
    with pytest.raises(StateError, match="a is"):
        resume(tmp_path, {"model": torch.nn.Linear(3, 2), "a": np.zeros(4)})
    with pytest.raises(StateError, match="missing"):
        resume(tmp_path, {"model": torch.nn.Linear(3, 2)})
    with pytest.raises(StateError, match="no state to restore"):
        lowtide.checkpoint(tmp_path, {"f": lambda: 0}, save=True)


# --- which are kept -------------------------------------------------------------------------------------------------------


def test_the_last_and_the_best_checkpoints_are_kept(tmp_path):
    """NaN is never the best."""
    store = Store(tmp_path, keep_last=2, keep_best=2)
    for metric in (5.0, 1.0, 4.0, math.nan, 2.0, 3.0, 9.0):
        store.save({"x": metric}, metric=metric)
    assert [s.number for s in store.saved()] == [2, 5, 6, 7]
    best = min(store.saved(), key=lambda s: s.metric)
    assert store.load(best) == {"x": 1.0}
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".undone")] == []


def test_a_higher_metric_can_be_the_better_one(tmp_path):
    store = Store(tmp_path, keep_last=1, keep_best=1, best="max")
    for metric in (1.0, 5.0, 2.0):
        store.save({}, metric=metric)
    assert [s.metric for s in store.saved()] == [5.0, 2.0]


# --- damage ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("harm", ["flip", "cut", "delete", "manifest", "state"])
def test_a_damaged_checkpoint_is_skipped_with_a_warning(tmp_path, harm):
    """It is not removed; loading it by number raises."""
    store = Store(tmp_path, keep_last=3)
    for i in range(3):
        store.save({"x": torch.full((100,), float(i))})
    file = next(store.saved()[-1].path.rglob("*.safetensors"))
    if harm == "flip":
        raw = bytearray(file.read_bytes())
        raw[-1] ^= 1
        file.write_bytes(raw)
    elif harm == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif harm == "delete":
        file.unlink()
    elif harm == "manifest":
        path = store.saved()[-1].path / "manifest.json"
        path.write_text(path.read_text().replace("0", "1", 1))
    else:
        path = file.parent / "state.json"
        path.write_text(path.read_text() + " ")
    damaged = sorted(p for p in tmp_path.iterdir() if p.name.isdigit())[-1]
    with pytest.warns(UserWarning, match="damaged"):
        assert store.load()["x"][0] == 1.0
    assert damaged.exists()
    if harm != "manifest":
        with pytest.raises(CheckpointError, match="damaged"):
            store.load(store.saved()[-1])


@pytest.mark.parametrize("first", [True, False])
def test_a_manifest_that_cannot_be_read_twice_ends_no_run(tmp_path, monkeypatch, first):
    """Another process may remove a checkpoint, or the system refuse a file, at any moment of loading: found by faults."""
    store = Store(tmp_path)
    for i in range(2):
        store.save({"x": i})
    calls = []

    def read_once(file):
        calls.append(file)
        return None if (len(calls) == 1) is first else read_manifest(file)

    read_manifest = store_module.read_manifest
    monkeypatch.setattr(store_module, "read_manifest", read_once)
    if first:
        with pytest.warns(UserWarning, match="manifest"):
            assert store.load()["x"] == 0
    else:
        assert store.load()["x"] == 1


SAVING = """
    import sys, itertools
    import numpy as np
    from lowtide.checkpoint import Store
    store = Store(sys.argv[1], keep_last=2)
    start = (store.load() or {"step": 0})["step"]
    for step in itertools.count(start + 1):
        store.save({"step": step, "a": np.full(20_000, step), "b": [np.full(5_000, step) for _ in range(5)]})
        print(step, flush=True)
"""


def test_a_run_does_not_start_over_if_all_checkpoints_are_damaged(tmp_path):
    """Otherwise the run would start as if nothing had been saved, and its next saves would remove what can perhaps be
    repaired.
    """
    store = Store(tmp_path / "c")
    for k in range(2):
        store.save({"w": np.full(1000, k)})
    for file in (tmp_path / "c").glob("0*/rank-0/n-*"):
        file.write_bytes(b"x" + file.read_bytes()[1:])
    with pytest.warns(UserWarning, match="damaged"), pytest.raises(CheckpointError, match="every checkpoint in .* is damaged"):
        resume(tmp_path / "c", {"w": np.zeros(3)})
    assert len(list((tmp_path / "c").glob("0*"))) == 2


@pytest.mark.long
def test_kills_at_random_moments_never_leave_a_corrupt_or_an_old_state(tmp_path):
    """Every state that was reported as saved can be loaded, and a loaded state is that of one step."""
    chance = random.Random(1)
    store = tmp_path / "store"
    path = script(tmp_path, SAVING)
    (tmp_path / "said").touch()  # a child may be killed before it opens it
    reported, kills = 0, 0
    began = time.monotonic()
    for k in range(5):
        Store(tmp_path / "probe").save({"step": k, "a": np.full(20_000, k), "b": [np.full(5_000, k) for _ in range(5)]})
    one_save = (time.monotonic() - began) / 5  # the moments of the kills go with this machine
    while kills < KILLS:
        process = subprocess.Popen([sys.executable, path, store], stdout=subprocess.PIPE, text=True)
        process.stdout.readline()
        # many kills in one process's life would need a fork of it: a copy of the process saves in its place
        process.kill()
        said = [int(x) for x in process.communicate()[0].split()]
        reported = max([reported, *said])
        kills += 1
        for _ in range(min(24, KILLS - kills)):
            size = (tmp_path / "said").stat().st_size
            child = os.fork()
            if not child:
                with open(os.devnull, "w") as null, open(tmp_path / "said", "a") as out:
                    os.dup2(null.fileno(), 2)
                    os.dup2(out.fileno(), 1)
                    sys.stdout = out
                    sys.argv = [str(path), str(store)]
                    exec(compile(textwrap.dedent(SAVING), "saving", "exec"), {"__name__": "saving"})
                os._exit(0)
            if chance.random() < 0.75:  # else it may be killed before its first save
                until(lambda: (tmp_path / "said").stat().st_size > size)
            time.sleep(chance.random() * 2 * one_save)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            kills += 1
            said = (tmp_path / "said").read_text().split("\n")[:-1]
            reported = max([reported, *map(int, said)])
            found = Store(store).load()
            assert found["step"] >= reported
            assert (found["a"] == found["step"]).all() and all((b == found["step"]).all() for b in found["b"])
    assert reported > KILLS / 4, "nothing was being saved"
    assert len(Store(store).saved()) <= 3


@pytest.mark.parametrize("full", ["limit", "disk"])
def test_a_full_disk_is_a_clear_error_and_keeps_the_last_checkpoint(tmp_path, full):
    """On a file system of 6 MiB where one can be mounted; by a limit on the size of files everywhere."""
    path = script(tmp_path, """
        import resource, signal, sys
        import numpy as np
        from lowtide.checkpoint import Store
        from lowtide.base.errors import CheckpointError
        store = Store(sys.argv[1])
        store.save({"x": np.full(300_000, 1.0)})
        if sys.argv[2] == "limit":
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        for size in (600_000, 3_000_000):
            try:
                store.save({"x": np.full(size, 2.0)})
            except CheckpointError as error:
                print(error)
            else:
                print("saved?")
        assert store.load()["x"].sum() == 300_000
        print(sorted(p.name for p in __import__("pathlib").Path(sys.argv[1]).iterdir()))
    """)
    with contextlib.nullcontext(tmp_path / "limited") if full == "limit" else small_disk(tmp_path / "small", "6m") as folder:
        said = run(path, folder, full).splitlines()
    assert all("the disk is full" in line and "checkpoint 1 is unchanged" in line and "make room" in line for line in said[:2])
    assert said[2] == "['.lock', '0000000001']"


def test_a_read_only_folder_is_a_clear_error(tmp_path):
    """A folder that holds checkpoints can still be loaded from; saving into it, and starting in an empty one, is refused."""
    path = script(tmp_path, """
        import os, sys
        import numpy as np
        from lowtide.checkpoint import Store
        from lowtide.base.errors import CheckpointError
        if os.getuid() == 0:
            os.setuid(65534)
        full, empty = sys.argv[1:]
        print(Store(full).load())
        for use in (lambda: Store(full).save({"x": 2}), lambda: Store(empty), lambda: Store(empty + "/deeper")):
            try:
                use()
            except CheckpointError as error:
                print(error)
    """)
    full, empty = tmp_path / "full", tmp_path / "empty"
    Store(full).save({"x": 1})
    empty.mkdir()
    (full / ".lock").chmod(0o666)
    for folder in (full, empty):
        folder.chmod(0o555)
    for parent in (tmp_path, *tmp_path.parents):  # the test's own, a worker's, the run's: another user may pass through
        if parent.is_relative_to(Path(tempfile.gettempdir())) and parent != Path(tempfile.gettempdir()):
            parent.chmod(0o755)
    loaded, *said = run(path, full, empty).splitlines()
    for folder in (full, empty):
        folder.chmod(0o755)
    assert loaded == "{'x': 1}"
    assert len(said) == 3
    assert all("Permission denied" in line for line in said)
    assert all("cannot write checkpoints" in line for line in said[1:])
    assert Store(full).load() == {"x": 1}


def test_a_failure_while_writing_leaves_no_partial_checkpoint(tmp_path, monkeypatch):
    store = Store(tmp_path)
    store.save({"x": np.ones(3)})

    def fails(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("lowtide.checkpoint.part_files.sync", fails)
    with pytest.raises(CheckpointError, match="Input/output error; checkpoint 1 is unchanged"):
        store.save({"x": np.zeros(3)})
    monkeypatch.undo()
    assert [p.name for p in sorted(tmp_path.iterdir())] == [".lock", "0000000001"]
    assert store.load()["x"].sum() == 3


# --- asynchronous saves ---------------------------------------------------------------------------------------------------


def test_an_asynchronous_save_holds_the_state_when_it_was_asked_for(tmp_path):
    store = Store(tmp_path, asynchronous=True)
    x, y = torch.zeros(1_000_000), np.zeros(1_000_000)
    for i in range(5):
        x.fill_(i)
        y[:] = i
        store.save({"x": x, "y": y})
        x.fill_(-1)
        y[:] = -1
        found = store.load()
        assert (found["x"] == i).all() and (found["y"] == i).all()


def test_a_second_asynchronous_save_waits_for_the_first(tmp_path, monkeypatch):
    """The first is held up until the second asks for it, or begins to write as well."""
    asked, began, at_work, most = threading.Event(), threading.Event(), [], []
    write, wait = store_module.write_part, Store.wait

    def held_up(folder, tree, arrays):
        at_work.append(folder)
        most.append(len(at_work))
        if began.is_set():
            asked.set()
        began.set()
        assert asked.wait(120)
        found = write(folder, tree, arrays)
        at_work.remove(folder)
        return found

    def waiting(store):
        if began.is_set():
            asked.set()
        wait(store)

    monkeypatch.setattr(store_module, "write_part", held_up)
    monkeypatch.setattr(Store, "wait", waiting)
    store = Store(tmp_path, asynchronous=True)
    numbers = [store.save({"x": 1})]
    assert began.wait(120)
    numbers.append(store.save({"x": 2}))
    store.wait()
    assert numbers == [1, 2]
    assert max(most) == 1
    assert [store.load(saved) for saved in store.saved()] == [{"x": 1}, {"x": 2}]


def test_leftovers_of_killed_saves_are_removed_by_the_next_save(tmp_path):
    """Folders of a live process, which may still be writing, stay."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left = {owner: tmp_path / f".undone-0000000007-{owner}" for owner in (gone.pid, os.getpid(), os.getppid())}
    for folder in left.values():
        (folder / "rank-0").mkdir(parents=True)
        (folder / "rank-0" / "state.json").write_text("{}")
    Store(tmp_path).save({"x": 1})
    assert not left[gone.pid].exists()
    assert not left[os.getpid()].exists(), "this process writes nothing else"
    assert left[os.getppid()].exists(), "another process of this machine may be at work on it"


def test_an_asynchronous_failure_is_raised_by_wait(tmp_path, monkeypatch):
    """The next save works again."""
    store = Store(tmp_path, asynchronous=True)

    def fails(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lowtide.checkpoint.part_files.sync", fails)
    store.save({"x": 1})
    with pytest.raises(CheckpointError, match="the disk is full"):
        store.wait()
    monkeypatch.undo()
    store.save({"x": 2})
    assert store.load() == {"x": 2}


def test_a_script_that_ends_waits_for_its_last_save(tmp_path):
    path = script(tmp_path, """
        import sys, numpy as np
        from lowtide.checkpoint import Store
        Store(sys.argv[1], asynchronous=True).save({"x": np.ones(5_000_000)})
    """)
    run(path, tmp_path / "store")
    assert Store(tmp_path / "store").load()["x"].sum() == 5_000_000


def test_a_failed_last_save_is_reported_and_fails_the_script(tmp_path):
    """An asynchronous save that fails after the script's end gives an error line and exit code 1."""
    path = script(tmp_path, """
        import logging, resource, signal, sys
        import numpy as np
        import lowtide
        store = lowtide.checkpoint.Store(sys.argv[1], asynchronous=True)
        state = {"w": np.random.default_rng(0).standard_normal(200_000)}
        lowtide.checkpoint(store, state, save=True)
        store.wait()
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
        lowtide.checkpoint(store, state, save=True)
        print("trained")
    """)
    done = subprocess.run([sys.executable, path, tmp_path / "c"], capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert (done.returncode, done.stdout) == (1, "trained\n")
    assert "lowtide: error: the last checkpoint was not saved" in done.stderr
    assert [s.number for s in Store(tmp_path / "c").saved()] == [1]


def test_two_processes_may_save_into_one_folder(tmp_path):
    """Each save gets a number of its own, and none removes the other's unfinished save."""
    path = script(tmp_path, """
        import sys
        import numpy as np
        from lowtide.checkpoint import Store
        store = Store(sys.argv[1])
        print(*(store.save({"w": np.full(300_000, k)}) for k in range(30)))
    """)
    both = [subprocess.Popen([sys.executable, path, tmp_path / "c"], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    numbers = [int(n) for process in both for n in process.communicate(timeout=TIMEOUT)[0].split()]
    assert [process.returncode for process in both] == [0, 0]
    assert sorted(numbers) == list(range(1, 61))
    assert not list((tmp_path / "c").glob(".undone-*"))


def test_a_forked_child_ends_at_sigterm_as_without_lowtide(tmp_path):
    """Readers of a pool that is shut down, and daemons at the script's end: they used to go on forever, and so did the script.
    """
    path = script(tmp_path, """
        import multiprocessing, sys, time
        import numpy as np
        import lowtide
        lowtide.checkpoint.resume(sys.argv[1], {"w": np.zeros(4)})
        fork = multiprocessing.get_context("fork")
        ended = fork.Process(target=time.sleep, args=(100000,))
        ended.start()
        ended.terminate()
        ended.join()
        print(ended.exitcode)
        fork.Process(target=time.sleep, args=(100000,), daemon=True).start()
    """)
    assert run(path, tmp_path / "c") == f"{-signal.SIGTERM}\n"


@pytest.mark.long
def test_saving_holds_no_second_copy_of_the_state(tmp_path):
    """Resident memory grows by less than a quarter while a state of 400 MiB is written."""
    path = script(tmp_path, """
        import resource, sys, numpy as np
        from lowtide.checkpoint import Store
        x = [np.ones(1 << 20) for _ in range(50)]
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        Store(sys.argv[1]).save({"x": x})
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """)
    assert int(run(path, tmp_path / "store")) < 100 * 1024


# --- recycled training is the uninterrupted one ---------------------------------------------------------------------------

TORCH = """
    import random, sys
    import numpy as np
    import torch
    import lowtide

    folder, workers, kind, asked = sys.argv[1], int(sys.argv[2]), sys.argv[3], set(map(int, sys.argv[4].split(","))) if sys.argv[4] else set()
    torch.manual_seed(0); random.seed(0); np.random.seed(0)

    class Noisy(torch.utils.data.Dataset):
        x, y = torch.randn(40, 3, 8, 8), torch.randint(0, 4, (40,))
        def __len__(self): return 40
        def __getitem__(self, i): return self.x[i] + torch.rand(1) + random.random(), self.y[i]

    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Flatten(),
                                torch.nn.Linear(288, 4)).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=20)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
    data = Noisy()
    generator = torch.Generator().manual_seed(5) if kind == "generator" else None
    sampler = torch.utils.data.WeightedRandomSampler(torch.rand(40), 40) if kind == "weighted" else None
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=sampler is None, sampler=sampler, num_workers=workers, generator=generator)
    batches = lowtide.checkpoint.Batches(loader)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "scaler": scaler, "batches": batches}
    at = lowtide.checkpoint.resume(folder, state)
    step, total = at.get("step", 0), at.get("total", 0.0)
    for epoch in range(at.get("epoch", 0), 3):
        for x, y in batches:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x + random.random() + np.random.rand()), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer); scaler.update(); schedule.step()
            total += loss.item()
            step += 1
            if step in asked:
                import os, signal
                os.kill(os.getpid(), signal.SIGUSR1)
            lowtide.checkpoint(folder, state, epoch=epoch, step=step, total=total)
        lowtide.checkpoint(folder, state, epoch_end=True, epoch=epoch + 1, step=step, total=total)
    print(total, scaler.get_scale(), schedule.get_last_lr(), torch.rand(1).item(), np.random.rand(), random.random())
    print([t.double().sum().item() for t in [*model.state_dict().values()]])
"""


STOPS = [(0, "plain", "3 5"), (2, "generator", "8")]
if os.environ.get("LOWTIDE_FULL"):
    STOPS += [(0, "plain", "8 14"), (2, "plain", "4 14"), (0, "generator", "8"), (2, "generator", "3"), (0, "weighted", "3")]


@pytest.mark.long("0-plain-3 5", "2-generator-8")
@pytest.mark.parametrize(("workers", "kind", "stops"), STOPS)
def test_training_stopped_inside_an_epoch_ends_with_the_same_bits(tmp_path, workers, kind, stops):
    """Stopped inside an epoch and at its end, with workers, random samplers, schedules and gradient scaling."""
    path = script(tmp_path, TORCH)
    plain = run(path, tmp_path / "a", workers, kind, "")
    for asked in stops.split():  # inside an epoch, and at its end
        run(path, tmp_path / "b", workers, kind, asked, code=75)
    assert run(path, tmp_path / "b", workers, kind, "") == plain


def test_batches_of_any_iterable_resume_inside_an_epoch(tmp_path):
    class Loader:
        def __len__(self):
            return 6

        def __iter__(self):
            return iter(np.random.permutation(6).tolist())

    np.random.seed(1)
    plain = [list(Batches(Loader())) for _ in range(1)][0]
    np.random.seed(1)
    batches = Batches(Loader())
    begun = iter(batches)
    first = [next(begun), next(begun)]
    saved = json.loads(json.dumps(batches.state_dict(), default=str)) and batches.state_dict()
    np.random.seed(99)
    fresh = Batches(Loader())
    fresh.load_state_dict(saved)
    assert fresh.state_dict()["given"] == 2
    assert first + list(fresh) == plain
    assert len(list(fresh)) == 6


def test_an_epoch_left_by_break_is_over():
    """The next epoch is a whole one, also after a restart."""
    def epochs(position=None):
        torch.manual_seed(1)
        batches = Batches(torch.utils.data.DataLoader(torch.arange(20), batch_size=4, shuffle=True))
        if position is not None:
            batches.load_state_dict(position)
        return batches

    batches = epochs()
    for i, _ in enumerate(batches):
        if i == 1:
            break
    position = batches.state_dict()
    assert not position["inside"]
    assert len(list(epochs(position))) == 5


def test_two_loaders_side_by_side_resume_together(tmp_path):
    class Noisy(torch.utils.data.Dataset):
        def __len__(self):
            return 12

        def __getitem__(self, i):
            return i + random.random()

    def run(position=None, stop=None):
        random.seed(1)
        torch.manual_seed(1)
        pair = [Batches(torch.utils.data.DataLoader(Noisy(), batch_size=2, shuffle=True)) for _ in range(2)]
        parts = {"a": pair[0], "b": pair[1]}
        if position:
            lowtide.checkpoint.resume(tmp_path, parts)
        found = []
        for a, b in zip(*pair):
            found.append((a.tolist(), b.tolist()))
            if len(found) == stop:
                lowtide.checkpoint(tmp_path, parts, save=True)
        return found

    expected = run(stop=2)
    assert run(position=True) == expected[2:]


def test_samplers_with_their_own_generators_resume():
    class Sampler(torch.utils.data.Sampler):
        def __init__(self):
            self.rng = np.random.default_rng(4)

        def __len__(self):
            return 12

        def __iter__(self):
            return iter(self.rng.permutation(12).tolist())

    def fresh():
        return Batches(torch.utils.data.DataLoader(torch.arange(12), batch_size=2, sampler=Sampler()))

    plain = fresh()
    expected = [[b.tolist() for b in plain] for _ in range(3)]
    batches = fresh()
    list(batches)
    reading = iter(batches)
    begun = [next(reading).tolist() for _ in range(2)]
    again = fresh()
    again.load_state_dict(batches.state_dict())
    assert [begun + [b.tolist() for b in again], [b.tolist() for b in again]] == expected[1:]


def test_lbfgs_resumes_with_the_same_bits(tmp_path):
    """Its products depend on how its state lies in memory."""
    def run(folder, upto, total):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.Tanh(), torch.nn.Linear(13, 3))
        x, y = torch.randn(31, 7), torch.randn(31, 3)
        parts = {"model": model, "optimizer": torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=5)}
        at = resume(folder, parts).get("step", 0)

        def closure():
            parts["optimizer"].zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            return loss

        for step in range(at, upto):
            parts["optimizer"].step(closure)
        lowtide.checkpoint(folder, parts, save=True, step=upto)
        return [p.detach().clone() for p in model.parameters()] if upto == total else None

    expected = run(tmp_path / "a", 12, 12)
    for upto in (3, 6, 12):
        found = run(tmp_path / "b", upto, 12)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_the_first_sigterm_saves_and_the_second_ends_at_once(tmp_path):
    path = script(tmp_path, """
        import sys, time, lowtide
        state = {"log": []}
        lowtide.checkpoint.resume(sys.argv[1], state)
        print("ready", flush=True)
        for step in range(1000):
            time.sleep(float(sys.argv[2]))
            lowtide.checkpoint(sys.argv[1], state, step=step)
    """)
    for pause, code in (("0.1", 75), ("100000", -signal.SIGTERM)):
        process = subprocess.Popen([sys.executable, path, tmp_path / pause, pause], stdout=subprocess.PIPE, text=True)
        process.stdout.readline()
        process.terminate()
        if code != 75:  # two that come too fast are one to Python: again until it has ended
            until(lambda: process.poll() is not None or process.terminate())
        assert process.wait(PATIENCE) == code


# --- ranks ----------------------------------------------------------------------------------------------------------------

RANKS = r"""
    import os, sys, signal, warnings
    import torch, torch.distributed as dist
    import lowtide
    from lowtide.checkpoint import Store
    from lowtide.base.errors import CheckpointError
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    folder, act = sys.argv[1], sys.argv[2]
    torch.manual_seed(rank)
    state = {"x": torch.full((1000,), float(rank)), "log": []}
    if act == "save":
        for step in range(3):
            state["x"] += 10
            lowtide.checkpoint(Store(folder, keep_last=3), state, save=True, step=step)
    elif act == "damage":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            at = lowtide.checkpoint.resume(folder, state)
        os.write(1, (" ".join(map(str, ("rank", rank, at["step"], state["x"][0].item()))) + "\n").encode())
    elif act == "fail":
        store = Store(folder, keep_last=3)
        if rank == 1:
            import shutil
            import lowtide.checkpoint.part_files as module
            def fails(*_): raise OSError(28, "No space left on device")
            if sys.argv[3] == "sync":
                module.sync = fails
            else:
                shutil.disk_usage = lambda _: type("Usage", (), {"free": 0})
        try:
            store.save({"x": torch.ones(10)})
        except CheckpointError as error:
            os.write(1, (" ".join(map(str, ("rank", rank, "another rank" in str(error), "disk is full" in str(error), [s.number for s in store.saved()]))) + "\n").encode())
    elif act == "stop":
        for step in range(1000):
            if step == 7 and rank == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            try:
                lowtide.checkpoint(folder, state, step=step)
            except SystemExit as end:
                os.write(1, (" ".join(map(str, ("rank", rank, "stops at", step, end.code))) + "\n").encode())
                raise
"""


def torchrun(path, *arguments):
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", path, *map(str, arguments)],
        capture_output=True, text=True, timeout=TIMEOUT, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return sorted(line for line in done.stdout.splitlines() if line.startswith("rank")), done


@pytest.mark.long
def test_ranks_decide_together_which_checkpoint_is_whole(tmp_path):
    """If one rank's file of the newest checkpoint is damaged, both ranks load the one before. One process cannot load what two
    ranks saved.
    """
    path = script(tmp_path, RANKS)
    torchrun(path, tmp_path / "c", "save")
    assert [s.world for s in Store(tmp_path / "c").saved()] == [2, 2, 2]
    said, _ = torchrun(path, tmp_path / "c", "damage")
    assert said == ["rank 0 2 30.0", "rank 1 2 31.0"]
    part = next((tmp_path / "c" / "0000000003" / "rank-1").glob("*.safetensors"))
    part.write_bytes(b"")  # one rank's file of the newest: both take the one before
    said, _ = torchrun(path, tmp_path / "c", "damage")
    assert said == ["rank 0 1 20.0", "rank 1 1 21.0"]
    with pytest.raises(CheckpointError, match="saved by 2 ranks"):
        Store(tmp_path / "c").load()


@pytest.mark.long
@pytest.mark.parametrize("failing", ["sync", "space"])
def test_if_one_rank_cannot_save_no_checkpoint_is_written(tmp_path, failing):
    path = script(tmp_path, RANKS)
    torchrun(path, tmp_path / "c", "save")
    said, done = torchrun(path, tmp_path / "c", "fail", failing)
    assert said == ["rank 0 True True [1, 2, 3]", "rank 1 False True [1, 2, 3]"], done.stderr


@pytest.mark.long
def test_one_ranks_request_stops_all_at_the_same_step(tmp_path):
    said, _ = torchrun(script(tmp_path, RANKS), tmp_path / "c", "stop")
    assert said == ["rank 0 stops at 7 75", "rank 1 stops at 7 75"]
    assert Store(tmp_path / "c").saved()[0].world == 2


LEAVING = r"""
    import atexit, os, sys
    import torch, torch.distributed as dist
    import lowtide
    dist.init_process_group("gloo")
    groups = dist.distributed_c10d._world.pg_map
    def at_exit():
        os.write(1, f"rank {dist.get_rank()} {len(groups)}\n".encode())
    atexit.register(at_exit)
    lowtide.checkpoint(sys.argv[1], {"at": [0]})
    assert len(groups) == 2
"""


@pytest.mark.long
def test_the_process_group_for_decisions_is_destroyed_at_exit(tmp_path):
    said, done = torchrun(script(tmp_path, LEAVING), tmp_path / "c")
    assert said == ["rank 0 1", "rank 1 1"], done.stderr


SHARDED = r"""
    import os, sys
    import torch, torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    import lowtide
    dist.init_process_group("gloo")
    folder, last, mesh_kind = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,)) if mesh_kind == "flat" else init_device_mesh("cpu", (1, 2), mesh_dim_names=("copies", "parts"))
    model = torch.nn.Sequential(torch.nn.Linear(17, 33), torch.nn.Dropout(0.2), torch.nn.Linear(33, 5))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(100 + dist.get_rank())
    state = {"model": model, "optimizer": optimizer}
    at = lowtide.checkpoint.resume(folder, state)
    for step in range(at.get("step", -1) + 1, last):
        model(torch.randn(8, 17)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        lowtide.checkpoint(folder, state, save=step == 2, step=step)
    held = [*model.parameters(), *(v for s in optimizer.state.values() for k, v in s.items() if k != "step")]
    assert all(isinstance(t, DTensor) for t in held)
    numbers = " ".join(t.full_tensor().double().sum().item().hex() for t in held)
    os.write(1, f"rank {dist.get_rank()} {at.get('step')} {len(held)} {numbers}\n".encode())
    dist.destroy_process_group()
"""


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["flat", "copies"])
def test_sharded_parameters_and_states_are_restored_on_each_rank(tmp_path, mesh):
    """Training that resumes after step 2 ends with the same numbers as without a stop."""
    path = script(tmp_path, SHARDED)
    whole, done = torchrun(path, tmp_path / "whole", 6, mesh)
    assert [line.split()[:4] for line in whole] == [["rank", str(r), "None", "12"] for r in range(2)], done.stderr
    torchrun(path, tmp_path / "c", 3, mesh)
    again, done = torchrun(path, tmp_path / "c", 6, mesh)
    assert [line.split()[2] for line in again] == ["2", "2"], done.stderr
    assert [line.split()[3:] for line in again] == [line.split()[3:] for line in whole]


@pytest.mark.long
def test_sharded_tensors_without_a_process_group_are_one_clear_error(tmp_path):
    path = script(tmp_path, SHARDED)
    torchrun(path, tmp_path / "c", 3, "flat")
    folder = next((tmp_path / "c").glob("0*"))
    layout = next(v for v in _values(json.loads((folder / "rank-0" / "state.json").read_text())) if v.get("!") == "sharded")["layout"]
    assert layout["placements"] == [["shard", 0]]
    with pytest.raises(StateError, match="initialize the process group"):
        assembled(layout, None)


def _values(tree):
    for item in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        if isinstance(item, dict):
            yield item
        yield from _values(item)
