"""What recording costs: a transformer's steps plain and recorded, in turns within one process, by wall and by CPU time.

In every turn the recorded steps come between two runs of plain ones, whose mean they are compared with; how far those two
differ is shown beside it: that much is the noise. One thread, so that no other work on the cores makes threads wait.

Prints a table and, with ``--json FILE``, writes every figure with the machine's name.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import budget
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from steps import Step, language

import lowtide
import torch
from process import machine, with_counter

LEVELS: tuple[Literal["phases", "ops"], ...] = ("phases", "ops")
SETTLING = 4
"""Steps before those that are timed: the first ones are kept whole in a recording."""


def small_gpt2() -> Step:
    """GPT-2, 6 layers of 256, 2 x 64 words: a step of some tens of milliseconds, of nearly 2,000 operators."""
    import transformers as hf

    config = hf.GPT2Config(vocab_size=2048, n_embd=256, n_layer=6, n_head=4)
    return language(hf.GPT2LMHeadModel(config), 2048, 2, 64)


MODELS = {"GPT-2, 6 x 512": (budget.gpt2, 4), "BERT, 6 x 512": (budget.bert, 4), "GPT-2, 6 x 256, 128 words": (small_gpt2, 40)}
"""Per name: what makes the step, and how many are timed in a round."""


def timed(step: Step, steps: int) -> dict[str, float]:
    """Medians of a step's seconds."""
    for _ in range(SETTLING):
        step()
    wall, cpu = [], []
    for _ in range(steps):
        start, used = time.perf_counter(), time.process_time()
        step()
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - used)
    gc.collect()
    return {"wall": statistics.median(wall), "cpu": statistics.median(cpu)}


def measure(name: str, turns: int, folder: Path, tick: Callable[[], None]) -> list[dict[str, Any]]:
    """Per level and turn: plain, recorded, plain."""
    make, steps = MODELS[name]
    torch.manual_seed(0)
    step = make()
    found = []
    for turn in range(turns):
        for level in LEVELS if turn % 2 else LEVELS[::-1]:
            before = timed(step, steps)
            with lowtide.record(folder / f"{turn}.lowtide", level=level):
                recorded = timed(step, steps)
            found.append({"model": name, "level": level, "plain": [before, timed(step, steps)], "recorded": recorded})
            tick()
    return found


def ratios(runs: list[dict[str, Any]], clock: str) -> tuple[str, str]:
    """Recorded against plain, and plain against plain: median and spread."""
    against = [r["recorded"][clock] / statistics.mean(p[clock] for p in r["plain"]) for r in runs]
    noise = [r["plain"][1][clock] / r["plain"][0][clock] for r in runs]
    first, second = (f"{statistics.median(v):.3f} ({min(v):.2f}-{max(v):.2f})" for v in (against, noise))
    return first, second


def main() -> None:
    """Measure, print, write."""
    options = argparse.ArgumentParser()
    options.add_argument("--json")
    options.add_argument("--turns", type=int, default=6)
    given = options.parse_args()
    with_counter()
    torch.set_num_threads(1)
    runs: list[dict[str, Any]] = []
    with Progress(transient=True) as progress, tempfile.TemporaryDirectory() as folder:
        task = progress.add_task("measuring", total=len(MODELS) * given.turns * len(LEVELS))
        for name in MODELS:
            runs += measure(name, given.turns, Path(folder), lambda: progress.advance(task))
    table = Table(title="Seconds a step, recorded against plain")
    for column in ("model", "a plain step", "level", "wall", "CPU", "plain against plain, CPU"):
        table.add_column(column, justify="right")
    for name in MODELS:
        for level in LEVELS:
            mine = [r for r in runs if r["model"] == name and r["level"] == level]
            plain = statistics.median(p["wall"] for r in mine for p in r["plain"])
            cpu, noise = ratios(mine, "cpu")
            table.add_row(name, f"{plain * 1000:.0f} ms", level, ratios(mine, "wall")[0], cpu, noise)
    Console(width=130).print(table)
    if given.json:
        Path(given.json).write_text(json.dumps({"machine": machine(), "runs": runs}, indent=1))


if __name__ == "__main__":
    main()
