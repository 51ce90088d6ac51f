"""Programs that are known to leak, or known not to: ``python programs.py NAME SEED`` runs one for 400 steps.

Each takes its sizes from the seed, so that no two runs are the same. Leaks grow by about 2 KiB a step, twice the
tolerance, unless what leaks comes in larger pieces. Those of ``HELD_OUT`` were never looked at while thresholds were set.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import gc
import heapq
import io
import logging
import mmap
import multiprocessing
import multiprocessing.shared_memory
import queue
import random
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import lowtide

STEPS = 400
KIB = 1024


@dataclass(frozen=True)
class Program:
    """One program: what it is known to do.

    Attributes:
        label: ``leak``, ``clean``, or ``bounded`` (grows, then is flat: clean with a note).
        bucket: where a leak's bytes lie: ``python``, ``heap``, ``maps``, ``shared``, ``files``, ``workers``.
        held_out: whether it was never tuned on.
    """

    run: Callable[[random.Random], None]
    label: str
    bucket: str
    held_out: bool


PROGRAMS: dict[str, Program] = {}


def program(label: str, bucket: str = "", *, held_out: bool = False) -> Callable[[Any], Any]:
    """Enter a function into the suite."""

    def enter(run: Callable[[random.Random], None]) -> Callable[[random.Random], None]:
        PROGRAMS[run.__name__] = Program(run, label, bucket, held_out)
        return run

    return enter


def steps() -> Iterator[int]:
    """The loop of a program without torch."""
    for step in range(STEPS):
        yield step
        lowtide.step()


def work(r: random.Random, rows: int = 0) -> Any:
    """What any step does: a little arithmetic on fresh arrays."""
    n = rows or 64
    a = np.random.default_rng(r.getrandbits(30)).normal(size=(n, 128))
    return (a @ a[:32].T).sum()


# --- without torch: clean -------------------------------------------------------------------------------------------------


@program("clean")
def arrays(r: random.Random) -> None:
    """Fixed sizes."""
    n = r.randint(32, 256)
    for _ in steps():
        work(r, n)


@program("clean", held_out=True)
def arrays_of_many_sizes(r: random.Random) -> None:
    """A batch of another size each step, still held when the step ends."""
    for _ in steps():
        batch = np.ones((r.randint(8, 300), 256))
        work(r, len(batch))


@program("clean")
def python_objects(r: random.Random) -> None:
    """Dictionaries and strings that live for one step."""
    for _ in steps():
        rows = [{"id": i, "text": f"row {i} {r.random()}"} for i in range(r.randint(50, 500))]
        work(r, 1 + len(rows) // 10)


@program("clean")
def ring_buffer(r: random.Random) -> None:
    """A replay buffer that is full after some steps."""
    kept: collections.deque[Any] = collections.deque(maxlen=r.randint(10, 40))
    for _ in steps():
        kept.append(np.ones(r.randint(100, 8000)))
        work(r)


@program("clean", held_out=True)
def bounded_memo(r: random.Random) -> None:
    """A memo of at most 48 entries."""

    @functools.lru_cache(maxsize=48)
    def table(key: int) -> Any:
        return np.full(2000, key)

    for _ in steps():
        for _ in range(8):
            table(r.randint(0, 400))
        work(r)


@program("clean")
def mapped_file(r: random.Random) -> None:
    """A data set read through a map: its pages become resident, and the kernel may take them back."""
    with tempfile.NamedTemporaryFile() as file:
        data = np.memmap(file.name, dtype=np.float32, mode="w+", shape=(STEPS, 4096))
        data.flush()
        del data
        data = np.memmap(file.name, dtype=np.float32, mode="r", shape=(STEPS, 4096))
        for step in steps():
            work(r, 32 + int(data[step].sum()))


@program("clean")
def prefetching_thread(r: random.Random) -> None:
    """A thread that reads ahead by a few batches."""
    ahead: queue.Queue[Any] = queue.Queue(maxsize=r.randint(2, 6))

    def produce() -> None:
        for _ in range(STEPS + 50):
            ahead.put(np.random.default_rng().normal(size=(64, 128)))

    threading.Thread(target=produce, daemon=True).start()
    for _ in steps():
        ahead.get()
        work(r)


class _Node:
    """Something that refers to itself."""

    def __init__(self, size: int) -> None:
        self.me, self.data = self, np.ones(size)


@program("clean")
def cycles(r: random.Random) -> None:
    """Garbage that only the collector frees."""
    for _ in steps():
        for _ in range(20):
            _Node(r.randint(10, 200))
        work(r)


@program("clean", held_out=True)
def history_of_numbers(r: random.Random) -> None:
    """A list of losses: 32 bytes a step, and the list's own jumps."""
    losses, seen = [], {}
    for step in steps():
        losses.append(float(work(r)))
        seen[step] = losses[-1] / 2


