"""Law: the report on a run that ran out of memory names the planted cause first, in at least 18 of 20 scripts.

The cap lies half-way between the peaks of the script with and without its planted flaw (or at 85 % of its peak, if nothing is
flawed and the model is simply too large), so it is the flaw that ends the run.
"""

from __future__ import annotations

import copy
import gc
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from harness import heap
from lowtide.recording.explanation.explanation import explain
from lowtide.recording.findings.all_findings import would_fit
from lowtide.recording.recorded_step import laid_out
from lowtide.recording.peak_report import peak_report
from test_findings import CASES
from torch import nn
from torch.nn import functional as F

import lowtide
from lowtide.recording import reader

MISSED = {"evaluation-graph-again"}
"""It dies within the evaluation's forward, when nothing tells yet that no backward would have followed."""
STEPS = 4


def _conv(width: int = 48) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10),
    )


def _train(model: nn.Module, make: Callable[[], torch.Tensor], optimizer: torch.optim.Optimizer, **zero: bool) -> None:
    for _ in range(STEPS):
        optimizer.zero_grad(**zero)
        loss = model(make()).square().mean()
        loss.backward()
        optimizer.step()


def outputs_collected(mended: bool) -> None:  # noqa: FBT001
    """Predictions are kept in a list with their graphs."""
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    kept = []
    for _ in range(STEPS):
        out = model(torch.randn(1024, 256))
        optimizer.zero_grad()
        out.square().mean().backward(retain_graph=True)
        optimizer.step()
        kept.append(out.detach().mean() if mended else out)
        del out


def loss_summed(mended: bool) -> None:  # noqa: FBT001
    """A convolutional net whose running loss keeps every graph."""
    model = _conv()
    total: torch.Tensor | float = 0.0
    for _ in range(STEPS):
        loss = model(torch.randn(4, 3, 32, 32)).square().mean()
        loss.backward(retain_graph=True)
        total = total + (loss.item() if mended else loss)
        del loss


def copies_of_best(mended: bool) -> None:  # noqa: FBT001
    """Four copies of a large linear model."""
    model = nn.Sequential(nn.Linear(700, 700), nn.Linear(700, 700))
    best = [] if mended else [copy.deepcopy(model) for _ in range(4)]
    _train(model, lambda: torch.randn(8, 700), torch.optim.SGD(model.parameters(), lr=0.01))
    del best


def double_images(mended: bool) -> None:  # noqa: FBT001
    """Images and net in float64."""
    kind = torch.float32 if mended else torch.float64
    model = nn.Sequential(_conv().to(kind))
    head = nn.Linear(10, 1)
    for _ in range(STEPS):
        head(model(torch.randn(8, 3, 32, 32, dtype=kind)).float()).mean().backward()


def large_vocabulary(mended: bool) -> None:  # noqa: FBT001
    """Logits over a large vocabulary (mended: over a small one)."""
    words = 500 if mended else 12000
    model = nn.Sequential(nn.Embedding(words, 32), nn.Linear(32, words))
    for _ in range(STEPS):
        ids = torch.randint(0, words, (256,))
        F.cross_entropy(model(ids), ids).backward()
        model.zero_grad()


def wide_adam(mended: bool) -> None:  # noqa: FBT001
    """Foreach AdamW over many layers."""
    model = nn.Sequential(*(nn.Linear(200, 200) for _ in range(16)))
    _train(model, lambda: torch.randn(2, 200), torch.optim.AdamW(model.parameters(), foreach=not mended))


def kept_gradients(mended: bool) -> None:  # noqa: FBT001
    """Large gradients zeroed in place, with a large batch beside them."""
    model = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(512, 512), nn.ReLU())))
    _train(model, lambda: torch.randn(700, 512), torch.optim.SGD(model.parameters(), lr=0.01), set_to_none=mended)


def whole_data(mended: bool) -> None:  # noqa: FBT001
    """Slices of a large array."""
    model = nn.Linear(128, 1)
    data = torch.randn(128 if mended else 40000, 128)
    for i in range(STEPS):
        model(data[i * 32 : (i + 1) * 32].clone()).mean().backward()


