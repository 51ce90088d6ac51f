"""What a budget costs: seconds a step, plain and under budgets, on models as ``transformers`` ships them and on an LSTM.

One model after another is trained in this one process; plain steps and budgets take turns on it, each turn beginning with
another, several times over. A variant's figure is the median of its timed steps; the ratio is taken within each turn, its
median and quartiles are shown, and the ratio of CPU time, which other work on the machine moves less. Plain steps run a second
time in each turn: what their ratio is besides 1 is the benchmark's own error. The heap counter must be preloaded; the script
starts itself again with it.

Prints a table and, with ``--json FILE``, writes every figure with the machine's name.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from steps import Step, image, language

import lowtide
import torch
from lowtide.base.units import format_bytes
from lowtide.runtime.device.heap_meter import counters
from process import in_turns, machine, with_counter
from torch import nn

VARIANTS = 6
"""Rounds in a turn: see :func:`measure`."""
WARM = 3
SETTLING = 5
"""Steps under a budget before those that are timed: by then the plan is in force."""
TIMED = 5

def gpt2() -> Step:
    """GPT-2, 6 layers of 512."""
    import transformers as hf

    return language(hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=8192, n_embd=512, n_layer=6, n_head=8)), 8192, 4, 256)


def bert() -> Step:
    """BERT, 6 layers of 512, attention as its first authors wrote it."""
    import transformers as hf

    config = hf.BertConfig(
        vocab_size=8192, hidden_size=512, num_hidden_layers=6, num_attention_heads=8, intermediate_size=2048,
        attn_implementation="eager",
    )
    return language(hf.BertForMaskedLM(config), 8192, 4, 256)


def llama() -> Step:
    """Llama, 6 layers of 512."""
    import transformers as hf

    config = hf.LlamaConfig(
        vocab_size=8192, hidden_size=512, intermediate_size=1408, num_hidden_layers=6, num_attention_heads=8
    )
    return language(hf.LlamaForCausalLM(config), 8192, 4, 256)


def vit() -> Step:
    """ViT-Small's width and picture, 6 layers."""
    import transformers as hf

    config = hf.ViTConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=6, intermediate_size=1536, num_labels=10
    )
    return image(hf.ViTForImageClassification(config), 8, 224)


def resnet() -> Step:
    """ResNet-50 as it is."""
    import transformers as hf

    return image(hf.ResNetForImageClassification(hf.ResNetConfig(num_labels=10)), 8, 160)


class Layers(nn.Module):
    """Two LSTM layers and a dense layer per step."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(64, 256, num_layers=2, batch_first=True), nn.Linear(256, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sequences (batch, length, 64) to (batch, length, 1)."""
        return self.out(self.rnn(x)[0])


def lstm() -> Step:
    """Two-layer LSTM: its values are whole layers."""
    model = Layers()
    return Step(model, lambda: nn.functional.mse_loss(model(torch.randn(64, 100, 64)), torch.randn(64, 100, 1)))


MODELS = {f.__name__: f for f in (gpt2, bert, llama, vit, resnet, lstm)}


class Subject:
    """One model in training; variants take turns on it, so that all do the same work in the same state of the process."""

    def __init__(self, name: str) -> None:
        """Train until nothing is cold, and see what a plain step takes."""
        gc.collect()
        counter = counters()
        assert counter is not None
        self.counter, self.outside = counter, counter.tensor_live
        torch.manual_seed(0)
        self.step = MODELS[name]()
        for _ in range(WARM):
            self.step()
        self.resident = counter.tensor_live
        self.plain_peak = self.timed()["peak_bytes"]

    def timed(self) -> dict[str, Any]:
        """Median seconds and CPU seconds of some steps, and their peak above what is outside."""
        self.counter.tensor_peak = self.counter.tensor_live
        seconds, cpu_seconds = [], []
        for _ in range(TIMED):
            start, cpu_start = time.perf_counter(), time.process_time()
            self.step()
            seconds.append(time.perf_counter() - start)
            cpu_seconds.append(time.process_time() - cpu_start)
        return {
            "seconds": statistics.median(seconds), "cpu_seconds": statistics.median(cpu_seconds),
            "peak_bytes": self.counter.tensor_peak - self.outside,
        }

    def plain(self) -> dict[str, Any]:
        """A round without a budget."""
        for _ in range(SETTLING):
            self.step()
        return self.timed()

    def rescued(self) -> dict[str, Any]:
        """A round without a budget, in which a step that does not fit would be rescued; all fit."""
        with lowtide.budget("rescue") as running:
            for _ in range(SETTLING):
                self.step()
            found = self.timed()
        return found | {"policy": running.outcome.steps[-1].policy}

    def under(self, budget: int) -> tuple[Any, dict[str, Any]]:
        """What became of a budget (bytes above what is outside the model), and the steps timed once its plan is in force."""
        with lowtide.budget(self.outside + budget) as running:
            for _ in range(SETTLING):
                self.step()
            found = self.timed()
        return running.outcome, found

    def budgeted(self, budget: int) -> dict[str, Any]:
        """A round under a budget (bytes above what is outside the model), timed once its plan is in force."""
        outcome, found = self.under(budget)
        last, plan = outcome.steps[-1], outcome.plan
        assert plan is not None
        highest = max(s.peak_bytes for s in outcome.steps)
        return found | {
            "budget_bytes": budget,
            "highest_bytes": highest - self.outside,
            "policy": last.policy,
            "levers": [x.name for x in outcome.levers if x.used],
            "recompute_seconds": last.recompute_seconds,
            "offload_seconds": last.offload_seconds,
            "offloaded_bytes": last.offloaded_bytes,
            "predicted_extra": (plan.extra_seconds or 0.0) / plan.baseline_step_seconds,
            "time_bound": plan.bound_extra_seconds / plan.baseline_step_seconds,
            "floor_bytes": plan.bound_peak_bytes - self.outside,
        }

    def share(self, share: float) -> int:
        """The budget at a share of what a step adds."""
        resident = self.resident - self.outside
        return int(resident + share * (self.plain_peak - resident))


