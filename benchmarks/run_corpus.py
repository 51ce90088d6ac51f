"""The corpus: scripts of many libraries, each without a budget and under several, with what it kept and what it cost.

``python benchmarks/run_corpus.py [NAME ...] --json FILE [--markdown FILE] [--turns N] [--jobs N] [--resume]``

Each script of ``benchmarks/corpus`` runs without a budget first, which gives its peak (by the heap counter) and the lines that
it prints; then under 75, 60, 50 and 35 % of that peak, halfway from its minimum to the peak, a tenth of the way, and at the
minimum. A run is *equal* if it prints the same lines (a digest of all weights is among them), and *kept* if every step is
within the budget. A step takes as long as from one printed line to the next. In each turn all variants run once, each without
what earlier runs have kept; that under 60 % runs once more with it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import lowtide
from lowtide.base.units import format_bytes
from lowtide.runtime.device.heap_counters import library_path
from process import machine

HERE: Final = Path(__file__).resolve().parent
HELPERS: Final = ("digest", "offline_tokenizer", "without_torchvision")
SHARES: Final = {"75 %": 0.75, "60 %": 0.6, "50 %": 0.5, "35 %": 0.35}
"""Budgets as shares of the peak."""
PLACES: Final = {"halfway": 0.5, "a tenth": 0.1, "minimum": 0.0}
"""Budgets between the minimum and the peak."""
AGAIN: Final = "60 %"
"""The budget under which a script runs once more, with what its first run under this budget has kept."""
MARGIN: Final = 1.02
"""The minimum is asked for with so much room."""
COLD: Final = 4
"""Steps that are not timed."""
FIRST: Final = 3
SECONDS: Final = 600
"""Of one run."""
ENVIRONMENT: Final = {
    "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}


def scripts() -> list[str]:
    """Names of all scripts."""
    return sorted(p.stem for p in (HERE / "corpus").glob("*.py") if p.stem not in HELPERS)


def digest_of_code() -> str:
    """Identifies the code that is measured: Lowtide's, and the scripts'."""
    files = sorted([*Path(lowtide.__file__).parent.rglob("*.py"), *(HERE / "corpus").rglob("*.py")])
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def run(command: Sequence[str], environment: dict[str, str], log: Path) -> tuple[int, list[str], list[float]]:
    """(exit code, lines on standard output, seconds from the start to each of them)."""
    lines, seconds = [], []
    start = time.perf_counter()
    with log.open("w") as errors, subprocess.Popen(
        command, env={**os.environ, **ENVIRONMENT, **environment}, stdout=subprocess.PIPE, stderr=errors, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "train_runtime" not in line:  # a line of the Trainer's, with times in it
                lines.append(line)
                seconds.append(time.perf_counter() - start)
    return process.returncode, lines, seconds


def plain(name: str, folder: Path) -> dict[str, Any]:
    """A run without a budget."""
    figures, library = folder / "plain.json", library_path()
    command = [sys.executable, str(HERE / "plain.py"), str(figures), str(HERE / "corpus" / f"{name}.py")]
    code, lines, seconds = run(command, {} if library is None else {"LD_PRELOAD": str(library)}, folder / "log")
    if code:
        raise RuntimeError(f"{name} does not run: {last_line(folder / 'log')}")
    return {"lines": lines, "peak_bytes": json.loads(figures.read_text())["peak_bytes"], **timed(seconds)}


def timed(seconds: Sequence[float]) -> dict[str, Any]:
    """How long steps took: the first three with all that came before them, and the later ones one by one."""
    steps = [b - a for a, b in zip(seconds, seconds[1:], strict=False)][:-1]  # the last line is the digest
    return {"first_seconds": seconds[FIRST - 1] if len(seconds) >= FIRST else None, "step_seconds": steps[COLD:]}


def budgeted(name: str, budget: int, expected: Sequence[str], folder: Path, *, kept: str = "off") -> dict[str, Any]:
    """A run under a budget; ``kept``: the folder of what earlier runs have kept."""
    figures = folder / "run.json"
    figures.unlink(missing_ok=True)
    options = ["--budget", str(budget), "--json", str(figures)]
    command = [sys.executable, "-m", "lowtide", "run", *options, str(HERE / "corpus" / f"{name}.py")]
    code, lines, seconds = run(["timeout", str(SECONDS), *command], {"LOWTIDE_CACHE": kept}, folder / "log")
    found = json.loads(figures.read_text()) if figures.is_file() else {"steps": [], "plan": None}
    steps, plan = found["steps"], found["plan"]
    later = steps[5:]
    return {
        "budget_bytes": budget,
        "exit": code,
        "refused": code == 1 and "cannot be held" in (folder / "log").read_text(),
        "message": "" if code in (0, 3) else last_line(folder / "log"),
        "equal": lines == list(expected),
        "lines": [] if lines == list(expected) or code not in (0, 3) else [list(expected), lines],
        "peaks": [s["peak_bytes"] for s in steps],
        "over": [s["index"] for s in steps if s["peak_bytes"] > budget],
        "steps": len(steps),
        "units_of_earlier_runs": found.get("units_of_earlier_runs", 0),
        "planned": sum(s["policy"] != "online" for s in later) / len(later) if later else None,
        "peak_bytes": max((s["peak_bytes"] for s in steps), default=None),
        "lowest_bytes": None if plan is None else plan["lowest_peak_bytes"],
        "bound_bytes": None if plan is None else plan["bound"]["peak_bytes"],
        "at": None if plan is None else plan["bound"].get("at"),
        "levers": [x["name"] for x in found.get("levers", ()) if x["used"]],
        "unreached": found.get("unreached", []),
        **timed(seconds),
    }


def last_line(log: Path) -> str:
    """What a run said last on standard error."""
    said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return said[-1].strip()[:300] if said else ""


def measure(name: str, folder: Path, turns: int) -> dict[str, Any]:
    """One script, in all variants."""
    first = plain(name, folder)
    peak, lines = first["peak_bytes"], first["lines"]
    again = plain(name, folder)
    if again["lines"] != lines:
        return {"peak_bytes": peak, "error": "two runs without a budget do not print the same"}
    runs: dict[str, list[Any]] = {key: [] for key in (*SHARES, *PLACES)}
    found: dict[str, Any] = {"peak_bytes": peak, "plain": [first, again], "runs": runs, "again": []}
    tried: list[dict[str, Any]] = []
    for _ in range(turns):
        for key, share in SHARES.items():
            cache = str(folder / "kept") if key == AGAIN else "off"
            done = budgeted(name, int(share * peak), lines, folder, kept=cache)
            found["runs"][key].append(done)
            tried.append(done)
            if key == AGAIN and not done["refused"]:
                found["again"].append(budgeted(name, int(share * peak), lines, folder, kept=cache))
                shutil.rmtree(cache, ignore_errors=True)
        found["minimum_bytes"] = minimum = minimum_of(tried, peak)
        for key, place in PLACES.items():
            budget = minimum + place * (peak - minimum) if place else MARGIN * minimum
            found["runs"][key].append(budgeted(name, int(budget), lines, folder))
        found["plain"].append(plain(name, folder))
    for one in found["plain"]:
        del one["lines"]
    return found


def attempt(name: str, turns: int) -> dict[str, Any]:
    """Measure a script in a folder of its own; what keeps it from running is its result then."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return measure(name, Path(folder), turns)
        except RuntimeError as error:
            return {"error": str(error)}


