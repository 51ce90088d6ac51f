"""Readers: slices in order or shuffled, bounded memory, processes that are replaced, no sample lost or doubled."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import textwrap

from patience import gone, until
import cloudpickle
import h5py
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import zarr

import lowtide
from lowtide.data import Arrays, Blocks, dataset, isolate, stream
from lowtide.data.reader_processes import LENT
from lowtide.data.source import gathers
from lowtide.data.wire import Slot, receive, send
from lowtide.base.errors import ReaderError
from lowtide.base.units import MIB

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # readers need not import what this module does
TOTAL = 1000
WHOLE = np.arange(TOTAL * 6, dtype=np.float64).reshape(TOTAL, 2, 3)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    np.save(folder / "x.npy", WHOLE)
    np.save(folder / "f.npy", np.asfortranarray(WHOLE))
    with h5py.File(folder / "x.h5", "w") as file:
        file.create_dataset("deep/d", data=WHOLE, chunks=(64, 2, 3))
    group = zarr.open_group(str(folder / "x.zarr"), mode="w")
    group.create_array("d", data=WHOLE, chunks=(64, 2, 3))
    flat = WHOLE.reshape(TOTAL, 6)
    pq.write_table(pa.table({"a": flat[:, 0], "b": flat[:, 1], "l": list(flat)}), folder / "x.parquet", row_group_size=130)
    return folder


def sources(files, **options):
    return {
        "npy": lowtide.data.open(files / "x.npy", **options),
        "fortran": lowtide.data.open(files / "f.npy", **options),
        "hdf5": lowtide.data.open(files / "x.h5", "deep/d", **options),
        "zarr": lowtide.data.open(files / "x.zarr", "d", **options),
    }


KINDS = ("npy", "fortran", "hdf5", "zarr")

# --- sources --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bounds", [(0, TOTAL), (0, 1), (63, 65), (990, 1000), (5, 5)])
def test_a_slice_equals_what_was_written(files, kind, bounds):
    """Of every format; `dtype` converts it."""
    source = sources(files)[kind]
    found = source.read(*bounds)
    assert (len(source), source.sample_bytes) == (TOTAL, 48)
    assert found.dtype == np.float64 and np.array_equal(found, WHOLE[slice(*bounds)])
    assert found.flags.writeable and found.base is None
    half = sources(files, dtype="float32")[kind]
    assert half.sample_bytes == 24
    assert half.read(*bounds).dtype == np.float32 and np.array_equal(half.read(*bounds), WHOLE[slice(*bounds)].astype(np.float32))


@pytest.mark.parametrize("bounds", [(0, TOTAL), (129, 131), (0, 1), (400, 400), (999, 1000)])
def test_columns_of_parquet_are_read_as_arrays(files, bounds):
    flat = WHOLE.reshape(TOTAL, 6)[slice(*bounds)]
    assert np.array_equal(lowtide.data.open(files / "x.parquet", "a").read(*bounds), flat[:, 0])
    assert np.array_equal(lowtide.data.open(files / "x.parquet", ["b", "a"], dtype="float32").read(*bounds), flat[:, [1, 0]])
    assert np.array_equal(lowtide.data.open(files / "x.parquet", "l").read(*bounds), flat)


def test_a_source_is_pickled_without_its_file_handle(files):
    for source in (*sources(files).values(), lowtide.data.open(files / "x.parquet", "a")):
        source.read(0, 3)
        assert np.array_equal(pickle.loads(pickle.dumps(source)).read(5, 9), source.read(5, 9))


@pytest.mark.parametrize(("name", "key", "text"), [
    ("missing.npy", None, "no such data"), ("x.h5", None, "name the data set to read: deep/d"), ("x.h5", "no", "cannot be read"),
    ("x.parquet", "no", "there are a, b, l"), ("x.npy", "d", "without a name"), ("x.csv", None, "unknown file format"), ("bad.h5", "d", "cannot be read"),
])
def test_data_that_cannot_be_read_is_an_error_with_the_reason(files, name, key, text):
    (files / "x.csv").touch()
    (files / "bad.h5").write_bytes(b"no")
    with pytest.raises(ReaderError, match=text):
        lowtide.data.open(files / name, key)


# --- blocks ---------------------------------------------------------------------------------------------------------------


def order(batches):
    return np.concatenate([np.asarray(b)[:, 0, 0] for b in batches]) // 6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("batch", "block"), [(7, 64), (64, 7), (1000, 10), (3000, 100), (1, 1)])
@pytest.mark.parametrize("shuffle", [False, True])
def test_each_sample_is_read_once_per_epoch(files, kind, batch, block, shuffle):
    """Shuffled epochs differ from each other."""
    if (batch, block) == (1, 1) and kind != "npy":
        pytest.skip("slow there, and the same code")
    blocks = Blocks(sources(files)[kind], batch_size=batch, block=block, shuffle=shuffle, seed=3, buffer=block * 48 * 8)
    found = list(blocks)
    assert len(found) == len(blocks) == -(-TOTAL // batch)
    assert all(len(b) == batch for b in found[:-1])
    seen = order(found)
    assert sorted(seen) == list(range(TOTAL))
    assert (list(seen) == list(range(TOTAL))) is not shuffle
    if shuffle:
        assert list(order(blocks)) != list(seen), "each epoch has an order of its own"


def test_an_incomplete_batch_may_be_dropped(files):
    blocks = Blocks(sources(files)["npy"], batch_size=300, drop_last=True)
    assert [len(b) for b in blocks] == [300, 300, 300] and len(blocks) == 3


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("cut", [0, 1, 5, 14, 15])
def test_an_epoch_resumes_where_it_was_saved(files, shuffle, cut):
    def fresh():
        return Blocks(sources(files)["npy"], batch_size=70, block=30, shuffle=shuffle, seed=1, buffer=30 * 48 * 6)

    plain = fresh()
    expected = [order(plain), order(plain)]
    first = fresh()
    reading = iter(first)
    begun = list(itertools.islice(reading, cut))
    again = fresh()
    again.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
    rest = list(again)
    assert np.array_equal(order([*begun, *rest]), expected[0])
    assert np.array_equal(order(again), expected[1])


def test_batches_do_not_share_memory(files):
    batches = list(Blocks(sources(files)["npy"], batch_size=10, block=100))
    batches[0][:] = -1
    assert order(batches[1:])[0] == 10


def test_several_sources_are_read_in_step(files):
    """Sources of different lengths are refused."""
    both = Arrays(lowtide.data.open(files / "x.npy"), lowtide.data.open(files / "x.parquet", "a"))
    for x, a in Blocks(both, batch_size=33, shuffle=True, block=20, buffer=20 * 56 * 6):
        assert np.array_equal(x[:, 0, 0], a)
    with pytest.raises(ReaderError, match="samples"):
        Arrays(lowtide.data.open(files / "x.npy"), Short(3))


class Short:
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length


def test_a_buffer_that_is_too_small_is_refused(files):
    with pytest.raises(ReaderError, match="larger buffer"):
        Blocks(sources(files)["npy"], batch_size=10, shuffle=True, block=100, buffer=48 * 300)


WIDE = np.arange(700 * 5000, dtype=np.float64).reshape(700, 5000)


@pytest.mark.parametrize("of", ["one", "converted", "two", "one of them buffered"])
def test_large_samples_are_drawn_from_the_file_in_the_buffered_order(tmp_path, monkeypatch, of):
    """The batches are the same, in the same order, wherever an epoch is resumed."""
    np.save(tmp_path / "x.npy", WIDE)
    np.save(tmp_path / "y.npy", np.arange(700))
    np.save(tmp_path / "f.npy", np.asfortranarray(WIDE[:, :2]))
    x = lowtide.data.open(tmp_path / "x.npy", dtype="float32" if of == "converted" else None)
    beside = {"two": "y.npy", "one of them buffered": "f.npy"}.get(of)
    source = x if beside is None else Arrays(x, lowtide.data.open(tmp_path / beside))

    def batches(start):
        blocks = Blocks(source, batch_size=48, block=20, shuffle=True, seed=3, buffer=20 * source.sample_bytes * 6)
        blocks.load_state_dict({"epoch": 1, "given": start})
        return [b if isinstance(b, tuple) else (b,) for b in blocks]

    drawn = {start: batches(start) for start in (0, 5, 14)}
    assert gathers(source) is (of != "one of them buffered")
    monkeypatch.setattr("lowtide.data.source.ONE_BY_ONE_BYTES", 1 << 30)
    assert not gathers(source)
    for start, found in drawn.items():
        buffered = batches(start)
        assert len(buffered) == len(found) == 15 - start
        assert all(np.array_equal(a, b) for x, y in zip(buffered, found, strict=True) for a, b in zip(x, y, strict=True))
        assert [a.dtype for a in found[0]] == [a.dtype for a in buffered[0]] if found else True


def test_a_truncated_file_is_an_error(tmp_path):
    """Truncated after it was opened: neither a slice nor a sample is invented."""
    np.save(tmp_path / "x.npy", WIDE)
    source = lowtide.data.open(tmp_path / "x.npy")
    os.truncate(tmp_path / "x.npy", 300 * 5000 * 8)
    for shuffle in (False, True):
        blocks = Blocks(source, batch_size=10, block=10, shuffle=shuffle, buffer=60 * source.sample_bytes)
        with pytest.raises(ReaderError, match=r"x\.npy: truncated at byte"):
            list(blocks)


@pytest.mark.parametrize("row", [512, 8192])
@pytest.mark.parametrize("shuffle", [False, True])
def test_memory_stays_within_the_buffer(tmp_path, shuffle, row):
    """A file of 400 MiB and a buffer of 32 MiB: peak resident memory grows by less than 40 MiB above that of reading one
    sample.
    """
    path = tmp_path / "read.py"
    path.write_text(textwrap.dedent("""
        import resource, sys
        import numpy as np
        import lowtide.data
        ROW = int(sys.argv[3])
        whole = np.lib.format.open_memmap(sys.argv[1] + "/x.npy", mode="w+", dtype=np.float64, shape=(100_000 * 512 // ROW, ROW))
        del whole
        source = lowtide.data.open(sys.argv[1] + "/x.npy", dtype="float32")
        blocks = lowtide.data.Blocks(source, batch_size=256 * 512 // ROW, shuffle=sys.argv[2] == "True", buffer="32MiB")
        source.read(0, 1)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        count = sum(len(b) for b in blocks)
        print(count, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
    """))
    done = subprocess.run([sys.executable, path, tmp_path, str(shuffle), str(row)], capture_output=True, text=True, check=True)
    count, grown = done.stdout.split()
    assert int(count) == 100_000 * 512 // row
    assert float(grown) < 40


# --- torch ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_torchs_loader_reads_samples_and_streams_of_batches(files, workers):
    source = lowtide.data.open(files / "x.h5", "deep/d", dtype="float32")
    loader = torch.utils.data.DataLoader(dataset(source), batch_size=64, shuffle=True, num_workers=workers)
    found = torch.cat(list(loader))
    assert found.dtype == torch.float32 and sorted(found[:, 0, 0].tolist()) == (WHOLE[:, 0, 0]).tolist()
    blocks = Blocks(source, batch_size=64, shuffle=not workers, block=32, buffer=32 * 24 * 8)
    streamed = torch.cat(list(torch.utils.data.DataLoader(stream(blocks), batch_size=None, num_workers=workers)))
    assert sorted(streamed[:, 0, 0].tolist()) == (WHOLE[:, 0, 0]).tolist()


def test_a_stream_resumes_inside_an_epoch(files):
    def fresh():
        source = lowtide.data.open(files / "x.npy")
        return stream(Blocks(source, batch_size=64, shuffle=True, block=32, buffer=32 * 48 * 8))

    expected = torch.cat(list(fresh()))
    first = fresh()
    reading = iter(first)
    begun = list(itertools.islice(reading, 5))
    rest = fresh()
    rest.load_state_dict(first.state_dict())
    assert torch.equal(torch.cat([*begun, *rest]), expected)


# --- processes that are replaced ------------------------------------------------------------------------------------------


class Leaky:
    """Keeps 256 KiB for each sample it reads."""

    def __init__(self, length=400, leak=256 * 1024):
        self.length, self.leak, self.kept = length, leak, []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index < 0 or index >= self.length:
            raise IndexError(index)
        self.kept.append(b"x" * self.leak)
        return np.full(3, index), random.random()


def test_a_leaking_data_set_is_read_in_processes_of_bounded_memory():
    """They are replaced, and random numbers go on from process to process."""
    with_leak = isolate(Leaky(), memory="60MiB")
    own = psutil.Process().memory_info().rss
    random.seed(5)
    found = [with_leak[i] for i in range(400)]  # 100 MiB are leaked
    assert psutil.Process().memory_info().rss - own < 20 * MIB
    assert [int(x[0]) for x, _ in found] == list(range(400))
    assert with_leak.started >= 3
    assert with_leak.highest_bytes < 70 * MIB
    random.seed(5)
    assert [r for _, r in found] == [random.random() for _ in range(400)], "random numbers go on from process to process"
    with_leak.close()


def test_no_reader_process_is_left_behind(tmp_path):
    """Neither when the data set is deleted, nor when the process that reads is killed."""
    before = {c.pid for c in psutil.Process().children(recursive=True)}
    data = isolate(Leaky(), memory="80MiB")
    data[0]
    assert {c.pid for c in psutil.Process().children(recursive=True)} - before
    del data
    assert not {c.pid for c in psutil.Process().children(recursive=True) if c.status() != psutil.STATUS_ZOMBIE} - before
    path = tmp_path / "killed.py"
    path.write_text("import numpy as np, os, signal, psutil\nimport lowtide.data\nd = lowtide.data.isolate([1, 2, 3])\nd[0]\n"
                    "print([c.pid for c in psutil.Process().children()][0], flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n")
    pid = int(subprocess.run([sys.executable, path], capture_output=True, text=True, check=False).stdout)
    until(lambda: gone(pid))


def test_torchs_loader_reads_an_isolated_data_set(files):
    for workers in (0, 2):
        data = isolate(Leaky(), memory="80MiB")
        loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True, num_workers=workers)
        found = torch.cat([x for x, _ in loader])
        assert sorted(found[:, 0].tolist()) == list(range(400))
        data.close()


@pytest.mark.parametrize("shuffle", [False, True])
def test_an_isolated_stream_gives_each_batch_once_despite_kills(files, shuffle):
    """Readers that grow are replaced, and readers that are killed are started again."""
    def fresh():
        return Blocks(LeakySource(files / "x.npy"), batch_size=20, block=10, shuffle=shuffle, seed=2, buffer=10 * 48 * 8)

    plain = fresh()
    expected = [order(plain), order(plain)]
    data = isolate(fresh(), memory="60MiB")
    random.seed(1)
    for epoch in range(2):
        found = []
        for i, batch in enumerate(data):
            found.append(batch)
            if i % 17 == 5:
                for child in psutil.Process().children():
                    with contextlib.suppress(psutil.Error):
                        if "lowtide.data.worker" in child.cmdline():
                            child.send_signal(signal.SIGKILL)
        assert np.array_equal(order(found), expected[epoch])
    assert data.started > 4
    data.close()


def _lies_on(array):
    """The object that owns an array's memory."""
    while isinstance(array, np.ndarray):
        array = array.base
    return array.obj if isinstance(array, memoryview) else array


def test_batches_in_shared_memory_stay_valid_while_referenced(files):
    """Batches are not copied: they lie in shared memory, which is reused only once nothing refers to them. A script that keeps
    many gets copies.
    """
    data = isolate(Blocks(lowtide.data.open(files / "x.npy"), batch_size=20), memory="200MiB")
    places = []
    for i, batch in enumerate(data):
        assert np.array_equal(batch, WHOLE[20 * i : 20 * i + 20])
        batch[:] = -1  # it is the script's own
        places.append(_lies_on(batch))
    assert all(isinstance(place, mmap.mmap) for place in places)
    assert len({id(place) for place in places}) <= LENT
    del batch
    kept = list(data)
    tensors = [torch.from_numpy(batch[3:4]) for batch in kept[:3]]
    assert sum(isinstance(_lies_on(batch), mmap.mmap) for batch in kept) == LENT
    assert np.array_equal(order(kept), order(WHOLE.reshape(50, 20, 2, 3)))
    del kept
    again = list(data)
    data.close()
    assert np.array_equal(order(again), order(WHOLE.reshape(50, 20, 2, 3)))
    assert [t[0, 0, 0].item() for t in tensors] == [18.0, 138.0, 258.0], "a view of a batch keeps its memory"


@pytest.mark.parametrize("size", [16, 20])
@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_are_read_directly_into_shared_memory(files, shuffle, size):
    """This saves one copy where a batch is a group of its own. The batches are those read without it, also of two sources at
    once, and wherever an epoch is resumed.
    """
    def fresh():
        both = Arrays(lowtide.data.open(files / "x.npy"), lowtide.data.open(files / "x.h5", "deep/d", dtype="float32"))
        return Blocks(both, batch_size=size, block=size, shuffle=shuffle, seed=3, buffer=12 * size * 72)

    slot, placed = Slot(), 0
    ours, theirs = multiprocessing.Pipe()
    plain = fresh()
    for number, (expected, found) in enumerate(zip(plain, _each_in(fresh(), slot), strict=True)):
        before = slot._used
        send(ours, slot, found)
        placed += slot._used == before
        again = receive(theirs, slot)
        assert all(np.array_equal(a, b) for a, b in zip(expected, again, strict=True)), number
    if size == 20 or not shuffle:  # 16 does not divide 1000: a batch put together from two groups is copied
        assert placed == len(plain)
    data = isolate(fresh(), memory="200MiB")
    state, kept = None, []
    for epoch in range(2):
        for number, batch in enumerate(data):
            kept.append(batch)
            if epoch == 0 and number == 20:
                state = data.state_dict()
    other = isolate(fresh(), memory="200MiB")
    other.load_state_dict(state)
    rest = list(other)
    assert len(rest) == len(plain) - 21
    expected = [*fresh()]
    assert all(np.array_equal(a, b) for x, y in zip(expected, kept, strict=False) for a, b in zip(x, y, strict=True))
    assert all(np.array_equal(a, b) for x, y in zip(expected[21:], rest, strict=True) for a, b in zip(x, y, strict=True))
    data.close()
    other.close()


def _each_in(blocks, slot):
    """Batches, each read into the slot from its beginning."""
    iterator = iter(blocks)
    while True:
        slot.begin()
        blocks.allocate = slot.array
        try:
            yield next(iterator)
        except StopIteration:
            return


class LeakySource:
    """A source that keeps a MiB for each block it reads."""

    def __init__(self, path):
        self.source, self.kept = lowtide.data.open(path), []

    def __len__(self):
        return len(self.source)

    @property
    def sample_bytes(self):
        return self.source.sample_bytes

    def read(self, start, stop):
        self.kept.append(b"x" * MIB)
        return self.source.read(start, stop)


def test_an_isolated_stream_can_be_left_saved_and_resumed(files):
    """The saved position is that of the batches given, not of those read ahead."""
    def fresh():
        return isolate(Blocks(lowtide.data.open(files / "x.npy"), batch_size=20, shuffle=True, block=10, buffer=10 * 48 * 8), memory="200MiB")

    plain = fresh()
    expected = [order(plain), order(plain)]
    data = fresh()
    reading = iter(data)
    begun = list(itertools.islice(reading, 7))
    state = data.state_dict()  # of the batches given, not of those read ahead
    again = fresh()
    again.load_state_dict(state)
    assert np.array_equal(order([*begun, *again]), expected[0])
    assert np.array_equal(order(again), expected[1])
    reading.close()  # left: the next is a whole epoch, as the blocks' own would be
    assert np.array_equal(order(data), expected[1])
    for one in (plain, data, again):
        one.close()


def test_blocks_left_inside_an_epoch_begin_a_whole_one(files):
    def fresh():
        return Blocks(lowtide.data.open(files / "x.npy"), batch_size=70, shuffle=True, block=30, buffer=30 * 48 * 6)

    plain = fresh()
    expected = [order(plain), order(plain)]
    blocks = fresh()
    for _ in blocks:
        break
    assert np.array_equal(order(blocks), expected[1])
    with pytest.raises(ReaderError, match="iterated again"):
        list(zip(blocks, blocks))


def test_other_requests_do_not_disturb_an_iteration(files):
    data = isolate(Readable(Both(files / "x.npy"), batch_size=20), memory="200MiB")
    found = []
    for batch in data:
        found.append(batch)
        assert data.read(3, 4)[0, 0, 0] == 18
    assert list(order(found)) == list(range(TOTAL))
    data.close()


class Readable:
    """Blocks that can be read by slices too."""

    def __init__(self, source, batch_size):
        self.blocks, self.read = Blocks(source, batch_size=batch_size), source.read

    def __iter__(self):
        return iter(self.blocks)

    def state_dict(self):
        return self.blocks.state_dict()

    def load_state_dict(self, state):
        self.blocks.load_state_dict(state)


class Both:

    def __init__(self, path):
        self.source = lowtide.data.open(path)

    def __len__(self):
        return len(self.source)

    @property
    def sample_bytes(self):
        return 48

    def read(self, start, stop):
        return self.source.read(start, stop)


def test_closing_twice_does_not_close_other_files():
    data = isolate(Leaky(), memory="200MiB")
    data[0]
    data.close()
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(20)]
    data.close()
    del data
    for file in opened:
        os.fstat(file)
        os.close(file)


def test_a_sample_that_cannot_be_pickled_is_an_error_and_reading_goes_on():
    """Also one that cannot be unpickled; the next request is answered by the same process."""
    data = isolate(Odd(), memory="200MiB")
    with pytest.raises((TypeError, ReaderError), match="pickle"):
        data[0]
    with pytest.raises(ZeroDivisionError):
        data[1]
    assert data[2] == 2
    assert data.started == 1
    data.close()


def crash():
    return 1 // 0


class Fragile:
    def __reduce__(self):
        return crash, ()


class Odd(Leaky):
    def __getitem__(self, index):
        import threading

        return threading.Lock() if index == 0 else Fragile() if index == 1 else index


def test_threads_share_one_isolated_data_set():
    from concurrent.futures import ThreadPoolExecutor

    data = isolate(Leaky(leak=10), memory="200MiB")
    with ThreadPoolExecutor(4) as pool:
        assert [int(x[0]) for x, _ in pool.map(data.__getitem__, range(200))] == list(range(200))
    data.close()


def test_random_samples_of_an_isolated_data_set_resume_inside_an_epoch():
    def epoch(position=None, stop=None):
        random.seed(3)
        torch.manual_seed(3)
        data = isolate(Leaky(40, leak=10), memory="200MiB")
        batches = lowtide.checkpoint.Batches(torch.utils.data.DataLoader(data, batch_size=4, shuffle=True))
        if position is not None:
            batches.load_state_dict(position)
        found, saved = [], None
        for x, r in batches:
            found.append((x[:, 0].tolist(), r.tolist()))
            if len(found) == stop:
                saved = batches.state_dict()
        data.close()
        return found, saved

    expected, position = epoch(stop=3)
    assert epoch(position)[0] == expected[3:]


def test_batches_of_blocks_resume_in_the_right_epoch(files):
    def fresh():
        blocks = Blocks(lowtide.data.open(files / "x.npy"), batch_size=70, shuffle=True, block=30, buffer=30 * 48 * 6)
        return lowtide.checkpoint.Batches(torch.utils.data.DataLoader(stream(blocks), batch_size=None))

    plain = fresh()
    expected = [order(plain) for _ in range(3)]
    first = fresh()
    order(first)
    reading = iter(first)
    begun = list(itertools.islice(reading, 4))
    again = fresh()
    again.load_state_dict(first.state_dict())
    assert np.array_equal(order([*begun, *again]), expected[1])
    assert np.array_equal(order(again), expected[2])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bounds", [(-1, 0), (990, 1001), (5, 4)])
def test_a_slice_beyond_the_data_is_an_error(files, kind, bounds):
    with pytest.raises(IndexError):
        sources(files)[kind].read(*bounds)
    with pytest.raises(IndexError):
        dataset(sources(files)[kind]).__getitems__([0, -1])


@pytest.mark.parametrize(("column", "text"), [
    (pa.array([1, None, 3]), "missing"), (pa.array([[1, 2], None, [3, 4]]), "missing"), (pa.array([[1, 2, 3], [4], [5, 6]]), "differ in length"),
    (pa.array([[1, 2], [None, 3], [4, 5]]), "missing"), (pa.array(["a", "b", "c"]), "not numbers"),
])
def test_columns_that_are_not_arrays_are_refused(tmp_path, column, text):
    pq.write_table(pa.table({"x": column}), tmp_path / "x.parquet")
    with pytest.raises(ReaderError, match=text):
        lowtide.data.open(tmp_path / "x.parquet", "x").read(0, 3)


def test_conversion_is_the_same_for_slices_and_shuffled_reads(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["d"] = np.array([300, -1, 5, 1000] * 20, dtype=np.int16)
    source = lowtide.data.open(tmp_path / "x.h5", "d", dtype="uint8")
    shuffled = np.concatenate(list(Blocks(source, batch_size=10, shuffle=True, block=10, buffer=100)))
    assert sorted(shuffled) == sorted(source.read(0, 80)) == sorted(np.array([300, -1, 5, 1000] * 20, dtype=np.int16).astype(np.uint8))


def test_a_request_that_kills_its_reader_twice_is_an_error():
    with pytest.raises(ReaderError, match="died 2 times"):
        isolate(Deadly(), memory="200MiB")[3]


class Deadly(Leaky):
    def __getitem__(self, index):
        os._exit(1)


def test_an_error_of_the_data_set_is_raised_with_its_traceback():
    """The next request is answered by the same process."""
    data = isolate(Broken(), memory="200MiB")
    with pytest.raises(KeyError, match="sample 3") as caught:
        data[3]
    assert any("in __getitem__" in note for note in caught.value.__notes__)
    assert data[1] == 1  # reading goes on
    assert data.started == 1
    data.close()


class Broken(Leaky):
    def __getitem__(self, index):
        if index == 3:
            raise KeyError("sample 3")
        return index


def test_a_memory_bound_below_a_fresh_process_is_an_error():
    with pytest.raises(ReaderError, match="more than its limit"):
        isolate(Leaky(), memory="4MiB")[0]


def test_a_memory_bound_just_above_a_fresh_process_is_warned_about():
    """The reader is replaced after every few samples: reading goes on, slowly, and a warning says why."""
    roomy = isolate(Leaky(), memory="200MiB")
    assert len(roomy[0]) == 2
    fresh = roomy.highest_bytes
    roomy.close()
    data = isolate(Leaky(leak=MIB), memory=fresh + 3 * MIB)
    with pytest.warns(RuntimeWarning, match=r"replaced about every \d items: it grows from") as said:
        assert [int(data[i][0][0]) for i in range(40)] == list(range(40))
    assert len(said) == 1
    assert data.started > 4
    data.close()


def test_an_iterator_without_a_position_is_refused():
    """Another process could not continue it."""
    with pytest.raises(ReaderError, match="position cannot be saved"):
        isolate(iter([1, 2, 3]))
