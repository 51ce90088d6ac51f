"""How often a leaking run has saved and stopped before it is killed, and how far the forecast was off.

``python graceful.py --runs 100 --json FILE``: leaks of 1 to 50 MiB a second, steps of 5 to 300 ms, a hard cap that is reached
after some seconds. One line per run goes into ``FILE.lines`` as it comes; an interrupted benchmark goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from scipy import stats

from lowtide.base.units import MIB
from lowtide.guard.cause import Cause
from lowtide.guard.keep import GuardSettings, RunKeeper
from lowtide.guard.outcome import Generation, Live

LEAKER = str(Path(__file__).parent / "leaker.py")
BASE = 48 * MIB
"""What the program takes before it leaks, about."""


class Notes:
    """Keeps the forecasts of a run."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, int, float | None]] = []

    def looked(self, live: Live) -> None:
        """One look."""
        self.rows.append((live.reading.seconds, live.reading.bytes, live.left_seconds))

    def said(self, text: str) -> None:
        """Nothing to do."""

    def ended(self, generation: Generation) -> None:
        """Nothing to do."""


def forecast_error(rows: list[tuple[float, int, float | None]]) -> float | None:
    """How far the forecast was off, as a share, when half of the time from its first word to the cap was gone.

    The last look of a run that was ended at the cap is that at which it crossed it.
    """
    end = rows[-1][0]
    said = [(t, left) for t, _, left in rows[:-1] if left is not None]
    if not said or end - said[0][0] < 0.5:
        return None
    middle = (said[0][0] + end) / 2
    at, left = min(said, key=lambda s: abs(s[0] - middle))
    return (left - (end - at)) / (end - at)


def once(seed: int, enforce: str, kind: str) -> dict[str, Any]:
    """One run."""
    chance = random.Random(seed)
    rate, pause = 50 ** chance.random(), 0.005 * 60 ** chance.random()
    seconds = chance.uniform(6, 14)
    cap = int(BASE + max(30, rate * seconds) * MIB)
    with tempfile.TemporaryDirectory() as folder:
        place = "-" if kind == "forecast" else f"{folder}/c"
        settings = GuardSettings(
            command=[sys.executable, LEAKER, place, str(rate), str(pause)], cap_bytes=cap, enforce=enforce, restarts=0,
        )  # fmt: skip
        notes = Notes()
        keeper = RunKeeper(settings, [notes])
        keeper._after = lambda found: (found.exit, "one process is enough")  # type: ignore[method-assign]
        outcome = keeper.run()
    g = outcome.generations[0]
    return {
        "seed": seed, "kind": kind, "enforce": outcome.fence, "rate_mib": rate, "step_seconds": pause, "cap_bytes": cap,
        "cause": g.cause.value, "exit": g.exit, "saves": g.saves, "peak_share": g.peak_bytes / cap, "asked": g.asked,
        "seconds": g.seconds, "forecast_error": forecast_error(notes.rows) if g.cause is Cause.CAP else None,
    }  # fmt: skip


def main() -> None:
    """Run, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side: leaks are by the clock")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--one", nargs=3, help="one run, told as JSON: SEED ENFORCE KIND")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(once(int(args.one[0]), args.one[1], args.one[2])))
        return
    journal = args.json.with_suffix(".lines")
    lines = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
    done = {(x["seed"], x["enforce"], x["kind"]) for x in lines}
    wanted = [(s, e, "stop") for s in range(args.runs) for e in ("cgroup", "watch")]
    wanted += [(1000 + s, "watch", "forecast") for s in range(args.runs // 3)]

    def run(seed: int, enforce: str, kind: str) -> dict[str, Any]:
        command = [sys.executable, __file__, "--json", os.devnull, "--one", str(seed), enforce, kind]
        found = subprocess.run(command, capture_output=True, text=True, check=True)
        return dict(json.loads(found.stdout.splitlines()[-1]))

    with ThreadPoolExecutor(args.jobs) as pool:
        for found in pool.map(lambda w: run(*w), [w for w in wanted if w not in done]):
            lines.append(found)
            with journal.open("a") as file:
                file.write(json.dumps(found) + "\n")
    table: dict[str, Any] = {}
    for enforce in ("cgroup", "watch"):
        part = [x for x in lines if x["kind"] == "stop" and x["enforce"] == enforce]
        good = sum(x["exit"] == 75 and x["saves"] >= 1 and x["cause"] == "recycled" for x in part)
        if part:
            table[enforce] = {
                "runs": len(part), "saved_and_stopped": good, "share": good / len(part),
                "lower_95": float(stats.beta.ppf(0.05, good, len(part) - good + 1)) if good else 0.0,
                "peak_share_median": statistics.median(x["peak_share"] for x in part),
                "peak_share_highest": max(x["peak_share"] for x in part),
            }  # fmt: skip
    errors = sorted(abs(x["forecast_error"]) for x in lines if x["forecast_error"] is not None)
    runs = [x for x in lines if x["kind"] == "forecast"]
    table["forecast"] = {
        "runs": len(runs), "told": len(errors), "median_error": statistics.median(errors) if errors else None,
        "within_20_percent": sum(e <= 0.2 for e in errors) / max(1, len(errors)), "worst": errors[-1] if errors else None,
    }  # fmt: skip
    table["runs"] = lines
    args.json.write_text(json.dumps(table, indent=1) + "\n")
    print(json.dumps({k: v for k, v in table.items() if k != "runs"}, indent=1))


if __name__ == "__main__":
    main()
