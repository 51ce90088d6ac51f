"""What watching costs: ``python cost.py --json FILE``.

Seconds a step of a torch script with steps of about ten milliseconds, plain and watched, at the same time, each in a process
and on a core of its own, which they change in every turn; and what the sampler itself holds after 100,000 idle steps.
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

import numpy as np
from scipy.stats import bootstrap

from lowtide.studies.leak.study import audits_of
from lowtide.studies.leak.watch import Progress, Watch, Watched

STEPS = 300
KINDS = ("plain", "watched")
SCRIPT = """
import json, sys, time, torch
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(*[torch.nn.Linear(384, 384) for _ in range(6)])
optimizer = torch.optim.Adam(model.parameters())
x = torch.randn(160, 384)
times = []
for _ in range(%d):
    began = time.perf_counter()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    times.append(time.perf_counter() - began)
json.dump(times, open(sys.argv[1], "w"))
"""
IDLE = "import lowtide\nfor _ in range(100_000):\n    lowtide.step()\n"


def side_by_side(folder: Path, cores: tuple[int, int]) -> tuple[list[float], list[float]]:
    """Times of the steps of a plain process on the first core, and of a watched one on the second."""
    outs = folder / "plain", folder / "watched"
    plain, watched = ([sys.executable, str(folder / "script.py"), str(out)] for out in outs)
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {cores[0]})
        process = subprocess.Popen(plain)
        os.sched_setaffinity(0, {cores[1]})
        with Watched(watched, Watch(steps=0, audits=audits_of(STEPS))) as other:
            os.sched_setaffinity(0, allowed)
            other.wait(Progress())
        if process.wait():
            raise RuntimeError("the plain process failed")
    finally:
        os.sched_setaffinity(0, allowed)
    first, second = (list(json.loads(out.read_text()))[20:] for out in outs)
    return first, second


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    medians: dict[str, list[float]] = {kind: [] for kind in KINDS}
    means: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "script.py").write_text(SCRIPT % STEPS)
        one, two = sorted(os.sched_getaffinity(0))[:2]
        for turn in range(args.turns):
            for kind, times in zip(KINDS, side_by_side(folder, (one, two) if turn % 2 else (two, one)), strict=True):
                medians[kind].append(statistics.median(times))
                means[kind].append(statistics.mean(times))
        (folder / "idle.py").write_text(IDLE)
        with Watched([sys.executable, str(folder / "idle.py")], Watch(steps=0)) as process:
            run = process.wait(Progress())
    held, resident = run.column("heap_bytes"), run.column("anonymous_bytes")
    known = resident[resident == resident]  # noqa: PLR0124 - NaN is not itself
    ratios = [w / p for w, p in zip(medians["watched"], medians["plain"], strict=True)]
    interval = bootstrap((ratios,), np.median, rng=np.random.default_rng(0)).confidence_interval
    table: dict[str, Any] = {
        "plain_seconds": statistics.median(medians["plain"]),
        "watched_seconds": statistics.median(medians["watched"]),
        "ratio": statistics.median(ratios),
        "ratio_interval_95": [float(interval.low), float(interval.high)],
        "ratios": ratios,
        "ratio_of_means_with_audits": statistics.median(means["watched"]) / statistics.median(means["plain"]),
        "idle_steps": run.steps,
        "held_bytes_per_step": float((held[-1] - held[1000]) / (run.steps - 1000)),
        "resident_bytes_per_step": float((known[-1] - known[len(known) // 10]) / (0.9 * run.steps)),
    }
    args.json.write_text(json.dumps(table, indent=1) + "\n")
    print(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
