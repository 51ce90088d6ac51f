"""What a budget costs with this tree and with another one (an earlier commit's), at equal budgets, against plain torch.

``benchmarks/against.py FOLDER``: a checkout of Lowtide with its libraries built in place. Of each model there are several
trainings at once, each in a process of its own: plain torch without Lowtide, twice, and each budget with either tree, this
tree's twice. They take turns *step by step*, one at a time, in an order that is drawn anew each round: the machine's moods
meet all of them alike, and what the two plain ones, and the two of this tree, differ by is the benchmark's own error. All is
done several times with fresh processes, as one process is a little slower than another for its whole life. Budgets are the
shares of ``benchmarks/budget.py``, not below 1.1 times the higher one of both floors; where they come to the same bytes they
are measured once.

Prints a table and, with ``--json FILE``, writes every figure, after each model.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from budget import MODELS, SETTLING, WARM, Subject
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import lowtide
import torch
from lowtide.base.units import format_bytes
from process import machine, with_counter

SHARES = (0.5, 0.25)
PAUSE = 0.02
"""Seconds between two steps: by then the threads of the one before sleep."""
HERE = Path(__file__).resolve()


def floor(name: str) -> dict[str, Any]:
    """In a tree's process: its floor for a model, and what the shares of the budget come to (bytes)."""
    subject = Subject(name)
    outcome, _ = subject.under(subject.share(0.9))
    return {
        "budgets": {f"{share:.0%}": subject.share(share) for share in SHARES},
        "floor_bytes": outcome.plan.bound_peak_bytes - subject.outside,
    }


def train(name: str, budget: int) -> None:
    """A training in a process of its own, which takes a step for each line that it reads and writes what it took.

    Args:
        name: of the model.
        budget: bytes above what is outside the model; 0 for plain torch.
    """
    if budget:
        subject = Subject(name)
        step, limit = subject.step, subject.outside + budget
    else:
        torch.manual_seed(0)
        step, limit = MODELS[name](), 0
    with lowtide.budget(limit) if budget else contextlib.nullcontext() as running:
        for _ in range(SETTLING if budget else WARM + SETTLING):
            step()
        print("ready", flush=True)
        for _ in sys.stdin:
            start, cpu_start = time.perf_counter(), time.process_time()
            step()
            print(json.dumps([time.perf_counter() - start, time.process_time() - cpu_start]), flush=True)
    if not budget:
        print("{}")
        return
    plan, steps = running.outcome.plan, running.outcome.steps
    print(json.dumps({
        "policy": steps[-1].policy,
        "peak_bytes": steps[-1].peak_bytes - subject.outside,
        "highest_bytes": max(s.peak_bytes for s in steps) - subject.outside,
        "predicted_extra": None if plan is None else (plan.extra_seconds or 0.0) / plan.baseline_step_seconds,
    }))


