"""What each interception costs per operator: steps of small operators, plain, under ``record`` and under ``budget``.

A step is some 3,600 operators of a few microseconds each, so that what the interception adds dominates. Under ``budget``,
every step is held online, once with the trace recorder and once without it: the difference is the recorder's own share; or it
follows a plan that touches one in twenty of the forward's operators, with the native gate and without it. In every turn the
intercepted steps come between two runs of plain ones. One thread.

Prints a table and, with ``--json FILE``, writes every figure with the machine's name.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
import torch
from lowtide.runtime import gate
from lowtide.runtime.control.plan_choice import Hold, PlanChoice
from lowtide.runtime.units.unit_mode import OnlineReason
from process import machine, with_counter

LAYERS, WIDTH, ROWS = 300, 32, 128
STEPS, SETTLING = 6, 3
PLANNED = {"budget of 95 %, planned": True, "the same without the gate": False}
HELD = {"budget, online": OnlineReason.NO_LIMIT, "budget, online and recorded": None}


class _Count(TorchDispatchMode):
    """Counts the operators below autograd."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one operator and run it."""
        self.count += 1
        return func(*args, **(kwargs or {}))


def make_step() -> Callable[[], None]:
    """Forward and backward of many narrow layers, all parameters in one leaf each."""
    torch.manual_seed(0)
    weights = [torch.randn(WIDTH, WIDTH, requires_grad=True) for _ in range(LAYERS)]
    batch = torch.randn(ROWS, WIDTH)

    def step() -> None:
        hidden = batch
        for weight in weights:
            hidden = torch.tanh(hidden @ weight * 0.1)
        hidden.sum().backward()
        for weight in weights:
            weight.grad = None

    return step


def timed(step: Callable[[], None], settling: int = SETTLING) -> float:
    """The median of a step's seconds."""
    for _ in range(settling):
        step()
    taken = []
    for _ in range(STEPS):
        start = time.perf_counter()
        step()
        taken.append(time.perf_counter() - start)
    gc.collect()
    return statistics.median(taken)


@contextlib.contextmanager
def held(reason: OnlineReason | None) -> Iterator[None]:
    """Hold every unit online under a budget that it never reaches; without a reason, each is also recorded."""
    chosen = PlanChoice.choose
    PlanChoice.choose = lambda *_: Hold(reason, planned=False)  # type: ignore[method-assign]
    try:
        with lowtide.budget("8GiB"):
            yield
    finally:
        PlanChoice.choose = chosen  # type: ignore[method-assign]


@contextlib.contextmanager
def planned(*, gated: bool) -> Iterator[None]:
    """Follow plans, with the gate or without it."""
    native = gate._NATIVE
    if not gated:
        gate._NATIVE = None  # type: ignore[misc]
    try:
        with lowtide.budget("95%"):
            yield
    finally:
        gate._NATIVE = native  # type: ignore[misc]


def measure(turns: int, tick: Callable[[], None]) -> tuple[int, list[dict[str, Any]]]:
    """The operators of a step, and per turn the seconds of a step: plain, each kind of interception, plain."""
    step = make_step()
    with _Count() as counted:
        step()
    found = []
    for _ in range(turns):
        taken = {"before": timed(step)}
        with tempfile.TemporaryDirectory() as folder, lowtide.record(Path(folder) / "step.lowtide"):
            taken["record"] = timed(step)
        for name, reason in HELD.items():
            with held(reason):
                taken[name] = timed(step)
        for name, gated in PLANNED.items():
            with planned(gated=gated):
                taken[name] = timed(step, settling=3 * SETTLING)
        found.append({**taken, "after": timed(step)})
        tick()
    return counted.count, found


def main() -> None:
    """Measure, print, write."""
    options = argparse.ArgumentParser()
    options.add_argument("--json")
    options.add_argument("--turns", type=int, default=5)
    given = options.parse_args()
    with_counter()
    torch.set_num_threads(1)
    with Progress(transient=True) as progress:
        task = progress.add_task("measuring", total=given.turns)
        operators, runs = measure(given.turns, lambda: progress.advance(task))
    table = Table(title=f"A step of {operators:,} operators: microseconds per operator beyond the plain step")
    for column in ("", "median", "least", "most"):
        table.add_column(column, justify="right")
    for name in ("record", *HELD, *PLANNED, "plain against plain"):
        key = "after" if name == "plain against plain" else name
        bases = [run["before"] if key == "after" else statistics.mean((run["before"], run["after"])) for run in runs]
        extra = [(run[key] - base) / operators * 1e6 for run, base in zip(runs, bases, strict=True)]
        table.add_row(name, *(f"{value:.1f}" for value in (statistics.median(extra), min(extra), max(extra))))
    Console(width=110).print(table)
    if given.json:
        Path(given.json).write_text(json.dumps({"machine": machine(), "operators": operators, "runs": runs}, indent=1))


if __name__ == "__main__":
    main()
