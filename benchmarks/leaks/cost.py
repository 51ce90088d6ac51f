"""What watching costs: ``python cost.py --json FILE``.

Seconds a step of a torch script with steps of about ten milliseconds, plain and watched, in turns, each in a process of
its own; and what the sampler itself holds after 100,000 steps that do nothing.
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

from lowtide.leak.study import audits_of
from lowtide.leak.watch import Progress, Watch, Watched

STEPS = 300
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


def seconds(folder: Path, *, watched: bool) -> list[float]:
    """Times of one process's steps."""
    out = folder / "times"
    command = [sys.executable, str(folder / "script.py"), str(out)]
    if watched:
        with Watched(command, Watch(steps=0, audits=audits_of(STEPS))) as process:
            process.wait(Progress())
    else:
        subprocess.run(command, check=True, env=os.environ)
    return list(json.loads(out.read_text()))[20:]


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "script.py").write_text(SCRIPT % STEPS)
        medians: dict[str, list[float]] = {"plain": [], "watched": []}
        means: dict[str, list[float]] = {"plain": [], "watched": []}
        for _ in range(args.turns):
            for kind in ("plain", "watched"):
                times = seconds(folder, watched=kind == "watched")
                medians[kind].append(statistics.median(times))
                means[kind].append(statistics.mean(times))
        (folder / "idle.py").write_text(IDLE)
        with Watched([sys.executable, str(folder / "idle.py")], Watch(steps=0)) as process:
            run = process.wait(Progress())
    held, resident = run.column("heap_bytes"), run.column("anonymous_bytes")
    known = resident[resident == resident]  # noqa: PLR0124 - NaN is not itself
    ratios = [w / p for w, p in zip(medians["watched"], medians["plain"], strict=True)]
    table: dict[str, Any] = {
        "plain_seconds": statistics.median(medians["plain"]),
        "watched_seconds": statistics.median(medians["watched"]),
        "ratio": statistics.median(ratios),
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
