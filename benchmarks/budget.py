"""What a budget costs: seconds a step, plain and under budgets, on models as ``transformers`` ships them and on an LSTM.

Every variant trains the same steps from the same seed in this one process, in turn, several times over; a variant's figure
is the median over its later steps, and the ratio is taken within each turn, its spread shown. The heap counter must be
preloaded; the script starts itself again with it.

Prints a table and, with ``--json FILE``, writes every figure with the machine's name.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import lowtide
import torch
from lowtide.live.heap import counters, library_path
from lowtide.units import format_bytes
from torch import nn

STEPS = 11
SETTLED = 5
"""Steps at the end of a run that are timed: by then the plan is in force."""

Step = Callable[[], None]


def _language(model: nn.Module, vocabulary: int, batch: int, length: int) -> Step:
    model.train()

    def loss() -> torch.Tensor:
        ids = torch.randint(0, vocabulary, (batch, length))
        return model(input_ids=ids, labels=ids).loss

    return _step(model, loss)


def _image(model: nn.Module, batch: int, size: int) -> Step:
    model.train()
    return _step(
        model, lambda: model(pixel_values=torch.randn(batch, 3, size, size), labels=torch.randint(0, 10, (batch,))).loss
    )


def _step(model: nn.Module, loss_of: Callable[[], torch.Tensor]) -> Step:
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        loss_of().backward()
        optimizer.step()
        optimizer.zero_grad()

    step.model, step.optimizer = model, optimizer  # type: ignore[attr-defined]
    return step


def gpt2() -> Step:
    """GPT-2, 6 layers of 512."""
    import transformers as hf

    return _language(hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=8192, n_embd=512, n_layer=6, n_head=8)), 8192, 4, 256)


def bert() -> Step:
    """BERT, 6 layers of 512, attention as its first authors wrote it."""
    import transformers as hf

    config = hf.BertConfig(
        vocab_size=8192, hidden_size=512, num_hidden_layers=6, num_attention_heads=8, intermediate_size=2048,
        attn_implementation="eager",
    )
    return _language(hf.BertForMaskedLM(config), 8192, 4, 256)


def llama() -> Step:
    """Llama, 6 layers of 512."""
    import transformers as hf

    config = hf.LlamaConfig(
        vocab_size=8192, hidden_size=512, intermediate_size=1408, num_hidden_layers=6, num_attention_heads=8
    )
    return _language(hf.LlamaForCausalLM(config), 8192, 4, 256)


def vit() -> Step:
    """ViT-Small's width and picture, 6 layers."""
    import transformers as hf

    config = hf.ViTConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=6, intermediate_size=1536, num_labels=10
    )
    return _image(hf.ViTForImageClassification(config), 8, 224)


def resnet() -> Step:
    """ResNet-50 as it is."""
    import transformers as hf

    return _image(hf.ResNetForImageClassification(hf.ResNetConfig(num_labels=10)), 8, 160)


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
    return _step(model, lambda: nn.functional.mse_loss(model(torch.randn(64, 100, 64)), torch.randn(64, 100, 1)))


MODELS = {f.__name__: f for f in (gpt2, bert, llama, vit, resnet, lstm)}


def run(make: Callable[[], Step], budget: int | None) -> dict[str, Any]:
    """One run: seconds of the settled steps, peak above the base, and what the plan said."""
    gc.collect()
    counter = counters()
    assert counter is not None
    base = counter.tensor_live
    counter.tensor_peak = base
    torch.manual_seed(0)
    seconds = []

    def train() -> Step:
        step = make()
        for _ in range(STEPS):
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
        return step

    if budget is None:
        step, figures = train(), None
    else:
        with lowtide.budget(base + budget) as running:
            step = train()
        figures = running.outcome
    last = figures.steps[-1] if figures is not None else None
    plan = figures.plan if figures is not None else None
    return {
        "seconds": statistics.median(seconds[-SETTLED:]),
        "peak_bytes": counter.tensor_peak - base,
        "resident_bytes": _resident(step),
        "policy": None if last is None else last.policy,
        "recompute_seconds": None if last is None else last.recompute_seconds,
        "offload_seconds": None if last is None else last.offload_seconds,
        "offloaded_bytes": None if last is None else last.offloaded_bytes,
        "predicted_extra": None if plan is None or plan.extra_seconds is None
        else plan.extra_seconds / plan.baseline_step_seconds,
        "time_bound": None if plan is None else plan.bound_extra_seconds / plan.baseline_step_seconds,
        "floor_bytes": None if plan is None else plan.bound_peak_bytes - base,
        "lowest_bytes": None if plan is None else plan.lowest_peak_bytes - base,
    }


