"""The cost of float64, in the ways in which it enters scripts: the saving reported is what float32, made for real, saves."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from lowtide.recording.explanation.explanation import explain
from lowtide.recording.whatif import Finding
from torch import nn
from torch.nn import functional as F

import lowtide
from lowtide.recording import reader

STEPS = 3
SHARE, BYTES = 0.02, 4096
ROWS, WIDTH = 1024, 256
Script = Callable[[torch.dtype], None]


def _model(out: int = 10) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, out))


def _fit(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(x), torch.randint(0, 10, (len(x),))).backward()
    optimizer.step()


def _trained(batch: Callable[[int], torch.Tensor]) -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(STEPS):
        x = batch(i)  # which a variable holds through the step
        _fit(model, optimizer, x.float())


def batch_in_a_variable(kind: torch.dtype) -> None:
    """It lies beside its copy, which is not made in float32."""
    _trained(lambda _: torch.randn(2 * ROWS, WIDTH, dtype=kind))


def slices_of_the_data(kind: torch.dtype) -> None:
    """Views are converted; in float32 nothing is copied."""
    data = torch.randn(STEPS * ROWS, WIDTH, dtype=kind)
    _trained(lambda i: data[i * ROWS : (i + 1) * ROWS])


def batches_of_a_loader(kind: torch.dtype) -> None:
    """As ``DataLoader`` makes them."""
    rows = torch.utils.data.TensorDataset(torch.randn(STEPS * ROWS, WIDTH, dtype=kind))
    batches = iter(torch.utils.data.DataLoader(rows, batch_size=ROWS))
    _trained(lambda _: next(batches)[0])


def targets(kind: torch.dtype) -> None:
    """The loss converts the model's outputs, and their gradient back."""
    model = _model(WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH, dtype=kind)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()


def spectra(kind: torch.dtype) -> None:
    """complex128 between real tensors."""
    layer = nn.Linear(513, 513).to(kind)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        layer(torch.fft.rfft(torch.randn(512, 1024, dtype=kind)).abs()).square().mean().backward()
        optimizer.step()


def whole_model(kind: torch.dtype) -> None:
    """Norms, dropout, another optimizer."""
    layers = [nn.Linear(WIDTH, 512), nn.LayerNorm(512), nn.GELU(), nn.Dropout(0.1), nn.Linear(512, 10)]
    model = nn.Sequential(*layers).to(kind)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(STEPS):
        _fit(model, optimizer, torch.randn(ROWS, WIDTH, dtype=kind))


def gates_and_masks(kind: torch.dtype) -> None:
    """Operators that look like parts of an LSTM, and operators that select by mask and position."""
    gate, cell = nn.Linear(WIDTH, WIDTH).to(kind), nn.GRU(WIDTH, 64).to(kind)
    optimizer = torch.optim.SGD([*gate.parameters(), *cell.parameters()], lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(ROWS, WIDTH, dtype=kind)
        h = gate(x).sigmoid_()
        chosen = x[x > 0].sum() + x.sort(dim=1).values[:, 0].sum()
        loss = cell((h * x).view(16, -1, WIDTH))[0].square().mean() + h.mean() * chosen
        loss.backward()
        optimizer.step()


def convolutions(kind: torch.dtype) -> None:
    """In float64 they are matrix products of the unfolded input."""
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)).to(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        _fit(model, optimizer, torch.randn(16, 3, 64, 64, dtype=kind))


def recurrent(kind: torch.dtype, features: int, hidden: int) -> None:
    """In float32 one kernel with a workspace of its own runs all time steps."""
    model, head = nn.LSTM(features, hidden, batch_first=True).to(kind), nn.Linear(hidden, 10).to(kind)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        h, _ = model(torch.randn(64, 50, features, dtype=kind))
        F.cross_entropy(head(h[:, -1]), torch.randint(0, 10, (64,))).backward()
        optimizer.step()


def _told_and_saved(script: Script, folder: Path) -> tuple[Finding, int]:
    recorded = []
    for kind in (torch.float32, torch.float64, torch.float32):  # the first one warms libraries up
        torch.manual_seed(0)
        gc.collect()
        with lowtide.record(folder / "run.lowtide"):
            script(kind)
        recorded.append(reader.read(folder / "run.lowtide"))
    _, flawed, mended = recorded
    (found,) = (f for f in explain(flawed).findings if f.id == "float64")
    assert not [f for f in explain(mended).findings if f.id == "float64"]
    above = [next(r.peak_bytes for r in made.steps if r.step == found.step) - made.steps[0].start_bytes for made in (flawed, mended)]
    return found, above[0] - above[1]


@pytest.mark.parametrize(
    "script",
    [batch_in_a_variable, slices_of_the_data, batches_of_a_loader, targets, spectra, whole_model, gates_and_masks],
)
def test_the_saving_reported_is_what_float32_saves(script: Script, tmp_path: Path) -> None:
    found, saved = _told_and_saved(script, tmp_path)
    assert abs(found.saving_bytes - saved) <= max(SHARE * saved, BYTES), (found, saved)
    assert found.text.endswith("at the input")


def test_convolutions_are_named_and_their_saving_is_a_lower_bound(tmp_path: Path) -> None:
    found, saved = _told_and_saved(convolutions, tmp_path)
    assert "it may save more: convolutions" in found.text
    assert 0 < found.saving_bytes <= saved


@pytest.mark.parametrize(("features", "hidden"), [(512, 16), (64, 128)])
def test_nothing_is_promised_where_an_lstm_uses_another_kernel(features: int, hidden: int, tmp_path: Path) -> None:
    """In float32 its kernel has a workspace of its own, so that it may take more than in float64, or less."""
    found, _ = _told_and_saved(partial(recurrent, features=features, hidden=hidden), tmp_path)
    assert found.saving_bytes == 0
    assert "the saving is unknown: LSTMs" in found.text
