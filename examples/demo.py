"""The main job, shown: two unmodified scripts, plain and at 50 % and 25 % of what training adds to the resident bytes.

Prints one table: peak, budget, seconds a step, and whether every printed loss is the same. All runs have one thread: with
several, torch alone does not always give the same bits twice on a busy CPU (docs/architecture.md).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from lowtide.base.units import format_bytes, format_seconds
from lowtide.runtime.device.heap_counters import library_path

HERE = Path(__file__).resolve().parent
SCRIPTS = ("casino_lstm.py", "small_gpt.py")
SHARES = (0.5, 0.25)
STEPS = "8"
ROOMY = 1 << 40
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Row:
    """One run."""

    script: str
    budget_bytes: int | None
    peak_bytes: int
    seconds: float
    losses: str
    note: str


def run_plain(script: str, folder: Path) -> Row:
    """Without Lowtide."""
    figures = folder / "plain.json"
    looker = str(HERE.parent / "benchmarks" / "plain.py")
    command = [sys.executable, looker, str(figures), str(HERE / script), "--steps", STEPS]
    library = library_path()
    preload = {} if library is None else {"LD_PRELOAD": str(library)}
    done = subprocess.run(command, env={**os.environ, **ONE_THREAD, **preload}, capture_output=True, text=True, check=True)
    found = json.loads(figures.read_text())
    return Row(script, None, found["peak_bytes"] or 0, statistics.median(found["seconds"][2:]), done.stdout, "")


def run_under(script: str, budget: int, folder: Path) -> tuple[Row, dict[str, Any]]:
    """With Lowtide; the figures are its JSON file."""
    figures = folder / "run.json"
    options = ["--budget", str(budget), "--quiet", "--json", str(figures)]
    command = [sys.executable, "-m", "lowtide", "run", *options, str(HERE / script), "--steps", STEPS]
    done = subprocess.run(command, env={**os.environ, **ONE_THREAD}, capture_output=True, text=True, check=False)
    found = json.loads(figures.read_text())
    seconds = statistics.median([s["seconds"] for s in found["steps"]][3:] or [0.0])
    peak = max((s["peak_bytes"] for s in found["steps"]), default=0)
    note = "" if done.returncode == 0 else "refused: below the minimum"
    return Row(script, budget, peak, seconds, done.stdout, note), found


def main() -> None:
    """Run all and print the table."""
    rows: list[tuple[Row, Row]] = []
    with tempfile.TemporaryDirectory() as name, Progress(transient=True) as progress:
        folder = Path(name)
        task = progress.add_task("training", total=len(SCRIPTS) * (2 + len(SHARES)))
        for script in SCRIPTS:
            plain = run_plain(script, folder)
            progress.advance(task)
            _, known = run_under(script, ROOMY, folder)
            progress.advance(task)
            if not plain.peak_bytes:  # no compiler built the counter: what the recording says of the tensors
                plain = replace(plain, peak_bytes=known["plan"]["baseline_peak_bytes"], note="tensors only")
            rows.append((plain, plain))
            floor, resident = known["plan"]["bound"]["peak_bytes"], known["plan"]["resident_bytes"]
            for share in SHARES:
                wanted = int(resident + share * (plain.peak_bytes - resident))
                row, _ = run_under(script, max(wanted, int(1.1 * floor)), folder)
                note = f"{share:.0%}" if wanted >= 1.1 * floor else "1.1 x minimum"
                rows.append((replace(row, note=row.note or note), plain))
                progress.advance(task)
    show(rows)


def show(rows: list[tuple[Row, Row]]) -> None:
    """The table; the exit code is 1 if a loss differs or a budget was crossed."""
    table = Table(title="The same scripts, without a budget and under one")
    for column in ("script", "budget", "peak", "of baseline", "a step", "x baseline", "losses", ""):
        table.add_column(column, justify="left" if column in ("script", "") else "right")
    good = True
    for row, plain in rows:
        equal = row.losses == plain.losses
        kept = row.budget_bytes is None or row.peak_bytes <= row.budget_bytes
        good &= equal and (kept or library_path() is None)  # without a counter a first step cannot be capped
        table.add_row(
            row.script, "none" if row.budget_bytes is None else format_bytes(row.budget_bytes),
            format_bytes(row.peak_bytes) + ("" if kept else " (over)"), f"{row.peak_bytes / plain.peak_bytes:.0%}",
            format_seconds(row.seconds), f"{row.seconds / plain.seconds:.2f}",
            "-" if row is plain else "equal" if equal else "DIFFERENT", row.note,
        )
    out = Console(width=max(110, Console().width))
    out.print(table)
    out.print("1.1 x minimum: the share lies below what any recomputing and offloading can reach.", style="dim")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
