"""What recording costs, and whether the peak that is told is the true one: Lowtide, MemTracker, torch.profiler, memray.

The same steps of the same models, observers taking turns, each in a process of its own (some hold tensors for ever); the heap
counter (which the tests hold against another one) tells the true peak of torch's allocator over the observed stretch.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import lowtide
import torch
from lowtide.base.units import format_bytes
from lowtide.recording.reader import read
from lowtide.runtime.device.heap_counters import library_path
from lowtide.runtime.device.heap_meter import counters
from process import machine

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
import zoo
from torch import nn

WARM, TIMED = 1, 3

Job = zoo.Job
Told = dict[str, Any]


def gpt2() -> Job:
    """GPT-2, 6 layers of 512, four sequences of 256."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=6, n_embd=512, n_head=8, vocab_size=8192))

    def loss_of(m: nn.Module, _: int) -> torch.Tensor:
        ids = torch.randint(0, 8192, (4, 256))
        return m(input_ids=ids, labels=ids).loss

    return zoo.simple(model, loss_of)


def cnn() -> Job:
    """Convolutions with batch norm on 32 images of 64 x 64."""
    layers: list[nn.Module] = []
    for a, b in ((3, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    loss = nn.CrossEntropyLoss()
    return zoo.simple(model, lambda m, _: loss(m(torch.randn(32, 3, 64, 64)), torch.randint(0, 10, (32,))))


def lstm() -> Job:
    """Two LSTM layers of 256 over 100 steps."""
    model = nn.ModuleDict({"rnn": nn.LSTM(64, 256, num_layers=2, batch_first=True), "out": nn.Linear(256, 1)})

    def loss_of(m: Any, _: int) -> torch.Tensor:
        return m["out"](m["rnn"](torch.randn(64, 100, 64))[0]).square().mean()

    return zoo.simple(model, loss_of)


MODELS = {f.__name__: f for f in (gpt2, cnn, lstm)}


@contextlib.contextmanager
def plain(_: Job) -> Iterator[Told]:
    """Nobody looks."""
    yield {}


@contextlib.contextmanager
def _lowtide(level: Any) -> Iterator[Told]:
    with tempfile.TemporaryDirectory() as folder:
        told: Told = {}
        file = Path(folder) / "r.lowtide"
        with lowtide.record(file, level=level):
            yield told
        recording = read(file)
        told["peak_bytes"] = max(row.peak_bytes for row in recording.steps)
        if level == "ops":
            from lowtide.recording.peak_report import peak_report
            from lowtide.recording.recorded_step import Role, laid_out

            reports = [r for r in map(peak_report, laid_out(recording)) if r is not None]
            top = max(reports, key=lambda r: r.bytes)
            told["unknown"] = top.by_role.get(Role.UNKNOWN.name.lower(), 0) / top.bytes


def lowtide_ops(_: Job) -> contextlib.AbstractContextManager[Told]:
    """``lowtide record``."""
    return _lowtide("ops")


def lowtide_phases(_: Job) -> contextlib.AbstractContextManager[Told]:
    """``lowtide record --level phases``."""
    return _lowtide("phases")


@contextlib.contextmanager
def mem_tracker(job: Job) -> Iterator[Told]:
    """``torch.distributed._tools.MemTracker``."""
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker, told = MemTracker(), {}
    tracker.track_external(*job.modules, *job.optimizers)
    told["each"] = tracker.reset_mod_stats
    with tracker:
        yield told
    total = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    told["peak_bytes"] = total["Total"]


@contextlib.contextmanager
def profiler(_: Job) -> Iterator[Told]:
    """``torch.profiler`` with ``profile_memory``: the running sum of its memory events above what was live before."""
    counter = counters()
    assert counter is not None
    base = counter.tensor_live
    told: Told = {}
    with torch.profiler.profile(profile_memory=True, record_shapes=True, with_stack=True) as found:
        yield told
    live = highest = 0
    for event in found.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            highest = max(highest, live)
    told["peak_bytes"] = base + highest


@contextlib.contextmanager
def memray(_: Job) -> Iterator[Told]:
    """Memray's tracker: the process's heap, what was there before not included."""
    import memray as tool

    counter = counters()
    assert counter is not None
    base = counter.tensor_live
    told: Told = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "m.bin"
        with tool.Tracker(file, native_traces=False):
            yield told
        told["peak_bytes"] = base + tool.FileReader(file).metadata.peak_memory


OBSERVERS: dict[str, Callable[[Job], contextlib.AbstractContextManager[Told]]] = {
    "plain": plain, "lowtide ops": lowtide_ops, "lowtide phases": lowtide_phases, "MemTracker": mem_tracker,
    "torch.profiler": profiler, "memray": memray,
}


def observed(job: Job, observer: Callable[[Job], contextlib.AbstractContextManager[Told]]) -> Told:
    """Seconds of the timed steps, the true peak and the one told; or why it failed."""
    counter = counters()
    assert counter is not None
    gc.collect()
    seconds = []
    try:
        counter.tensor_peak = counter.tensor_live
        with observer(job) as told:
            for i in range(WARM + TIMED):
                start = time.perf_counter()
                job.step(i)
                seconds.append(time.perf_counter() - start)
                if "each" in told:
                    told["each"]()
        true = counter.tensor_peak
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"[:120]}
    return {
        "seconds": statistics.median(seconds[WARM:]), "true_bytes": true, "told_bytes": told.get("peak_bytes"),
        "unknown": told.get("unknown"),
    }


def one(name: str, kind: str) -> Told:
    """One observer of one model, here."""
    job = MODELS[name]()
    for i in range(2):
        job.step(i)
    return observed(job, OBSERVERS[kind])


def measure(name: str, turns: int, tick: Callable[[], None]) -> dict[str, Any]:
    """All observers of a model, turn by turn, each in its own process."""
    found: dict[str, list[Told]] = {k: [] for k in OBSERVERS}
    for _ in range(turns):
        for kind in OBSERVERS:
            done = subprocess.run(
                [sys.executable, __file__, "--one", name, kind], capture_output=True, text=True, check=False
            )
            last = done.stdout.splitlines()[-1] if done.returncode == 0 and done.stdout else ""
            found[kind].append(json.loads(last) if last else {"failed": f"ended with {done.returncode}"})
            tick()
    return {"model": name, "runs": found}


def row(result: dict[str, Any], kind: str) -> tuple[str, ...]:
    """One line of the table."""
    runs, base = result["runs"][kind], result["runs"]["plain"]
    if any("failed" in r for r in runs):
        return (result["model"], kind, "", "", "", "", next(r["failed"] for r in runs if "failed" in r))
    ratios = [r["seconds"] / p["seconds"] for r, p in zip(runs, base, strict=True)]
    true = base[-1]["true_bytes"]
    told = runs[-1]["told_bytes"]
    off = "" if told is None else f"{told / true - 1:+.1%}"
    unknown = runs[-1]["unknown"]
    return (result["model"], kind, f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f}-{max(ratios):.2f}",
            "" if told is None else format_bytes(told), off, "" if unknown is None else f"{unknown:.2%} unknown")


def main() -> None:
    """Measure, print, write."""
    options = argparse.ArgumentParser()
    options.add_argument("--json")
    options.add_argument("--models", default=",".join(MODELS))
    options.add_argument("--turns", type=int, default=3)
    options.add_argument("--one", nargs=2, metavar=("MODEL", "OBSERVER"), help=argparse.SUPPRESS)
    given = options.parse_args()
    if not os.environ.get("LD_PRELOAD"):
        os.environ["LD_PRELOAD"] = str(library_path())
        os.execv(sys.executable, [sys.executable, *sys.argv])  # noqa: S606
    if given.one:
        print(json.dumps(one(*given.one)))
        return
    names = given.models.split(",")
    with Progress(transient=True) as progress:
        task = progress.add_task("measuring", total=len(OBSERVERS) * given.turns * len(names))
        results = [measure(name, given.turns, lambda: progress.advance(task)) for name in names]
    table = Table(title="Seconds a step against plain, and the peak that is told against the true one of the plain run")
    for column in ("model", "observer", "x plain", "spread", "peak told", "off by", "note"):
        table.add_column(column, justify="right" if column not in ("model", "observer", "note") else "left")
    for result in results:
        for kind in OBSERVERS:
            table.add_row(*row(result, kind))
    Console(width=150).print(table)
    if given.json:
        Path(given.json).write_text(json.dumps({"machine": machine(), "results": results}, indent=1))


if __name__ == "__main__":
    main()