def measure(name: str, turns: int, tick: Callable[[], None]) -> dict[str, Any]:
    """All variants of a model, in turns that begin with another one each time."""
    subject = Subject(name)
    floor = subject.budgeted(subject.share(0.9))["floor_bytes"]
    budgets = {"roomy": 4 * subject.plain_peak}
    budgets |= {f"{share:.0%}": max(subject.share(share), int(1.1 * floor)) for share in (0.5, 0.25)}
    rounds = {"plain": subject.plain, "plain again": subject.plain, "rescue": subject.rescued}
    rounds |= {variant: partial(subject.budgeted, budget) for variant, budget in budgets.items()}
    found: dict[str, list[dict[str, Any]]] = {variant: [] for variant in rounds}
    for variant in in_turns(rounds, turns):
        found[variant].append(rounds[variant]())
        tick()
    return {
        "model": name, "runs": found, "floor_bytes": floor, "plain_peak_bytes": subject.plain_peak,
        "resident_bytes": subject.resident - subject.outside,
    }


def _spread(ratios: list[float]) -> str:
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{middle:.3f} ({low:.2f}-{high:.2f})"


def row(result: dict[str, Any], variant: str) -> tuple[str, ...]:
    """One line of the table."""
    runs, plain = result["runs"][variant], result["runs"]["plain"]
    ratios, cpu_ratios = ([r[key] / p[key] for r, p in zip(runs, plain, strict=True)] for key in ("seconds", "cpu_seconds"))
    added = result["plain_peak_bytes"] - result["resident_bytes"]
    left = (runs[0]["peak_bytes"] - result["resident_bytes"]) / added

    times = _spread(ratios), _spread(cpu_ratios)
    if not runs[0].get("budget_bytes"):
        return result["model"], variant, format_bytes(result["plain_peak_bytes"]), "", "", *times, "", "", "", ""

    def share(key: str) -> str:
        return f"{statistics.median(r[key] / p['seconds'] for r, p in zip(runs, plain, strict=True)):.1%}"

    predicted = statistics.median(r["predicted_extra"] for r in runs)
    bound = statistics.median(r["time_bound"] for r in runs)
    kept = max(r["highest_bytes"] for r in runs) <= runs[0]["budget_bytes"]
    return (
        result["model"], variant, format_bytes(result["plain_peak_bytes"]), format_bytes(runs[0]["peak_bytes"]), f"{left:.0%}",
        *times, f"{predicted:.1%} ({bound:.1%})", share("recompute_seconds"), share("offload_seconds"),
        "kept" if kept else "OVER",
    )


def main() -> None:
    """Measure, print, write."""
    options = argparse.ArgumentParser()
    options.add_argument("--json")
    options.add_argument("--models", default=",".join(MODELS))
    options.add_argument("--turns", type=int, default=9)
    options.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = options.parse_args()
    with_counter()
    torch.set_num_threads(given.threads)
    names = given.models.split(",")
    with Progress(transient=True) as progress:
        task = progress.add_task("measuring", total=VARIANTS * given.turns * len(names))
        results = [measure(name, given.turns, lambda: progress.advance(task)) for name in names]
    table = Table(title="Seconds a step against plain (ratio within each turn)")
    columns = (
        "model", "variant", "plain peak", "peak", "of added", "x plain", "CPU time", "predicted (bound)", "recompute",
        "offload", "budget",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for result in results:
        for variant in result["runs"]:
            if variant != "plain":
                table.add_row(*row(result, variant))
    Console(width=150).print(table)
    if given.json:
        Path(given.json).write_text(json.dumps({"machine": machine(), "threads": given.threads, "results": results}, indent=1))


if __name__ == "__main__":
    main()