def _resident(step: Any) -> int:
    state = [t for s in step.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    return sum(t.nbytes for t in (*step.model.parameters(), *step.model.buffers(), *state))


def budgets(plain: dict[str, Any], floor: int) -> dict[str, int]:
    """Bytes of the variants: room to spare, and shares of what training adds, not below 1.1 times the floor."""
    added = plain["peak_bytes"] - plain["resident_bytes"]
    found = {"roomy": 4 * plain["peak_bytes"]}
    for share in (0.5, 0.25):
        wanted = int(plain["resident_bytes"] + share * added)
        found[f"{share:.0%}"] = max(wanted, int(1.1 * floor))
    return found


def measure(name: str, turns: int, tick: Callable[[], None]) -> dict[str, Any]:
    """All variants of a model, turn by turn."""
    make = MODELS[name]
    plain = run(make, None)
    probe = run(make, int(plain["resident_bytes"] + 0.9 * (plain["peak_bytes"] - plain["resident_bytes"])))
    wanted = budgets(plain, probe["floor_bytes"] or plain["peak_bytes"])
    found: dict[str, list[dict[str, Any]]] = {"plain": [], **{k: [] for k in wanted}}
    for _ in range(turns):
        found["plain"].append(run(make, None))
        for variant, budget in wanted.items():
            found[variant].append({"budget_bytes": budget, **run(make, budget)})
            tick()
    return {"model": name, "runs": found, "floor_bytes": probe["floor_bytes"]}


def row(result: dict[str, Any], variant: str) -> tuple[str, ...]:
    """One line of the table."""
    runs, plain = result["runs"][variant], result["runs"]["plain"]
    ratios = [r["seconds"] / p["seconds"] for r, p in zip(runs, plain, strict=True)]
    added = plain[0]["peak_bytes"] - plain[0]["resident_bytes"]
    left = (runs[0]["peak_bytes"] - plain[0]["resident_bytes"]) / added

    def share(key: str) -> str:
        return f"{statistics.median((r[key] or 0.0) / p['seconds'] for r, p in zip(runs, plain, strict=True)):.1%}"

    predicted = statistics.median(r["predicted_extra"] or 0.0 for r in runs)
    bound = statistics.median(r["time_bound"] or 0.0 for r in runs)
    kept = max(r["peak_bytes"] for r in runs) <= runs[0]["budget_bytes"]
    return (
        result["model"], variant, format_bytes(plain[0]["peak_bytes"]), format_bytes(runs[0]["peak_bytes"]), f"{left:.0%}",
        f"{statistics.median(ratios):.3f}", f"{min(ratios):.2f}-{max(ratios):.2f}", f"{predicted:.1%} ({bound:.1%})",
        share("recompute_seconds"), share("offload_seconds"),
        "kept" if kept else "OVER",
    )


def main() -> None:
    """Measure, print, write."""
    options = argparse.ArgumentParser()
    options.add_argument("--json")
    options.add_argument("--models", default=",".join(MODELS))
    options.add_argument("--turns", type=int, default=2)
    given = options.parse_args()
    if counters() is None:
        os.environ["LD_PRELOAD"] = str(library_path())
        os.execv(sys.executable, [sys.executable, *sys.argv])  # noqa: S606
    names = given.models.split(",")
    with Progress(transient=True) as progress:
        task = progress.add_task("measuring", total=3 * given.turns * len(names))
        results = [measure(name, given.turns, lambda: progress.advance(task)) for name in names]
    table = Table(title="Seconds a step against plain (ratio within each turn)")
    columns = (
        "model", "variant", "plain peak", "peak", "of added", "x plain", "spread", "predicted (bound)", "recompute",
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
        machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__}
        Path(given.json).write_text(json.dumps({"machine": machine, "results": results}, indent=1))


if __name__ == "__main__":
    main()
