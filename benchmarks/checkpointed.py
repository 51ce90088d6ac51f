"""What a script that checkpoints its blocks by itself takes under a budget: seconds against the script without Lowtide.

Transformers are trained with their own gradient checkpointing, of both kinds: without Lowtide, and under budgets in turns,
within one process. A share is one of what a step adds to the resident bytes with its own checkpoints. The ratio is taken
within each turn. With ``--without``, checkpoints stay as they are written in one variant more.

Prints a table and, with ``--json FILE``, writes every figure with the machine's name.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from steps import language

import lowtide
import torch
from lowtide.base.lever_catalogue import CHECKPOINTS
from lowtide.base.units import format_bytes
from lowtide.runtime.device.heap_meter import counters
from process import in_turns, machine, with_counter

VOCABULARY, BATCH, LENGTH = 1024, 4, 128
STEPS, FIRST = 10, 4
"""Steps of a round; the first ones, which are recorded, are not timed."""
SHARES = {"3.0 x": 3.0, "1.0 x": 1.0, "0.8 x": 0.8}


def llama() -> Any:
    """A small Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=688, num_hidden_layers=6, num_attention_heads=4,
    ))  # fmt: skip


def gpt2() -> Any:
    """A small GPT-2, with dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=256, n_layer=6, n_head=4))


def bert() -> Any:
    """A small BERT, with dropout."""
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=4,
    ))  # fmt: skip


MODELS: dict[str, Callable[[], Any]] = {"Llama": llama, "GPT-2": gpt2, "BERT": bert}


class Subject:
    """A model in training with its own checkpoints."""

    def __init__(self, make: Callable[[], Any], *, reentrant: bool) -> None:
        """Train until nothing is cold, and measure the peak of a step."""
        counter = counters()
        assert counter is not None
        self.outside = counter.tensor_live
        torch.manual_seed(0)
        model = make()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.enable_input_require_grads()
        model.config.use_cache = False
        self.step = language(model, VOCABULARY, BATCH, LENGTH)
        for _ in range(3):
            self.step()
        self.resident = counter.tensor_live
        counter.tensor_peak = counter.tensor_live
        self.step()
        self.peak = counter.tensor_peak

    def timed(self) -> dict[str, Any]:
        """A round: median seconds of the later steps."""
        seconds = []
        for _ in range(STEPS):
            start = time.perf_counter()
            self.step()
            seconds.append(time.perf_counter() - start)
        return {"seconds": statistics.median(seconds[FIRST:])}

    def budgeted(self, share: float, *, without: tuple[str, ...] = ()) -> dict[str, Any]:
        """A round under a budget."""
        budget = int(self.resident + share * (self.peak - self.resident))
        with lowtide.budget(budget, without=without, keep_going=True) as running:
            found = self.timed()
        outcome = running.outcome
        return found | {
            "budget_bytes": budget - self.outside,
            "highest_bytes": max(s.peak_bytes for s in outcome.steps[2:]) - self.outside,
            "over": sum(s.peak_bytes > budget for s in outcome.steps[1:]),
            "levers": [lever.text for lever in outcome.levers],
        }


def main() -> None:
    """Measure, print, write."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json")
    options.add_argument("--turns", type=int, default=3)
    options.add_argument("--without", action="store_true", help="also with checkpoints as written, at 0.8 x")
    given = options.parse_args()
    with_counter()
    torch.set_num_threads(1)
    table = Table(title="scripts with checkpoints of their own: seconds against the script without Lowtide")
    for column in ("model", "checkpoints", "budget", "bytes", "highest", "x baseline", "spread", "steps over"):
        table.add_column(column, justify="right")
    found: dict[str, Any] = {}
    subject: Subject | None
    variants = ["baseline", *SHARES, *(["0.8 x, as written"] if given.without else [])]
    cases = [(name, reentrant) for name in MODELS for reentrant in (False, True)]
    with Progress(transient=True) as progress:
        task = progress.add_task("measuring", total=len(cases) * given.turns * len(variants))
        for name, reentrant in cases:
            subject = None  # its bytes are not to count as resident beside the next one's
            gc.collect()
            subject = Subject(MODELS[name], reentrant=reentrant)
            runs: dict[str, list[dict[str, Any]]] = {variant: [] for variant in variants}
            for variant in in_turns(runs, given.turns):
                if variant == "baseline":
                    runs[variant].append(subject.timed())
                elif variant in SHARES:
                    runs[variant].append(subject.budgeted(SHARES[variant]))
                else:
                    runs[variant].append(subject.budgeted(0.8, without=(CHECKPOINTS,)))
                progress.advance(task)
            kind = "reentrant" if reentrant else "not reentrant"
            found[f"{name}, {kind}"] = runs
            for variant in variants[1:]:
                ratios = [r["seconds"] / p["seconds"] for r, p in zip(runs[variant], runs["baseline"], strict=True)]
                table.add_row(
                    name, kind, variant, format_bytes(runs[variant][0]["budget_bytes"]),
                    format_bytes(max(r["highest_bytes"] for r in runs[variant])), f"{statistics.median(ratios):.2f}",
                    f"{min(ratios):.2f}-{max(ratios):.2f}", str(sum(r["over"] for r in runs[variant])),
                )  # fmt: skip
    Console(width=140).print(table)
    if given.json:
        Path(given.json).write_text(json.dumps({"machine": machine(), "runs": found}, indent=1))


if __name__ == "__main__":
    main()