def minimum_of(tried: Sequence[dict[str, Any]], peak: int) -> int:
    """The lowest budget that is known to be enough: what a refusal says is needed, what was kept, what plans reach.

    Of several refusals, that of the largest budget counts: far below the minimum, a run is refused by the first step alone,
    before other forwards and memory optimizations were seen. A plan is of one forward and its backward. Where another of the
    script's needs more, so that a budget was refused, what plans reach does not count, except with memory optimizations.
    No budget is enough that is below the lowest peak which a step had in any run, if that step ever crossed a budget: where
    sizes change, a plan of one step says nothing of a larger one.
    """
    refused = sorted((r for r in tried if r["refused"]), key=lambda r: r["budget_bytes"])
    needed = [int(size) for r in refused[-1:] for size in re.findall(r"\((\d+) bytes", r["message"])[:1]]
    kept = [r["budget_bytes"] for r in tried if r["exit"] == 0 and not r["over"]]
    planned = [r["lowest_bytes"] for r in tried if r["lowest_bytes"] is not None and (r["levers"] or not needed)]
    return max(min([*needed, *kept, *planned], default=peak), crossed_bytes(tried))


def crossed_bytes(tried: Sequence[dict[str, Any]]) -> int:
    """The largest, over all steps that crossed a budget in some run, of the lowest peaks that they had in all runs."""
    crossed = {index for r in tried for index, peak in enumerate(r["peaks"]) if peak > r["budget_bytes"]}
    return max((min(r["peaks"][i] for r in tried if i < len(r["peaks"])) for i in crossed), default=0)


