"""Lowtide against ``torch.utils.checkpoint`` per block and torch's ``activation_memory_budget``, at equal measured peak.

A small GPT is trained with each rival; the rival's measured peak is then Lowtide's budget for the plain model. Runs take turns
in one process; figures are medians, ratios are taken within each turn. The heap counter must be preloaded; the script starts
itself again with it. ``activation_memory_budget`` is measured with the ``aot_eager_decomp_partition`` backend: the same
partitioner as Inductor's, without its kernels, so that recomputation is compared and not code generation.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch.utils.checkpoint import checkpoint

import torch
from process import machine, with_counter
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import small_gpt

import lowtide
from lowtide.base.units import format_bytes
from lowtide.runtime.device.heap_meter import counters

STEPS, SETTLED = 12, 5
SHAPE = (8, 256)


class Checkpointed(nn.Module):
    """A block under ``torch.utils.checkpoint``."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output, recomputed in backward."""
        return checkpoint(self.block, x, use_reentrant=False)


def plain() -> nn.Module:
    """The model as the example has it."""
    return small_gpt.GPT(1000, 256, 6, SHAPE[1])


def checkpointed() -> nn.Module:
    """Every block checkpointed by hand."""
    model = plain()
    model.blocks = nn.ModuleList([Checkpointed(b) for b in model.blocks])
    return model


def partitioned(share: float) -> Callable[[], nn.Module]:
    """The model compiled with a share of the saved activations' bytes as its budget."""

    def make() -> nn.Module:
        torch._dynamo.reset()
        torch._functorch.config.activation_memory_budget = share
        return torch.compile(plain(), backend="aot_eager_decomp_partition")

    return make


def train(make: Callable[[], nn.Module], budget: int | None) -> dict[str, Any]:
    """Seconds of the settled steps, peak above the base, and the losses."""
    gc.collect()
    counter = counters()
    assert counter is not None
    base = counter.tensor_live
    torch.manual_seed(0)
    seconds, losses, peaks = [], [], []

    def loop() -> None:
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        for _ in range(STEPS):
            counter.tensor_peak = counter.tensor_live
            start = time.perf_counter()
            ids = torch.randint(0, 1000, (SHAPE[0], SHAPE[1] + 1))
            loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - start)
            peaks.append(counter.tensor_peak - base)
            losses.append(loss.item())

    if budget is None:
        loop()
    else:
        with lowtide.budget(base + budget):
            loop()
    return {"seconds": statistics.median(seconds[-SETTLED:]), "peak_bytes": max(peaks[1:]), "losses": losses}


def main() -> None:
    """Measure, print, write."""
    options = argparse.ArgumentParser()
    options.add_argument("--json")
    options.add_argument("--turns", type=int, default=3)
    given = options.parse_args()
    with_counter()
    rivals: dict[str, Callable[[], nn.Module]] = {
        "torch.utils.checkpoint, each block": checkpointed,
        "activation_memory_budget 0.5": partitioned(0.5),
        "activation_memory_budget 0.2": partitioned(0.2),
    }
    turns: dict[str, list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]] = {name: [] for name in rivals}
    for _ in range(given.turns):
        for name, make in rivals.items():
            alone = train(plain, None)
            rival = train(make, None)
            turns[name].append((alone, rival, train(plain, rival["peak_bytes"])))
    table = Table(title="At the rival's own measured peak: seconds a step against plain, losses against plain")
    columns = ("rival", "peak", "rival x plain", "lowtide x plain", "lowtide peak", "rival losses", "lowtide losses")
    for column in columns:
        table.add_column(column, justify="right")
    for name, found in turns.items():
        table.add_row(*_row(name, found))
    Console(width=130).print(table)
    if given.json:
        Path(given.json).write_text(json.dumps({"machine": machine(), "turns": turns}, indent=1))


def _row(name: str, found: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]) -> tuple[str, ...]:
    def ratios(which: int) -> str:
        r = sorted(t[which]["seconds"] / t[0]["seconds"] for t in found)
        return f"{statistics.median(r):.2f} ({r[0]:.2f}-{r[-1]:.2f})"

    def equal(which: int) -> str:
        return "equal" if all(t[which]["losses"] == t[0]["losses"] for t in found) else "different"

    _, rival, ours = found[0]
    return name, format_bytes(rival["peak_bytes"]), ratios(1), ratios(2), format_bytes(ours["peak_bytes"]), equal(1), equal(2)


if __name__ == "__main__":
    main()
