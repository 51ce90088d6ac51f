"""Maximum resident set size of a whole process, as the kernel counts it, plain and under budgets.

A budget is of tensors' bytes. What a control group or `top` looks at includes the interpreter, torch's libraries, the
allocator's idle pages and mapped pages of files. Each script runs in a process of its own, variants in turns; the figure is
``ru_maxrss`` of ``wait4``, the median of all turns. Printed losses must be the plain run's.

Prints a table and, with ``--json FILE``, writes every figure.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lowtide.units import format_bytes
from process import in_turns, machine

ROOT = Path(__file__).parent.parent
SCRIPTS = {
    "layers": [str(ROOT / "benchmarks/scripts/layers.py")],
    "small_gpt": [str(ROOT / "examples/small_gpt.py"), "--steps", "6"],
    "casino_lstm": [str(ROOT / "examples/casino_lstm.py"), "--steps", "4"],
}
SHARES = {"layers": (0.75, 0.5, 0.25), "small_gpt": (0.75, 0.5, 0.25), "casino_lstm": (0.75, 0.6)}
"""Of the plain peak of tensors. At 50 % the LSTM is refused: two of its layers' values at once are more."""


def _run(command: list[str], folder: str) -> tuple[int, int, str]:
    """Exit code, maximum resident bytes and standard output of a command, its files put into a folder."""
    with Path(folder, "out").open("w+") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.DEVNULL, cwd=folder, env={**os.environ, "TMPDIR": folder}
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        return process.returncode, usage.ru_maxrss << 10, out.read()


def measure(name: str, turns: int, folder: str) -> list[dict[str, Any]]:
    """All variants of one script."""
    script = SCRIPTS[name]
    told = Path(folder, "told.json")

    def under(budget: int) -> list[str]:
        return [sys.executable, "-m", "lowtide", "run", "--quiet", "--budget", str(budget), "--json", str(told), *script]

    _run([*under(1 << 50)], folder)
    plain = max(s["peak_bytes"] for s in json.loads(told.read_text())["steps"])
    budgets = {"plain": 0} | {f"{share:.0%}": int(share * plain) for share in SHARES[name]}
    sizes: dict[str, list[int]] = {v: [] for v in budgets}
    rows: dict[str, dict[str, Any]] = {}
    first = ""
    for variant in in_turns(budgets, turns):
        budget = budgets[variant]
        code, resident, printed = _run(under(budget) if budget else [sys.executable, *script], folder)
        first = first or printed
        sizes[variant].append(resident)
        figures = json.loads(told.read_text()) if budget else {"peak_bytes": plain, "held": True}
        rows[variant] = {
            "script": name, "variant": variant, "budget_bytes": budget or None, "exit_code": code,
            "tensor_peak_bytes": figures["peak_bytes"], "held": figures["held"], "equal": printed == first,
        }
    for variant, row in rows.items():
        row["resident_bytes"] = int(statistics.median(sizes[variant]))
        row["resident_bytes_spread"] = [min(sizes[variant]), max(sizes[variant])]
    return [rows[v] for v in budgets]


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--scripts", nargs="*", default=list(SCRIPTS), choices=list(SCRIPTS))
    options.add_argument("--turns", type=int, default=3)
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    table = Table("script", "budget", "tensors' peak", "maximum resident size", "lowest to highest", "held", "losses equal")
    rows: list[dict[str, Any]] = []
    for name in given.scripts:
        with tempfile.TemporaryDirectory() as folder:
            rows += measure(name, given.turns, folder)
    for row in rows:
        budget, (low, high) = row["budget_bytes"], row["resident_bytes_spread"]
        table.add_row(
            row["script"], f"{row['variant']}, {format_bytes(budget)}" if budget else "plain",
            format_bytes(row["tensor_peak_bytes"]), format_bytes(row["resident_bytes"]),
            f"{format_bytes(low)} to {format_bytes(high)}", str(row["held"]), str(row["equal"]),
        )
    Console(width=140).print(table)
    if given.json:
        given.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
