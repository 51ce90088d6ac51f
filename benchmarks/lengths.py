"""What a budget costs where lengths change in every step, as they do with dynamic padding: seconds against plain.

GPT-2 is trained on one sequence of lengths, over and over: plain and under budgets in turns, within one process. A variant's
figure is the time of the steps after the first ones, which are recorded; the ratio is taken within each turn. A share is one
of what the longest step adds.

Prints a table and, with ``--json FILE``, writes every figure with the machine's name.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import lowtide
import torch
from lowtide.base.units import format_bytes
from lowtide.runtime.device.heap_meter import counters
from process import in_turns, machine, with_counter

VOCABULARY, BATCH = 8192, 4
LEAST, MOST = 96, 256
STEPS = 24
FIRST = 8
"""Steps at the beginning of a round that are not timed: the longest among them are recorded."""
SHARES = {"roomy": 4.0, "60%": 0.6, "45%": 0.45}


class Subject:
    """The model in training, and the lengths of a round."""

    def __init__(self) -> None:
        """Train on the longest sequences until nothing is cold."""
        import transformers as hf

        counter = counters()
        assert counter is not None
        self.counter = counter
        self.outside = counter.tensor_live
        torch.manual_seed(0)
        config = hf.GPT2Config(vocab_size=VOCABULARY, n_embd=512, n_layer=6, n_head=8)
        self.model = hf.GPT2LMHeadModel(config).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.lengths = random.Random(0).sample(range(LEAST, MOST), STEPS)
        self.lengths[FIRST // 2] = MOST
        for _ in range(3):
            self.step(MOST)
        self.resident = counter.tensor_live
        counter.tensor_peak = counter.tensor_live
        self.step(MOST)
        self.plain_peak = counter.tensor_peak

    def step(self, length: int) -> None:
        """One training step."""
        ids = torch.randint(0, VOCABULARY, (BATCH, length))
        self.model(input_ids=ids, labels=ids).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def timed(self) -> dict[str, Any]:
        """A round; seconds of the steps after the first ones."""
        for length in self.lengths[:FIRST]:
            self.step(length)
        start, cpu_start = time.perf_counter(), time.process_time()
        for length in self.lengths[FIRST:]:
            self.step(length)
        return {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu_start}

    def budgeted(self, share: float) -> dict[str, Any]:
        """A round under a budget."""
        budget = int(self.resident + share * (self.plain_peak - self.resident))
        with lowtide.budget(budget) as running:
            found = self.timed()
        steps = running.outcome.steps
        return found | {
            "budget_bytes": budget - self.outside,
            "highest_bytes": max(s.peak_bytes for s in steps) - self.outside,
            "policies": Counter(s.policy for s in steps[FIRST:]),
        }


def main() -> None:
    """Measure, print, write."""
    options = argparse.ArgumentParser()
    options.add_argument("--json")
    options.add_argument("--turns", type=int, default=3)
    given = options.parse_args()
    with_counter()
    subject = Subject()
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ("plain", *SHARES)}
    with Progress(transient=True) as progress:
        task = progress.add_task("measuring", total=given.turns * len(found))
        for name in in_turns(found, given.turns):
            found[name].append(subject.budgeted(SHARES[name]) if name in SHARES else subject.timed())
            progress.advance(task)
    table = Table(title=f"GPT-2, another length ({LEAST} to {MOST}) in every step: seconds against plain")
    for column in ("share of what is added", "budget", "x plain", "spread", "CPU time", "steps", "held"):
        table.add_column(column, justify="right")
    for name in SHARES:
        pairs = list(zip(found[name], found["plain"], strict=True))
        ratios, cpu = ([r[key] / p[key] for r, p in pairs] for key in ("seconds", "cpu_seconds"))
        kept = all(r["highest_bytes"] <= r["budget_bytes"] for r in found[name])
        policies = ", ".join(f"{n} {policy}" for policy, n in found[name][-1]["policies"].items())
        table.add_row(
            name, format_bytes(found[name][0]["budget_bytes"]), f"{statistics.median(ratios):.2f}",
            f"{min(ratios):.2f}-{max(ratios):.2f}", f"{statistics.median(cpu):.2f}", policies, "kept" if kept else "OVER",
        )
    Console(width=140).print(table)
    if given.json:
        Path(given.json).write_text(json.dumps({"machine": machine(), "lengths": subject.lengths, "runs": found}, indent=1))


if __name__ == "__main__":
    main()