@program("clean")
def cache_per_epoch(r: random.Random) -> None:
    """A cache that grows within an epoch and is emptied after it."""
    epoch, kept = r.randint(15, 45), {}
    for step in steps():
        if step % epoch == 0:
            kept.clear()
        kept[step] = np.ones(r.randint(200, 800))
        work(r)


@program("clean", held_out=True)
def late_first_validation(r: random.Random) -> None:
    """Something of some MiB is made once, well into the run, and stays."""
    at, model = r.randint(60, 250), None
    for step in steps():
        if step == at:
            model = np.ones(r.randint(100, 500) * KIB)
        work(r)
    del model


@program("clean")
def strings_and_logging(r: random.Random) -> None:
    """A log that is written, not kept."""
    log = logging.getLogger("quiet")
    log.addHandler(logging.StreamHandler(io.StringIO()))
    log.propagate = False
    for step in steps():
        log.info("step %d loss %f", step, work(r))


@program("clean")
def worker_pool(r: random.Random) -> None:
    """Two workers that answer, and keep nothing."""
    with multiprocessing.get_context("fork").Pool(2) as pool:
        for _ in steps():
            pool.map(abs, range(r.randint(10, 100)))
            work(r)


# --- without torch: leaks -------------------------------------------------------------------------------------------------


@program("leak", "python")
def objects_in_a_list(r: random.Random) -> None:
    """Small objects kept."""
    kept = []
    for step in steps():
        kept.append([{"step": step, "value": r.random()} for _ in range(8)])
        work(r)


@program("leak", "python", held_out=True)
def keys_in_a_dictionary(r: random.Random) -> None:
    """A dictionary that gets new keys only."""
    seen = {}
    for step in steps():
        for i in range(24):
            seen[f"{step}/{i}/{r.random():.4f}"] = (step, i)
        work(r)


@program("leak", "heap")
def arrays_in_a_list(r: random.Random) -> None:
    """Arrays kept."""
    kept = []
    for _ in steps():
        kept.append(np.ones(256))
        work(r, r.randint(32, 64))


@program("leak", "heap", held_out=True)
def arrays_kept_beside_batches_of_many_sizes(r: random.Random) -> None:
    """The same, where each step's own array hides it."""
    kept = []
    for _ in steps():
        batch = np.ones((r.randint(8, 300), 256))
        kept.append(batch[0].copy())
        work(r, len(batch))


