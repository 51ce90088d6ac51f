"""What a budget costs with this tree and with another one (an earlier commit's), at equal budgets.

``benchmarks/against.py FOLDER``: a checkout of Lowtide with its libraries built in place. Each model is trained in fresh
processes, this tree's and the other's in turns; in each, plain steps and budgets take turns, and a budget's ratio is taken to
the plain steps of its own process. Budgets are the shares of ``benchmarks/budget.py``, not below 1.1 times the higher one of
both floors.

Prints a table and, with ``--json FILE``, writes every figure.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from budget import MODELS, Subject
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from lowtide.units import format_bytes
from process import in_turns, machine, with_counter

SHARES = (0.5, 0.25)
HERE = Path(__file__).resolve()


def budgeted(subject: Subject, budget: int) -> dict[str, Any]:
    """A round under a budget (bytes above what is outside the model), by names that all trees know."""
    outcome, found = subject.under(budget)
    plan, steps = outcome.plan, outcome.steps
    return found | {
        "budget_bytes": budget, "policy": steps[-1].policy,
        "highest_bytes": max(s.peak_bytes for s in steps) - subject.outside,
        "predicted_extra": None if plan is None else (plan.extra_seconds or 0.0) / plan.baseline_step_seconds,
        "floor_bytes": None if plan is None else plan.bound_peak_bytes - subject.outside,
    }


def measure(name: str, budgets: dict[str, int], rounds: int) -> dict[str, Any]:
    """In a tree's process: plain steps and budgets in turns; without budgets, the tree's floor."""
    subject = Subject(name)
    shares = {f"{share:.0%}": subject.share(share) for share in SHARES}
    if not budgets:
        return {"budgets": shares, "floor_bytes": budgeted(subject, subject.share(0.9))["floor_bytes"]}
    runs: dict[str, list[dict[str, Any]]] = {variant: [] for variant in ("plain", *budgets)}
    for variant in in_turns(runs, rounds):
        runs[variant].append(budgeted(subject, budgets[variant]) if variant in budgets else subject.plain())
    return {"runs": runs}


def ask(tree: Path, name: str, budgets: dict[str, int], rounds: int, threads: int) -> dict[str, Any]:
    """The same in a fresh process of a tree."""
    library = next((tree / "src/lowtide").glob("_heap*.so"))
    done = subprocess.run(
        [sys.executable, HERE, "--measure", name, "--budgets", json.dumps(budgets), "--rounds", str(rounds)],
        env={**os.environ, "PYTHONPATH": str(tree / "src"), "LD_PRELOAD": str(library), "OMP_NUM_THREADS": str(threads)},
        stdout=subprocess.PIPE, text=True, check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(name: str, trees: dict[str, Path], given: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """A model in both trees' processes, in turns."""
    task = progress.add_task(name, total=len(trees) * (given.turns + 1))

    def asked(side: str, budgets: dict[str, int]) -> dict[str, Any]:
        found = ask(trees[side], name, budgets, given.rounds, given.threads)
        progress.advance(task)
        return found

    floors = {side: asked(side, {}) for side in trees}
    least = int(1.1 * max(found["floor_bytes"] for found in floors.values()))
    budgets = {variant: max(budget, least) for variant, budget in floors["this"]["budgets"].items()}
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in trees}
    for side in in_turns(trees, given.turns):
        runs[side].append(asked(side, budgets)["runs"])
    return {"model": name, "budgets": budgets, "floors": {s: f["floor_bytes"] for s, f in floors.items()}, "runs": runs}


def extra(runs: list[dict[str, Any]], variant: str) -> list[float]:
    """A budget's seconds above plain ones', as shares of those, turn by turn of each process."""
    return [
        run["seconds"] / plain["seconds"] - 1
        for process in runs for run, plain in zip(process[variant], process["plain"], strict=True)
    ]


def rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """A line for each budget and tree."""
    lines = []
    for variant, budget in result["budgets"].items():
        for side, runs in result["runs"].items():
            low, middle, high = statistics.quantiles(extra(runs, variant), n=4, method="inclusive")
            flat = [run for process in runs for run in process[variant]]
            predicted = statistics.median(run["predicted_extra"] for run in flat)
            lines.append((
                result["model"], variant, side, format_bytes(budget), format_bytes(max(run["peak_bytes"] for run in flat)),
                f"{statistics.median(run['seconds'] for run in flat):.3f}", f"{middle:.1%} ({low:.1%} to {high:.1%})",
                f"{predicted:.1%}", f"{(1 + predicted) / (1 + middle) - 1:+.1%}",
                "kept" if all(run["highest_bytes"] <= budget for run in flat) else "OVER",
            ))
    return lines


def main() -> None:
    """Measure, print, write."""
    options = argparse.ArgumentParser()
    options.add_argument("other", nargs="?", type=Path)
    options.add_argument("--name", default="the other")
    options.add_argument("--json")
    options.add_argument("--models", default=",".join(MODELS))
    options.add_argument("--turns", type=int, default=3)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--threads", type=int, default=os.cpu_count())
    options.add_argument("--measure", help=argparse.SUPPRESS)
    options.add_argument("--budgets", help=argparse.SUPPRESS, type=json.loads)
    given = options.parse_args()
    if given.measure:
        print(json.dumps(measure(given.measure, given.budgets, given.rounds)))
        return
    with_counter()
    trees = {"other": given.other.resolve(), "this": HERE.parents[1]}
    with Progress() as progress:
        results = [compare(name, trees, given, progress) for name in given.models.split(",")]
    table = Table(title=f"Seconds a step above plain: other is {given.name}")
    for column in ("model", "budget", "tree", "bytes", "peak", "s/step", "extra", "predicted", "step's error", ""):
        table.add_column(column, justify="right")
    for result in results:
        for line in rows(result):
            table.add_row(*line)
    Console(width=150).print(table)
    if given.json:
        Path(given.json).write_text(json.dumps({
            "machine": machine(), "other": given.name, "threads": given.threads, "results": results,
        }, indent=1))


if __name__ == "__main__":
    main()
