"""The loss block of a language model with a real vocabulary: plain, and in pieces.

Peak above inputs, parameters and their gradients, seconds, and how far gradients are from float64.

Each part runs in a process of its own, parts interleaved; peaks are the heap counter's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PARTS = ("plain", "pieces")


def _part(part: str, args: argparse.Namespace, file: str) -> None:
    from torch.nn import functional

    import lowtide
    import torch
    from lowtide.runtime.device.heap_meter import counters

    counter = counters()
    assert counter is not None
    torch.manual_seed(0)
    h = torch.randn(args.batch, args.length, args.width)
    w = torch.nn.Parameter(torch.randn(args.vocabulary, args.width) * args.width**-0.5)
    y = torch.randint(args.vocabulary, (args.batch, args.length))

    def once() -> tuple[torch.Tensor, torch.Tensor]:
        x = h.clone().requires_grad_()
        w.grad = None
        logits = functional.linear(x, w)
        loss = functional.cross_entropy(logits.float().view(-1, args.vocabulary), y.view(-1))
        del logits
        loss.backward()
        assert x.grad is not None
        return loss.detach(), x.grad

    allow = ("chunked-loss",) if part == "pieces" else ()
    peaks, seconds = [], []
    with lowtide.budget(None, allow=allow) as run:
        for _ in range(args.repeats):
            w.grad = None
            counter.tensor_peak = base = counter.tensor_live
            start = time.perf_counter()
            loss, into_h = once()
            seconds.append(time.perf_counter() - start)
            peaks.append(counter.tensor_peak - base)
        used = [x.name for x in run.outcome.levers if x.used]
    assert used == list(allow)
    assert w.grad is not None
    exact = _exact(h, w.detach(), y, args.rows) if args.rows else None
    errors = None
    if exact is not None:
        errors = {
            "inputs": float((into_h.double() - exact[0]).norm() / exact[0].norm()),
            "weight": float((w.grad.double() - exact[1]).norm() / exact[1].norm()),
        }
    # What a parameter's gradient takes is not the loss block's: the optimizer needs it in either run.
    found = {"peak_bytes": min(peaks) - 4 * w.numel(), "seconds": seconds, "errors": errors, "loss": float(loss)}
    Path(file).write_text(json.dumps(found))


def _exact(h: Any, w: Any, y: Any, rows: int) -> tuple[Any, Any]:
    """Gradients in float64, some rows at a time."""
    import torch

    x, target, weight = h.flatten(0, 1).double(), y.flatten(), w.double()
    into_x, into_w = torch.empty_like(x), torch.zeros_like(weight)
    for start in range(0, len(x), rows):
        part = x[start : start + rows]
        p = torch.softmax(part @ weight.t(), 1)
        p[torch.arange(len(part)), target[start : start + rows]] -= 1
        p /= len(x)
        into_x[start : start + rows] = p @ weight
        into_w.addmm_(p.t(), part)
    return into_x.view_as(h), into_w


def main() -> None:
    """Run all parts and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=2, help="of each process; the second is warm")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rows", type=int, default=256, help="of the float64 reference at a time; 0 for none")
    parser.add_argument("--json", default=None)
    parser.add_argument("--part", default=None)
    parser.add_argument("--file", default=None)
    args = parser.parse_args()
    if args.part:
        _part(args.part, args, args.file)
        return
    from lowtide.runtime.device.heap_counters import library_path

    found: dict[str, list[dict[str, Any]]] = {part: [] for part in PARTS}
    environment = {**os.environ, "LD_PRELOAD": str(library_path())}
    for k in range(args.processes):
        for part in PARTS:
            with tempfile.NamedTemporaryFile() as file:
                words = [sys.executable, __file__, "--part", part, "--file", file.name]
                for name in ("vocabulary", "width", "batch", "length", "repeats"):
                    words += [f"--{name}", str(getattr(args, name))]
                words += ["--rows", str(0 if k else args.rows)]
                subprocess.run(words, check=True, env=environment)
                found[part].append(json.loads(Path(file.name).read_text()))
    rows = {}
    for part, runs in found.items():
        times = [s for r in runs for s in r["seconds"][1:]]
        rows[part] = {
            "peak_bytes": max(r["peak_bytes"] for r in runs),
            "median_seconds": statistics.median(times),
            "seconds": times,
            "errors": runs[0]["errors"],
            "loss": runs[0]["loss"],
        }
    rows["pieces"]["peak_share"] = rows["pieces"]["peak_bytes"] / rows["plain"]["peak_bytes"]
    rows["pieces"]["time_ratio"] = rows["pieces"]["median_seconds"] / rows["plain"]["median_seconds"]
    sizes = {name: getattr(args, name) for name in ("vocabulary", "width", "batch", "length")}
    print(json.dumps({**sizes, **rows}, indent=1))
    if args.json:
        Path(args.json).write_text(json.dumps({**sizes, **rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