def ratio(found: dict[str, Any], key: str) -> float | None:
    """Seconds of a step against the run without a budget, medians over all turns."""
    before = [s for one in found["plain"] for s in one["step_seconds"]]
    now = [s for one in found["runs"][key] if one["exit"] in (0, 3) for s in one["step_seconds"]]
    return statistics.median(now) / statistics.median(before) if before and now else None


def delay(found: dict[str, Any], runs: Sequence[dict[str, Any]]) -> float | None:
    """Seconds by which the third step ends later than without a budget, in some runs."""
    now = [one["first_seconds"] for one in runs if one["exit"] in (0, 3) and one["first_seconds"]]
    return statistics.median(now) - statistics.median(one["first_seconds"] for one in found["plain"]) if now else None


def cell(found: dict[str, Any], key: str) -> str:
    """One cell of the table."""
    runs = found["runs"][key]
    if any(r["refused"] for r in runs):
        return "refused"
    if any(r["exit"] not in (0, 3) for r in runs):
        return "ENDED"
    words = [] if all(r["equal"] for r in runs) else ["DIFFERENT"]
    over = max(len(r["over"]) for r in runs)
    words += [f"{over} over"] if over else []
    times = ratio(found, key)
    return " ".join([*words, "" if times is None else f"{times:.2f}"]).strip()


def rows(results: dict[str, Any]) -> Iterator[list[str]]:
    """The table's rows."""
    for name, found in results.items():
        if "error" in found:
            yield [name, format_bytes(found.get("peak_bytes") or 0), found["error"], *[""] * (len(SHARES) + len(PLACES))]
            continue
        share = f"{format_bytes(found['minimum_bytes'])} ({found['minimum_bytes'] / found['peak_bytes']:.0%})"
        yield [name, format_bytes(found["peak_bytes"]), share, *(cell(found, key) for key in (*SHARES, *PLACES))]


INTRODUCTION: Final = """# Scripts of other libraries under a budget

Each script of `benchmarks/corpus` is a small training loop in its library's own idiom, on synthetic data and
on the CPU with one thread. `make bench-corpus` installs the libraries into an environment of their own (the
extra `corpus`), runs each script without a budget and under several, and writes this page;
`benchmarks/results/corpus.json` has every figure.

*peak* is the highest point of the run without a budget, by the heap counter. *minimum* is the lowest budget
that is known to be enough. The other columns are budgets: shares of the peak, and places between the minimum
and the peak. A number is the time of a step against the run without a budget (medians, without the first four
steps); *n over* counts steps above the budget; *refused* means that the run ended within three steps with the
minimum in its message; *DIFFERENT* would mean other bits.

Not among them: speechbrain, which needs torchaudio, of which there is no build for the CPU build of torch
2.13.
"""
SIDE_BY_SIDE: Final = """
{jobs} scripts ran side by side, each variant once, beside other work on the machine's cores: bytes, counts and
bits are exact, but times are rough (a time below 1 is noise, and so is as much above it).
"""
HEADS: Final = ("script", "peak", "minimum", *SHARES, *PLACES)


def summary(results: dict[str, Any]) -> list[str]:
    """What the whole says, one sentence for each budget."""
    told = []
    sound = [f for f in results.values() if "error" not in f]
    for key in (*SHARES, *PLACES):
        runs = [r for f in sound for r in f["runs"][key]]
        ended = [r for r in runs if not r["refused"]]
        kept = sum(not r["over"] and r["exit"] == 0 for r in ended)
        equal = sum(r["equal"] for r in ended if r["exit"] in (0, 3))
        times = sorted(x for f in sound if (x := ratio(f, key)) is not None)
        late = sorted(x for f in sound if (x := delay(f, f["runs"][key])) is not None)
        planned = [r["planned"] for r in ended if r["planned"] is not None]
        text = f"{key}: {len(runs) - len(ended)} of {len(runs)} refused"
        text += f"; of the others {kept} of {len(ended)} kept, {equal} equal"
        if times:
            text += f"; a step {statistics.median(times):.2f} x in the median, at most {times[-1]:.2f}"
        if late:
            text += f"; the third step {statistics.median(late):.1f} s later, at most {late[-1]:.1f}"
        if planned:
            text += f"; {statistics.mean(planned):.0%} of steps planned after the fifth"
        told.append(text)
    again = [r for f in sound for r in f.get("again", ())]
    late = sorted(x for f in sound if (x := delay(f, f.get("again", ()))) is not None)
    if late:
        kept = sum(not r["over"] and r["exit"] == 0 for r in again)
        told.append(
            f"{AGAIN}, run once more with what the first run has kept: {kept} of {len(again)} kept, "
            f"{sum(r['equal'] for r in again)} equal; the third step {statistics.median(late):.1f} s later, "
            f"at most {late[-1]:.1f}"
        )
    return told


