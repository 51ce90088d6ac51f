"""Budgets on a CUDA device: equal bits, the peak held, and seconds a step, beside plain torch.

Each variant (plain, and budgets as shares of the plain peak above what is resident) trains a fresh model from the same seed.
Variants take turns, each turn beginning with another one; seconds are the medians of the later steps of all turns, each ended
by a synchronization. Plain runs a second time in each turn: what its ratio is besides 1 is the benchmark's own error, and
where its bits differ from the first run's the model itself does not repeat.

Prints a table and, with ``--json FILE``, writes every figure with the device's name.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import lowtide
import torch
from lowtide.base.errors import BudgetError
from lowtide.base.units import format_bytes
from process import in_turns, machine
from torch import nn

STEPS = 12
SETTLED = 6
"""Steps before those that are timed and held to the budget."""
SHARES = (0.75, 0.5, 0.35)
VARIANTS = ("plain", "again", *(f"{share:.0%}" for share in SHARES))


def _language(model: nn.Module, vocabulary: int, batch: int, length: int) -> Callable[[], torch.Tensor]:
    def loss() -> torch.Tensor:
        ids = torch.randint(0, vocabulary, (batch, length), device="cuda")
        return model(input_ids=ids, labels=ids).loss

    return loss


def gpt2() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """GPT-2 small."""
    import transformers as hf

    model = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=32768, attn_implementation="eager")).cuda().train()
    return model, _language(model, 32768, 8, 512)


def bert() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """BERT base, attention as its first authors wrote it."""
    import transformers as hf

    model = hf.BertForMaskedLM(hf.BertConfig(vocab_size=8192, attn_implementation="eager")).cuda().train()
    return model, _language(model, 8192, 16, 512)


def llama() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """Llama, 12 layers of 768, under bfloat16 autocast."""
    import transformers as hf

    config = hf.LlamaConfig(
        vocab_size=32768, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
        attn_implementation="eager",
    )
    model = hf.LlamaForCausalLM(config).cuda().train()
    inner = _language(model, 32768, 8, 512)

    def loss() -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return inner()

    return model, loss


def resnet() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """ResNet-50."""
    import transformers as hf

    model = hf.ResNetForImageClassification(hf.ResNetConfig()).cuda().train()

    def loss() -> torch.Tensor:
        x = torch.randn(32, 3, 224, 224, device="cuda")
        return model(pixel_values=x, labels=torch.randint(0, 2, (32,), device="cuda")).loss

    return model, loss


def _train(make: Callable[[], Any], budget: int | None) -> dict[str, Any]:
    """One run of a variant: seconds and peaks of its steps, and the bits that it ends with."""
    torch.manual_seed(0)
    gc.collect()
    torch.cuda.empty_cache()
    model, loss_of = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    seconds, peaks, resident, bits = [], [], 0, []

    def steps() -> None:
        nonlocal resident
        for _ in range(STEPS):
            torch.cuda.synchronize()
            start = time.perf_counter()
            torch.cuda.reset_peak_memory_stats()
            loss = loss_of()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            bits.append(loss.detach().clone())
            del loss
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
            peaks.append(torch.cuda.max_memory_allocated())
            resident = torch.cuda.memory_allocated()

    policies: list[str] = []
    if budget is None:
        steps()
    else:
        with lowtide.budget(budget) as run:
            steps()
        peaks = [s.peak_bytes for s in run.outcome.steps]
        policies = [s.policy for s in run.outcome.steps]
    bits = [*(b.cpu() for b in bits), *(p.detach().cpu() for p in model.parameters())]
    return {"seconds": seconds, "peaks": peaks, "resident": resident, "bits": bits, "policies": policies}


def measure(name: str, make: Callable[[], Any], turns: int) -> list[dict[str, Any]]:
    """All variants of one model."""
    _train(make, None)  # libraries load their kernels
    first = _train(make, None)
    peak, resident = max(first["peaks"][2:]), first["resident"]
    budgets = {f"{s:.0%}": int(resident + s * (peak - resident)) for s in SHARES}
    found: dict[str, dict[str, Any]] = {v: {"seconds": [], "peaks": [], "equal": True, "refused": ""} for v in VARIANTS}
    for variant in in_turns(VARIANTS, turns):
        row = found[variant]
        if row["refused"]:
            continue
        try:
            run = _train(make, budgets.get(variant))
        except BudgetError as error:
            row["refused"] = str(error)
            continue
        row["seconds"] += run["seconds"][SETTLED:]
        row["peaks"] = run["peaks"]
        row["policies"] = run["policies"]
        row["equal"] &= all(torch.equal(a, b) for a, b in zip(run["bits"], first["bits"], strict=True))
    plain = statistics.median(found["plain"]["seconds"])
    rows = []
    for variant in VARIANTS:
        row, budget = found[variant], budgets.get(variant)
        took = sorted(row["seconds"])
        rows.append({
            "model": name, "variant": variant, "budget_bytes": budget, "plain_peak_bytes": peak, "resident_bytes": resident,
            "first_step_peak_bytes": row["peaks"][0] if row["peaks"] else None,
            "settled_peak_bytes": max(row["peaks"][SETTLED:], default=None),
            "held_from_second_step": None if budget is None or not row["peaks"] else max(row["peaks"][1:]) <= budget,
            "equal_bits": row["equal"] if row["seconds"] else None, "refused": row["refused"],
            "policies": row.get("policies", []),
            "median_seconds": statistics.median(took) if took else None,
            "quartiles_seconds": [took[len(took) // 4], took[3 * len(took) // 4]] if took else None,
            "times_plain": statistics.median(took) / plain if took else None,
        })
    return rows


def main() -> None:
    """Measure, print, write."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--json", type=Path)
    options.add_argument("--turns", type=int, default=2)
    options.add_argument("--models", default="gpt2,bert,llama,resnet")
    given = options.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    table = Table("model", "variant", "budget", "first step", "settled", "held", "bits", "a step", "x plain")
    rows = []
    for name in given.models.split(","):
        for row in measure(name, globals()[name], given.turns):
            rows.append(row)
            cells = [row["budget_bytes"], row["first_step_peak_bytes"], row["settled_peak_bytes"]]
            took, ratio = row["median_seconds"], row["times_plain"]
            table.add_row(
                name, row["variant"], *("" if c is None else format_bytes(c) for c in cells),
                {None: "", True: "yes", False: "NO"}[row["held_from_second_step"]],
                row["refused"][:40] if row["refused"] else {None: "", True: "equal", False: "OTHER"}[row["equal_bits"]],
                "" if took is None else f"{took * 1e3:.1f} ms", "" if ratio is None else f"{ratio:.2f}",
            )
        if given.json is not None:  # as they come: a borrowed device may go at any time
            found = {"machine": {**machine(), "device": torch.cuda.get_device_name()}, "steps": STEPS, "rows": rows}
            given.json.write_text(json.dumps(found, indent=1) + "\n")
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