@program("leak", "heap")
def native_blocks(r: random.Random) -> None:
    """Blocks of malloc that no Python object knows of."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    for _ in steps():
        ctypes.memset(ctypes.c_void_p(libc.malloc(2 * KIB)), 1, 2 * KIB)
        work(r)


@program("leak", "maps", held_out=True)
def anonymous_maps(r: random.Random) -> None:
    """Pages mapped and kept."""
    kept = []
    for step in steps():
        if step % 2:
            page = mmap.mmap(-1, 4 * KIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            page.write(b"x" * 4 * KIB)
            kept.append(page)
        work(r)


@program("leak", "shared")
def shared_segments(r: random.Random) -> None:
    """Shared memory that is never closed."""
    kept = []
    try:
        for step in steps():
            if step % 2:
                segment = multiprocessing.shared_memory.SharedMemory(create=True, size=4 * KIB)
                segment.buf[:] = b"x" * 4 * KIB
                kept.append(segment)
            work(r)
    finally:
        for segment in kept:
            segment.close()
            segment.unlink()


@program("leak", "files")
def mapped_files(r: random.Random) -> None:
    """A file more is mapped every other step, and read."""
    kept = []
    with tempfile.TemporaryDirectory() as folder:
        for step in steps():
            if step % 2:
                path = Path(folder, str(step))
                path.write_bytes(b"x" * 4 * KIB)
                with path.open("rb") as file:
                    kept.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
                kept[-1].read()
            work(r)


@program("leak", "heap", held_out=True)
def memo_on_a_method(r: random.Random) -> None:
    """A memo without a bound keeps every argument alive."""

    class Model:
        @functools.cache  # noqa: B019 - the leak
        def features(self, key: bytes) -> Any:
            return np.frombuffer(key, dtype=np.uint8).sum()

    model = Model()
    for _ in steps():
        model.features(r.randbytes(2 * KIB))
        work(r)


@program("leak", "heap")
def pieces_of_random_size(r: random.Random) -> None:
    """One step in ten keeps twenty KiB, on average."""
    kept = []
    for _ in steps():
        if r.random() < 0.1:
            kept.append(bytearray(int(r.uniform(10, 30) * KIB)))
        work(r)


@program("leak", "heap", held_out=True)
def something_per_epoch(r: random.Random) -> None:
    """What is kept comes once per short epoch."""
    epoch, kept = r.randint(8, 20), []
    for step in steps():
        if step % epoch == 0:
            kept.append(np.ones(epoch * 256 + 64))
        work(r)


@program("leak", "heap")
def begins_late(r: random.Random) -> None:
    """Nothing for some steps, then two KiB each."""
    at, kept = r.randint(20, 60), []
    for step in steps():
        if step > at:
            kept.append(np.ones(256))
        work(r)


@program("leak", "python", held_out=True)
def log_records(r: random.Random) -> None:
    """A handler that keeps what it is given."""

    class Keeping(logging.Handler):
        """Keeps records."""

        def __init__(self) -> None:
            super().__init__()
            self.kept: list[Any] = []

        def emit(self, record: logging.LogRecord) -> None:
            self.kept.append(record)

    log = logging.getLogger("kept")
    log.setLevel(logging.INFO)
    log.propagate = False
    log.addHandler(Keeping())
    for step in steps():
        for i in range(3):
            log.info("step %d part %d loss %f", step, i, work(r))


@program("leak", "python")
def uncollected_cycles(r: random.Random) -> None:
    """The collector was switched off, and cycles stay."""
    gc.disable()
    for _ in steps():
        for _ in range(12):
            a: dict[str, Any] = {}
            a["me"] = a
        work(r)


@program("bounded", held_out=True)
def memo_that_fills(r: random.Random) -> None:
    """A memo that is full before half of the steps."""
    full, kept = r.randint(60, 110), {}
    for step in steps():
        if len(kept) < full:
            kept[step] = np.ones(1024)
        work(r)


# --- torch ----------------------------------------------------------------------------------------------------------------


def _torch(r: random.Random) -> tuple[Any, Any, Any, Any]:
    import torch

    torch.manual_seed(r.getrandbits(30))
    torch.set_num_threads(1)
    width = r.choice((32, 64, 96))
    model = torch.nn.Sequential(torch.nn.Linear(32, width), torch.nn.ReLU(), torch.nn.Linear(width, 8))
    return torch, model, torch.optim.Adam(model.parameters()), torch.nn.functional.cross_entropy


def _train(r: random.Random, *, each: Callable[..., None] | None = None, sizes: bool = False, model: Any = None) -> None:
    """A training loop; ``each`` is called after a step with (torch, model, optimizer, step, inputs, loss)."""
    torch, plain, optimizer, criterion = _torch(r)
    if model is not None:
        plain = model(torch)
        optimizer = torch.optim.Adam(plain.parameters())
    model = plain
    for step in range(STEPS):
        rows = r.randint(8, 64) if sizes else 16
        x, y = torch.randn(rows, 32), torch.randint(0, 8, (rows,))
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        if each is not None:
            each(torch, model, optimizer, step, x, loss)


@program("clean")
def torch_plain(r: random.Random) -> None:
    """A small network."""
    _train(r)


@program("clean", held_out=True)
def torch_batches_of_many_sizes(r: random.Random) -> None:
    """Another batch size each step."""
    _train(r, sizes=True)


@program("clean", held_out=True)
def torch_evaluates(r: random.Random) -> None:
    """An evaluation now and then, with a larger batch."""

    def each(torch: Any, model: Any, _optimizer: Any, step: int, *_: Any) -> None:
        if step % 40 == 39:
            with torch.no_grad():
                model(torch.randn(2000, 32))

    _train(r, each=each)


@program("clean")
def torch_checkpoints(r: random.Random) -> None:
    """A checkpoint now and then."""

    def each(torch: Any, model: Any, optimizer: Any, step: int, *_: Any) -> None:
        if step % 25 == 24:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, io.BytesIO())

    _train(r, each=each)


@program("clean", held_out=True)
def torch_keeps_the_best(r: random.Random) -> None:
    """A copy of the best state, replaced when a better one comes."""
    best: dict[str, Any] = {}

    def each(_torch: Any, model: Any, _optimizer: Any, step: int, _x: Any, loss: Any) -> None:
        if not best or loss.item() < best["loss"]:
            best.update(loss=loss.item(), step=step, state={k: v.clone() for k, v in model.state_dict().items()})

    _train(r, each=each)


@program("clean")
def torch_running_average(r: random.Random) -> None:
    """Losses as numbers, a moving average as a tensor without its graph."""
    kept: list[float] = []
    average: list[Any] = [0.0]

    def each(_torch: Any, _model: Any, _optimizer: Any, _step: int, _x: Any, loss: Any) -> None:
        kept.append(loss.item())
        average[0] = 0.9 * average[0] + 0.1 * loss.detach()

    _train(r, each=each)


def _convolutions(torch: Any) -> Any:
    nn = torch.nn
    return nn.Sequential(
        nn.Unflatten(1, (1, 32)), nn.Conv1d(1, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.Flatten(), nn.Linear(240, 8)
    )


@program("clean", held_out=True)
def torch_convolutions(r: random.Random) -> None:
    """A convolutional network."""
    _train(r, model=_convolutions)


class _Recurrent:
    """Made where torch is there: an LSTM and its head."""

    def __new__(cls, torch: Any) -> Any:
        class Model(torch.nn.Module):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.cells, self.head = torch.nn.LSTM(4, 24, batch_first=True), torch.nn.Linear(24, 8)

            def forward(self, x: Any) -> Any:
                return self.head(self.cells(x.view(len(x), 8, 4))[0][:, -1])

        return Model()


@program("clean")
def torch_recurrent(r: random.Random) -> None:
    """A recurrent network."""
    _train(r, model=_Recurrent)


@program("leak", "heap")
def torch_sums_losses(r: random.Random) -> None:
    """Losses are summed with their graphs."""
    total: list[Any] = [0.0]

    def each(_torch: Any, _model: Any, _optimizer: Any, _step: int, _x: Any, loss: Any) -> None:
        total[0] = total[0] + loss

    _train(r, each=each)


@program("leak", "heap", held_out=True)
def torch_keeps_outputs(r: random.Random) -> None:
    """Predictions are kept for a metric, with what computed them."""
    kept: list[Any] = []

    def each(_torch: Any, model: Any, _optimizer: Any, _step: int, x: Any, _loss: Any) -> None:
        kept.append(model(x))

    _train(r, each=each)


@program("leak", "heap", held_out=True)
def torch_keeps_tensors(r: random.Random) -> None:
    """Two KiB of detached tensors a step, beside batches of many sizes."""
    kept: list[Any] = []

    def each(torch: Any, *_: Any) -> None:
        kept.append(torch.ones(512))

    _train(r, each=each, sizes=True)


@program("leak", "python")
def torch_adds_hooks(r: random.Random) -> None:
    """A hook more each step."""

    def each(_torch: Any, model: Any, _optimizer: Any, step: int, *_: Any) -> None:
        for module in [*model, *model]:
            module.register_forward_hook(functools.partial(_nothing, step))

    _train(r, each=each)


def _nothing(*_: Any) -> None:
    """Does nothing."""


@program("leak", "heap", held_out=True)
def torch_new_optimizers(r: random.Random) -> None:
    """States of old optimizers are kept in a table."""
    kept: dict[int, Any] = {}

    def each(_torch: Any, model: Any, optimizer: Any, step: int, *_: Any) -> None:
        if step % 8 == 0:
            kept[step] = {k: v.clone() for k, v in model.state_dict().items()}, len(optimizer.state)

    _train(r, each=each)


@program("leak", "heap")
def torch_gradient_history(r: random.Random) -> None:
    """Norms of gradients are kept as views of the gradients."""
    kept: list[Any] = []

    def each(_torch: Any, model: Any, *_: Any) -> None:
        kept.append([p.grad[:1] for p in model.parameters()])

    _train(r, each=each)


# --- held out, written after the thresholds were set -------------------------------------------------------------------


@program("clean", held_out=True)
def pipeline_of_generators(r: random.Random) -> None:
    """Batches made by generators of generators."""

    def rows() -> Iterator[Any]:
        while True:
            yield np.full(r.randint(10, 500), r.random())

    def batches(source: Iterator[Any]) -> Iterator[Any]:
        while True:
            yield np.concatenate([next(source) for _ in range(16)])

    ready = batches(rows())
    for _ in steps():
        next(ready).sum()
        work(r)


@program("clean", held_out=True)
def threads_that_end(r: random.Random) -> None:
    """Two threads a step, joined."""
    for _ in steps():
        threads = [threading.Thread(target=work, args=(r,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@program("clean", held_out=True)
def temporary_files(r: random.Random) -> None:
    """Written, read and removed."""
    for _ in steps():
        with tempfile.TemporaryFile() as file:
            np.save(file, np.ones(r.randint(100, 20_000)))
            file.seek(0)
            np.load(file)
        work(r)


@program("clean", held_out=True)
def queue_of_priorities(r: random.Random) -> None:
    """A heap that is filled and emptied in waves."""
    waiting: list[Any] = []
    for step in steps():
        for _ in range(30):
            heapq.heappush(waiting, (r.random(), step, "x" * r.randint(1, 100)))
        while len(waiting) > 30 * (1 + step % 7):
            heapq.heappop(waiting)
        work(r)


@program("clean")
def torch_loader_and_schedule(r: random.Random) -> None:
    """A data loader, a learning-rate schedule, clipping."""
    torch, model, optimizer, criterion = _torch(r)
    data = torch.utils.data.TensorDataset(torch.randn(1000, 32), torch.randint(0, 8, (1000,)))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 50)
    step = 0
    while step < STEPS:
        for x, y in torch.utils.data.DataLoader(data, batch_size=32, shuffle=True):
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            step += 1


@program("clean", held_out=True)
def torch_two_optimizers(r: random.Random) -> None:
    """A generator and a critic."""
    torch, critic, second, _ = _torch(r)
    maker = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32))
    first = torch.optim.Adam(maker.parameters())
    for _ in range(STEPS):
        second.zero_grad()
        made = maker(torch.randn(16, 8))
        (critic(made.detach()).mean() - critic(torch.randn(16, 32)).mean()).backward()
        second.step()
        first.zero_grad()
        (-critic(made).mean()).backward()
        first.step()


@program("leak", "heap", held_out=True)
def views_of_batches(r: random.Random) -> None:
    """One number of each batch is kept, as a view of it."""
    kept = []
    for _ in steps():
        batch = np.ones((r.randint(3, 6), 64))
        kept.append(batch[:1, :1])
        work(r)


@program("leak", "heap", held_out=True)
def exceptions_kept(r: random.Random) -> None:
    """Errors are collected with their tracebacks, and these hold the frames."""
    kept = []

    def fails(data: Any) -> None:
        raise ValueError(len(data))

    for _ in steps():
        try:
            fails(np.ones(256))
        except ValueError as error:
            kept.append(error)
        work(r)


@program("leak", "python", held_out=True)
def callbacks_registered(r: random.Random) -> None:
    """Callbacks more each step, never taken off."""
    listeners: list[Any] = []
    for step in steps():
        for i in range(14):
            listeners.append(functools.partial(print, "step", step, i, end=""))
        work(r)


@program("leak", "heap", held_out=True)
def text_gathered(r: random.Random) -> None:
    """Reports that are kept, one per step."""
    reports = []
    for step in steps():
        reports.append(f"step {step} " + "x" * r.randint(1500, 2500))
        work(r)


@program("leak", "heap", held_out=True)
def torch_table_of_embeddings(r: random.Random) -> None:
    """An embedding more for each name that has not been seen."""
    table: dict[str, Any] = {}

    def each(torch: Any, _model: Any, _optimizer: Any, step: int, *_: Any) -> None:
        table[f"name {step}"] = torch.nn.Parameter(torch.randn(512))

    _train(r, each=each)


@program("leak", "heap", held_out=True)
def torch_confusion_history(r: random.Random) -> None:
    """A metric keeps predictions and targets of all batches, of many sizes, on the CPU."""
    kept: list[Any] = []

    def each(_torch: Any, model: Any, _optimizer: Any, _step: int, x: Any, _loss: Any) -> None:
        kept.append((model(x).detach(), x[:, 0].clone()))

    _train(r, each=each, sizes=True)


def main() -> None:
    """Run one program."""
    name, seed = sys.argv[1], int(sys.argv[2])
    PROGRAMS[name].run(random.Random(seed))


if __name__ == "__main__":
    main()