def accounts(results: dict[str, Any]) -> list[str]:
    """What stands at each script's minimum, one row per script: of the run with the lowest budget that has an account."""
    told = []
    for name, found in results.items():
        if "error" in found:
            continue
        runs = (r for key in (*PLACES, *SHARES) for r in found["runs"][key])
        run = min((r for r in runs if r["at"] and r["at"]["operator"]), key=lambda r: r["budget_bytes"], default=None)
        if run is None:
            told.append(f"| {name} | | | no forward with its backward sets it |")
            continue
        at = run["at"]
        parts = "; ".join(f"{format_bytes(part['bytes'])} {part['what']}" for part in at["parts"][:PARTS])
        largest = next((f"{format_bytes(x['bytes'])} of `{x['made_by']}`" for x in at["largest"] if x["made_by"]), "")
        size = format_bytes(sum(part["bytes"] for part in at["parts"]))
        told.append(f"| {name} | {size} | `{at['operator']}` ({at['phase']}) | {parts}{largest and f'; largest: {largest}'} |")
    return told


ACCOUNTS: Final = """
## What stands at the minimum

The proven minimum of one forward and its backward (recomputing and offloading cannot go below it, memory
optimizations can), the operator at which it is reached, and the largest parts of what is in memory then.

| script | proven minimum | operator | in memory |
|---|---|---|---|
"""
PARTS: Final = 4
"""Parts that are named."""


def page(results: dict[str, Any], jobs: int) -> str:
    """The page of the documentation: what was measured, how to see it again, the table, and what the whole says."""
    lines = [f"| {' | '.join(row)} |" for row in (HEADS, *rows(results))]
    lines.insert(1, "|---" * len(HEADS) + "|")
    beside = [SIDE_BY_SIDE.format(jobs=jobs)] if jobs > 1 else []
    told = [*(f"- {line}" for line in summary(results)), ACCOUNTS + "\n".join(accounts(results))]
    return "\n".join([INTRODUCTION.rstrip("\n"), *beside, "", *lines, "", *told]) + "\n"


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="scripts; all where none is named")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="scripts measured side by side; each runs its variants one by one")
    parser.add_argument("--resume", action="store_true", help="keep what FILE has of scripts measured with this very code")
    options = parser.parse_args()
    names = options.names or scripts()
    code = digest_of_code()
    results: dict[str, Any] = {}
    if options.resume and options.json is not None and options.json.is_file():
        results = {n: f for n, f in json.loads(options.json.read_text())["scripts"].items() if f.get("code") == code}
        names = [name for name in names if name not in results]
    with Progress(console=Console(stderr=True), transient=True) as bar, ThreadPoolExecutor(options.jobs) as pool:
        task = bar.add_task("corpus", total=len(names))
        waiting = {pool.submit(attempt, name, options.turns): name for name in names}
        for done in as_completed(waiting):
            results[waiting[done]] = {**done.result(), "code": code}
            results = dict(sorted(results.items()))
            bar.advance(task)
            if options.json is not None:  # so that a run that is ended leaves what it has
                about = {"machine": machine(), "jobs": options.jobs, "scripts": results}
                options.json.write_text(json.dumps(about, indent=1) + "\n")
    table = Table(title="Seconds of a step against the run without a budget")
    for head in HEADS:
        table.add_column(head)
    for row in rows(results):
        table.add_row(*row)
    Console(width=150).print(table)
    for line in summary(results):
        print(line)
    if options.markdown is not None:
        options.markdown.write_text(page(results, options.jobs))


if __name__ == "__main__":
    main()