def large_batch(_: bool) -> None:  # noqa: FBT001
    """Nothing is wrong but the batch."""
    model = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(128, 128), nn.GELU())))
    _train(model, lambda: torch.randn(4096, 128), torch.optim.SGD(model.parameters(), lr=0.01))


def many_images(_: bool) -> None:  # noqa: FBT001
    """The same with images."""
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *(m for _ in range(4) for m in (nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1))))
    _train(model, lambda: torch.randn(32, 3, 32, 32), torch.optim.SGD(model.parameters(), lr=0.01))


def states(_: bool) -> None:  # noqa: FBT001
    """Adam's states of large layers."""
    model = nn.Sequential(*(nn.Linear(600, 600) for _ in range(4)))
    _train(model, lambda: torch.randn(2, 600), torch.optim.Adam(model.parameters(), fused=True))


def attention(_: bool) -> None:  # noqa: FBT001
    """Scores of a long sequence."""
    project = nn.Linear(32, 96)
    for _step in range(STEPS):
        q, k, v = project(torch.randn(4, 512, 32)).chunk(3, -1)
        (torch.softmax(q @ k.mT, -1) @ v).square().mean().backward()


PLANTED: dict[str, tuple[Callable[[bool], None], str]] = {
    **{f"{kind}-again": (script, kind) for kind, script in CASES.items()},
    "outputs-collected": (outputs_collected, "graph-kept"),
    "loss-summed": (loss_summed, "graph-kept"),
    "copies-of-best": (copies_of_best, "model-copies"),
    "double-images": (double_images, "float64"),
    "large-vocabulary": (large_vocabulary, "loss-block"),
    "wide-adam": (wide_adam, "foreach"),
    "kept-gradients": (kept_gradients, "zeroed-gradients"),
    "whole-data": (whole_data, "resident-data"),
    "large-batch": (large_batch, "activation"),
    "many-images": (many_images, "activation"),
    "states": (states, "optimizer_state"),
    "attention": (attention, "activation"),
}


def _peak(script: Callable[[bool], None], *, mended: bool) -> int:
    counter = heap()
    torch.manual_seed(0)
    gc.collect()
    base = counter.tensor_live
    counter.tensor_peak = base
    script(mended)
    return counter.tensor_peak - base


def cause(recording: reader.Recording, cap: int) -> str:
    """The first cause that a reader of the report sees: a finding that alone would let it fit, else the largest role."""
    found = [f for f in explain(recording).findings if f.saving_bytes]
    fitting = would_fit(found, cap)
    if fitting:
        return fitting[0].id
    reports = [r for r in map(peak_report, (s for s in laid_out(recording) if s.denied.any())) if r is not None]
    return max(reports[-1].by_role, key=reports[-1].by_role.__getitem__) if reports else "nothing was denied"


def _causes(folder: Path) -> dict[str, tuple[str, str]]:
    """For each script, the cause that the report names and the planted one."""
    told = {}
    for name, (script, expected) in PLANTED.items():
        script(False)  # noqa: FBT003 - libraries are warm from here on
        flawed, mended = _peak(script, mended=False), _peak(script, mended=True)
        wanted = (flawed + mended) // 2 if mended < 0.98 * flawed else int(0.85 * flawed)
        torch.manual_seed(0)
        gc.collect()
        counter = heap()
        cap = counter.tensor_live + wanted
        counter.cap = cap
        try:
            with pytest.raises(RuntimeError, match="allocate memory"), lowtide.record(folder / name):
                script(False)  # noqa: FBT003
        finally:
            counter.cap = 0
        told[name] = (cause(reader.read(folder / name), cap), expected)
    return told


@pytest.mark.long
def test_the_planted_cause_is_named_in_all_scripts_but_one(tmp_path: Path) -> None:
    """The law asks for 18 of 20; the single script that is missed today is listed, so that no other can join it unnoticed."""
    assert len(PLANTED) >= 20
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
        told = fresh.submit(_causes, tmp_path).result()
    wrong = {n: t for n, t in told.items() if t[0] != t[1]}
    assert len(told) == len(PLANTED)
    assert wrong.keys() <= MISSED, wrong