class Training:
    """One of these processes, seen from outside."""

    def __init__(self, tree: Path, name: str, budget: int, threads: int) -> None:
        """Begin it, and wait until its steps are warm and its plan in force."""
        environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": str(threads)}
        environment.pop("LD_PRELOAD", None)
        if budget:
            environment["LD_PRELOAD"] = str(next((tree / "src/lowtide").rglob("_heap*.so")))
        self._process = subprocess.Popen(
            [sys.executable, HERE, "--train", name, "--budget", str(budget)],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        if self._said() != "ready":
            raise SystemExit(f"{name} with {tree}: the training did not begin; what it says stands above")

    def step(self) -> tuple[float, float]:
        """Seconds of one step, and CPU seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        seconds, cpu_seconds = json.loads(self._said())
        return seconds, cpu_seconds

    def end(self) -> dict[str, Any]:
        """Let it end; what became of its budget."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        found: dict[str, Any] = json.loads(self._said())
        self._process.wait()
        return found

    def _said(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def floors(name: str, trees: dict[str, Path], threads: int) -> dict[str, dict[str, Any]]:
    """Of both trees."""
    found = {}
    for side, tree in trees.items():
        library = next((tree / "src/lowtide").rglob("_heap*.so"))
        done = subprocess.run(
            [sys.executable, HERE, "--floor", name],
            env={**os.environ, "PYTHONPATH": str(tree / "src"), "LD_PRELOAD": str(library), "OMP_NUM_THREADS": str(threads)},
            stdout=subprocess.PIPE, text=True, check=True,
        )
        found[side] = json.loads(done.stdout.splitlines()[-1])
    return found


def once(
    name: str, trees: dict[str, Path], budgets: dict[str, int], given: argparse.Namespace, order: random.Random
) -> dict[str, Any]:
    """All trainings of a model in fresh processes, step by step."""
    wanted = {"plain": ("this", 0), "plain again": ("this", 0)}
    for variant, budget in budgets.items():
        wanted |= {f"{variant} {side}": (side, budget) for side in trees}
        wanted[f"{variant} this again"] = ("this", budget)
    trainings = {k: Training(trees[side], name, budget, given.threads) for k, (side, budget) in wanted.items()}
    steps: dict[str, list[tuple[float, float]]] = {k: [] for k in trainings}
    for _ in range(given.rounds):
        for k in order.sample(sorted(trainings), len(trainings)):
            time.sleep(PAUSE)
            steps[k].append(trainings[k].step())
    return {k: {"steps": steps[k], **training.end()} for k, training in trainings.items()}


def compare(name: str, trees: dict[str, Path], given: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """A model, several times over."""
    task = progress.add_task(name, total=given.turns + 1)
    known = floors(name, trees, given.threads)
    progress.advance(task)
    least = int(1.1 * max(found["floor_bytes"] for found in known.values()))
    names: dict[int, str] = {}
    for variant, share in known["this"]["budgets"].items():
        budget = max(share, least)
        names[budget] = f"{names[budget]} and {variant}" if budget in names else variant
    budgets = {variant: budget for budget, variant in names.items()}
    runs, order = [], random.Random(0)
    for _ in range(given.turns):
        runs.append(once(name, trees, budgets, given, order))
        progress.advance(task)
    return {"model": name, "budgets": budgets, "floors": {s: f["floor_bytes"] for s, f in known.items()}, "runs": runs}


def extra(run: dict[str, Any], variant: str, kind: int = 0, base: str = "plain") -> float:
    """Median of what a step took above the other one of its round, as a share of that; of seconds, or of CPU seconds."""
    return statistics.median(
        a[kind] / b[kind] - 1 for a, b in zip(run[variant]["steps"], run[base]["steps"], strict=True)
    )


def rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """A line for each training: the median over fresh processes, and how far these lie apart."""
    lines = []
    for variant in result["runs"][0]:
        if variant == "plain":
            continue
        runs = result["runs"]
        shares = [extra(run, variant) for run in runs]
        spread = f"{statistics.median(shares):.1%} ({min(shares):.1%} to {max(shares):.1%})"
        cpu = f"{statistics.median(extra(run, variant, 1) for run in runs):.1%}"
        seconds = f"{statistics.median(s[0] for run in runs for s in run[variant]['steps']):.3f}"
        if variant == "plain again":
            lines.append((result["model"], variant, "", "", seconds, spread, cpu, "", "", ""))
            continue
        share, _, side = variant.rpartition("% ")
        budget = result["budgets"][share + "%"]
        predicted = statistics.median(run[variant]["predicted_extra"] for run in runs)
        error = statistics.median((1 + run[variant]["predicted_extra"]) / (1 + extra(run, variant)) - 1 for run in runs)
        less = "" if side == "other" else f"{statistics.median(extra(r, variant, 0, f'{share}% other') for r in runs):+.1%}"
        kept = all(run[variant]["highest_bytes"] <= budget for run in runs)
        lines.append((
            result["model"], variant, format_bytes(budget), format_bytes(max(run[variant]["peak_bytes"] for run in runs)),
            seconds, spread, cpu, less, f"{predicted:.1%} ({error:+.1%})", "kept" if kept else "OVER",
        ))
    return lines


def main() -> None:
    """Measure, print, write."""
    options = argparse.ArgumentParser()
    options.add_argument("other", nargs="?", type=Path)
    options.add_argument("--name", default="the other")
    options.add_argument("--json")
    options.add_argument("--models", default=",".join(MODELS))
    options.add_argument("--turns", type=int, default=2, help="fresh processes")
    options.add_argument("--rounds", type=int, default=15, help="steps of each")
    options.add_argument("--threads", type=int, default=os.cpu_count())
    options.add_argument("--train", help=argparse.SUPPRESS)
    options.add_argument("--budget", help=argparse.SUPPRESS, type=int)
    options.add_argument("--floor", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.train:
        train(given.train, given.budget)
        return
    if given.floor:
        print(json.dumps(floor(given.floor)))
        return
    with_counter()
    trees = {"other": given.other.resolve(), "this": HERE.parents[1]}
    results = []
    with Progress() as progress:
        for name in given.models.split(","):
            results.append(compare(name, trees, given, progress))
            if given.json:
                Path(given.json).write_text(json.dumps({
                    "machine": machine(), "other": given.name, "threads": given.threads, "results": results,
                }, indent=1))
    table = Table(title=f"Seconds a step above plain torch: other is {given.name}")
    for column in ("model", "training", "bytes", "peak", "s/step", "extra", "of CPU", "than other", "predicted (error)", ""):
        table.add_column(column, justify="right")
    for result in results:
        for line in rows(result):
            table.add_row(*line)
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
