"""Maximum resident set size of a whole process, as the kernel counts it, plain and under budgets.

A budget is of tensors' bytes. What a control group or `top` looks at includes the interpreter, torch's libraries, the
allocator's idle pages and mapped pages of files. Each script runs in a process of its own, variants in turns; the figure is
``ru_maxrss`` of ``wait4``, the median of all turns, and the highest charge of a control group of its own (pages of files are
charged there, too, and given back under pressure). Then plain and the lowest budget run in a group whose limit is 85 % of
what the plain run was charged. Printed losses must be the plain run's.

Prints a table and, with ``--json FILE``, writes every figure.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lowtide.base.units import format_bytes
from lowtide.guard import fence
from process import in_turns, machine

ROOT = Path(__file__).parent.parent
SCRIPTS = {
    "layers": [str(ROOT / "benchmarks/scripts/layers.py")],
    "small_gpt": [str(ROOT / "examples/small_gpt.py"), "--steps", "6"],
    "casino_lstm": [str(ROOT / "examples/casino_lstm.py"), "--steps", "4"],
}
SHARES = {"layers": (0.75, 0.5, 0.25), "small_gpt": (0.75, 0.5, 0.4), "casino_lstm": (0.75, 0.6)}
"""Of the plain peak of tensors, each above the floor."""
UNLIMITED_BYTES = 1 << 40
LIMIT = 0.85
"""Of what the plain run's control group was charged at most: the limit under which plain and budgeted run at the end."""


@dataclass(frozen=True)
class Ran:
    """How a process ended: ``group_bytes`` is the highest charge of its control group, None where none could be made."""

    exit_code: int
    resident_bytes: int
    group_bytes: int | None
    printed: str


def _run(command: list[str], folder: str, limit_bytes: int = UNLIMITED_BYTES) -> Ran:
    """A command in a control group of its own, its files put into a folder."""
    group = fence.cgroup(limit_bytes, f"lowtide-bench-{os.getpid()}")
    with Path(folder, "out").open("w+") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.DEVNULL, cwd=folder,
            env={**os.environ, "TMPDIR": folder, "LOWTIDE_CACHE": "off"},
            preexec_fn=None if group is None else group.enter,  # noqa: PLW1509 - there is one thread
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        highest = None
        if group is not None:
            with contextlib.suppress(OSError):
                highest = int((group.folder / group.words.highest).read_text())
            group.remove()
        return Ran(process.returncode, usage.ru_maxrss << 10, highest, out.read())


def _median(sizes: list[int | None]) -> int | None:
    known = [s for s in sizes if s is not None]
    return int(statistics.median(known)) if known else None


def measure(name: str, turns: int, folder: str) -> list[dict[str, Any]]:
    """All variants of one script."""
    script = SCRIPTS[name]
    told = Path(folder, "told.json")

    def under(budget: int) -> list[str]:
        run = [sys.executable, "-m", "lowtide", "run", "--quiet", "--budget", str(budget), "--json", str(told)]
        return [*run, *script] if budget else [sys.executable, *script]

    _run(under(1 << 50), folder)
    plain = max(s["peak_bytes"] for s in json.loads(told.read_text())["steps"])
    budgets = {"plain": 0} | {f"{share:.0%}": int(share * plain) for share in SHARES[name]}
    runs: dict[str, list[Ran]] = {v: [] for v in budgets}
    rows: dict[str, dict[str, Any]] = {}
    first = ""
    for variant in in_turns(budgets, turns):
        budget = budgets[variant]
        ran = _run(under(budget), folder)
        first = first or ran.printed
        runs[variant].append(ran)
        figures = json.loads(told.read_text()) if budget else {"peak_bytes": plain, "held": True}
        row = rows.setdefault(variant, {
            "script": name, "variant": variant, "budget_bytes": budget or None, "tensor_peak_bytes": 0, "held": True,
        })
        row["tensor_peak_bytes"] = max(row["tensor_peak_bytes"], figures["peak_bytes"])
        row["held"] = row["held"] and figures["held"]
    lowest = list(budgets)[-1]
    charged = _median([r.group_bytes for r in runs["plain"]])
    for variant, row in rows.items():
        sizes = [r.resident_bytes for r in runs[variant]]
        row["exit_codes"] = [r.exit_code for r in runs[variant]]
        row["equal"] = all(r.printed == first for r in runs[variant])
        row["resident_bytes"], row["resident_bytes_spread"] = int(statistics.median(sizes)), [min(sizes), max(sizes)]
        row["group_bytes"] = _median([r.group_bytes for r in runs[variant]])
        if variant in ("plain", lowest) and charged is not None:
            limit = int(LIMIT * charged)
            capped = _run(under(budgets[variant]), folder, limit)
            row["limit_bytes"], row["exit_code_under_limit"] = limit, capped.exit_code
            row["equal_under_limit"] = capped.printed == first
    return [rows[v] for v in budgets]


def _capped(row: dict[str, Any]) -> str:
    if "limit_bytes" not in row:
        return ""
    code = row["exit_code_under_limit"]
    ended = "finishes" if code == 0 and row["equal_under_limit"] else "killed" if code < 0 else f"exit code {code}"
    return f"{format_bytes(row['limit_bytes'])}: {ended}"


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--scripts", nargs="*", default=list(SCRIPTS), choices=list(SCRIPTS))
    options.add_argument("--turns", type=int, default=3)
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    table = Table(
        "script", "budget", "tensors' peak", "maximum resident size", "control group's peak", "held", "losses equal",
        "under a limit",
    )
    rows: list[dict[str, Any]] = []
    for name in given.scripts:
        with tempfile.TemporaryDirectory() as folder:
            rows += measure(name, given.turns, folder)
    for row in rows:
        budget, (low, high) = row["budget_bytes"], row["resident_bytes_spread"]
        table.add_row(
            row["script"], f"{row['variant']}, {format_bytes(budget)}" if budget else "plain",
            format_bytes(row["tensor_peak_bytes"]),
            f"{format_bytes(row['resident_bytes'])} ({format_bytes(low)} to {format_bytes(high)})",
            "" if row["group_bytes"] is None else format_bytes(row["group_bytes"]), str(row["held"]), str(row["equal"]),
            _capped(row),
        )
    Console(width=170).print(table)
    if given.json:
        given.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
