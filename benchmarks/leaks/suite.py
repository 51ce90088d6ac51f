"""The suite of labelled programs: how often the verdict is right, with bounds, on the half that was tuned on and on the other.

``python suite.py --runs 20 --half held-out --json FILE``; one line per run goes into ``FILE.lines`` as it comes, so that
an interrupted suite goes on where it was.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import sys
import time
from pathlib import Path
from typing import Any

from programs import PROGRAMS
from rich.progress import Progress as Bar
from scipy import stats

from lowtide.base.processes import python
from lowtide.base.units import MIB
from lowtide.studies.leak.books import close
from lowtide.studies.leak.study import STEPS, study
from lowtide.studies.leak.watch import Watch

HERE = Path(__file__).parent


def once(name: str, seed: int) -> dict[str, Any]:
    """One run: the verdict, and what it rests on."""
    began = time.perf_counter()
    found = study(python(str(HERE / "programs.py"), module=False, arguments=(name, str(seed))), Watch(steps=STEPS))
    verdict = found.verdict
    books = close(found.run)
    return {
        "program": name,
        "seed": seed,
        "verdict": verdict.verdict.value,
        "bounded": verdict.bounded,
        "counter": None if verdict.culprit is None else verdict.culprit.name,
        "bytes_per_step": None if verdict.culprit is None else verdict.culprit.trend.rate,
        "processes": [j.verdict.value for j in found.judgements],
        "steps": [r.steps for r in found.runs],
        "codes": [r.code for r in found.runs],
        "resident_growth_bytes": None if books is None else books.resident_bytes,
        "residual_bytes": None if books is None else books.residual_bytes,
        "seconds": time.perf_counter() - began,
    }


def upper(wrong: int, of: int) -> float:
    """Upper 95 % bound of a share (Clopper and Pearson)."""
    return 1.0 if wrong >= of else float(stats.beta.ppf(0.95, wrong + 1, of - wrong))


def closed(line: dict[str, Any]) -> bool:
    """Whether a run's books close: what is left unexplained is at most 5 % of the growth, or 1 MiB."""
    left = line["residual_bytes"]
    return left is not None and abs(left) <= max(MIB, 0.05 * abs(line["resident_growth_bytes"]))


def summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Shares with their bounds."""
    quiet = [x for x in lines if PROGRAMS[x["program"]].label != "leak"]
    loud = [x for x in lines if PROGRAMS[x["program"]].label == "leak"]
    false = sum(x["verdict"] == "leak" for x in quiet)
    found = sum(x["verdict"] == "leak" for x in loud)
    missed = sum(x["verdict"] == "clean" for x in loud)
    open_ = sum(x["verdict"] == "inconclusive" for x in lines)
    residuals = sorted(abs(x["residual_bytes"]) for x in lines if x["residual_bytes"] is not None)
    return {
        "programs": len({x["program"] for x in lines}),
        "runs": len(lines),
        "clean_runs": len(quiet),
        "leak_runs": len(loud),
        "false_leaks": false,
        "false_leak_rate": false / max(1, len(quiet)),
        "false_leak_upper": upper(false, max(1, len(quiet))),
        "found": found,
        "recall": found / max(1, len(loud)),
        "called_clean": missed,
        "inconclusive": open_,
        "inconclusive_rate": open_ / max(1, len(lines)),
        "median_residual_bytes": residuals[len(residuals) // 2] if residuals else None,
        "books_within_5_percent_or_1_mib": sum(map(closed, lines)) / max(1, len(residuals)),
        "median_seconds": sorted(x["seconds"] for x in lines)[len(lines) // 2] if lines else 0.0,
    }


def main() -> None:
    """Run, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--half", choices=("tuned", "held-out", "both"), default="both")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side: counters of bytes do not mind, rates would")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    names = [n for n, p in PROGRAMS.items() if args.half == "both" or p.held_out == (args.half == "held-out")]
    names = [n for n in names if not args.only or n in args.only]
    journal = args.json.with_suffix(".lines") if args.json else None
    lines: list[dict[str, Any]] = []
    if journal is not None and journal.exists():
        lines = [json.loads(line) for line in journal.read_text().splitlines()]
    done = {(x["program"], x["seed"]) for x in lines}
    todo = [(n, seed) for seed in range(args.runs) for n in names if (n, seed) not in done]
    with Bar(disable=not sys.stderr.isatty()) as bar, concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        task = bar.add_task("runs", total=len(todo))
        for found in concurrent.futures.as_completed([pool.submit(once, n, seed) for n, seed in todo]):
            lines.append(found.result())
            bar.advance(task)
            if journal is not None:
                with journal.open("a") as file:
                    file.write(json.dumps(lines[-1]) + "\n")
    table: dict[str, Any] = {}
    for half in ("tuned", "held-out"):
        part = [x for x in lines if PROGRAMS[x["program"]].held_out == (half == "held-out")]
        if part:
            table[half] = summary(part)
            print(half, json.dumps(table[half], indent=1))
    table["both"] = summary(lines)
    table["programs"] = {
        name: {
            "label": p.label,
            "held_out": p.held_out,
            **{v: sum(x["verdict"] == v for x in lines if x["program"] == name) for v in ("leak", "clean", "inconclusive")},
        }
        for name, p in PROGRAMS.items()
        if any(x["program"] == name for x in lines)
    }
    for name, row in table["programs"].items():
        right = row["leak"] if row["label"] == "leak" else row["clean"]
        total = row["leak"] + row["clean"] + row["inconclusive"]
        if right < total:
            print(f"{name:44s} {row['label']:8s} leak {row['leak']} clean {row['clean']} inconclusive {row['inconclusive']}")
    if args.json:
        args.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
