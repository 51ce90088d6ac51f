"""Law: a prediction for a size that was never run is within its stated doubt, and never says "fits" where it does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lowtide.studies.size.predict import Model
from lowtide.recording.file_format import EntryKind, decode_run, encode_run
from lowtide.recording.reader import Recording, read
from torch import nn
from torch.nn import functional as F

import lowtide

Loss = Callable[[nn.Module, int], torch.Tensor]
WIDTH = 64


def _similarities(model: nn.Module, size: int) -> torch.Tensor:
    """All pairs of a batch: quadratic in its size, hidden behind the parameters at small sizes."""
    z = F.normalize(model(torch.randn(size, WIDTH)), dim=1)
    return F.cross_entropy(z @ z.t() / 0.1, torch.arange(size))


def _thinned(model: nn.Module, size: int) -> torch.Tensor:
    """All pairs of one row in 32: a quadratic term so small that a line through the smaller sizes meets the largest."""
    z = model(torch.randn(size, WIDTH))
    few = z.detach()[::32]
    model.pairs = few @ few.t()  # held through the backward
    return z.square().mean()


def _triplets(model: nn.Module, size: int) -> torch.Tensor:
    """All triplets: cubic."""
    z = model(torch.randn(size, WIDTH))
    d = z @ z.t()
    return F.relu(d.unsqueeze(2) - d.unsqueeze(1) + 0.2).mean()


def _padded(model: nn.Module, size: int) -> torch.Tensor:
    """Rounded up to a multiple of 64: the same at all small sizes."""
    return model(torch.randn(-(-size // 64) * 64, WIDTH)).square().mean()


def _pairs(model: nn.Module, size: int) -> torch.Tensor:
    """n (n - 1) / 2 pairs: a polynomial that is not a single power."""
    z = model(torch.randn(size, WIDTH))
    i, j = torch.triu_indices(size, size, 1)
    return (z[i] * z[j]).sum(1).square().mean()


def _chosen(model: nn.Module, size: int) -> torch.Tensor:
    """As many rows as the data select."""
    z = model(torch.randn(64 * size, WIDTH))
    kept = z[z[:, 0] > 0.3]
    return torch.cat([kept, kept], 1).tanh().square().mean()


def _plain(model: nn.Module, size: int) -> torch.Tensor:
    return model(torch.randn(size, WIDTH)).square().mean()


def _convolved(model: nn.Module, size: int) -> torch.Tensor:
    """A library chooses its algorithm by the size."""
    x = model(torch.randn(size, WIDTH)).view(size, 1, 8, 8)
    return F.conv2d(x, torch.ones(4, 1, 3, 3, requires_grad=True)).square().mean()


def _recorded(loss: Loss, size: int, folder: Path) -> Recording:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, WIDTH))
    optimizer = torch.optim.Adam(model.parameters())
    file = folder / f"{loss.__name__}{size}.lowtide"
    with lowtide.record(file):
        for _ in range(3):
            optimizer.zero_grad()
            loss(model, size).backward()
            optimizer.step()
    return read(file)


def _peak(recording: Recording) -> int:
    return max(row.peak_bytes for row in recording.steps)


@pytest.mark.parametrize(
    ("loss", "small", "large", "exact"),
    [
        (_plain, (4, 6, 8), 64, True),
        (_similarities, (16, 24, 32), 256, True),
        (_thinned, (64, 448, 480, 512), 16384, True),
        (_triplets, (4, 6, 8), 64, False),
        (_triplets, (8, 12, 16), 96, False),
        (_padded, (8, 16, 24), 192, False),
        (_pairs, (8, 12, 16), 128, False),
        (_chosen, (4, 6, 8), 64, False),
        (_convolved, (8, 12, 16), 128, False),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_the_real_peak_is_within_the_doubt_of_the_prediction(
    loss: Loss, small: tuple[int, ...], large: int, exact: bool, tmp_path: Path,  # noqa: FBT001
) -> None:
    """One byte less than the real peak is never said to fit. Where sizes enter as simple powers, the prediction is within 1 %.
    Convolutions may stay below the range: their workspace is linear in the recordings and smaller beyond them.
    """
    model = Model([({"batch": float(size)}, _recorded(loss, size, tmp_path)) for size in small])
    real = _peak(_recorded(loss, large, tmp_path))
    found = model.at({"batch": float(large)})
    assert found.at_most_bytes >= real
    if loss is not _convolved:  # whose workspace is a line in the recordings, and less beyond them
        assert found.peak_bytes * (1 - found.doubt) <= real
    assert found.fits(real - 1) is not True
    if exact:
        assert abs(found.peak_bytes - real) <= 0.01 * real
        assert found.doubt < 0.01
        assert found.fits(int(1.02 * real)) is True


def test_a_size_beyond_constant_recordings_is_never_said_to_fit(tmp_path: Path) -> None:
    """Recordings that all pad to one multiple do not show the next multiple."""
    model = Model([({"length": float(size)}, _recorded(_padded, size, tmp_path)) for size in (8, 16, 24)])
    assert model.at({"length": 20.0}).fits(1 << 30) is True
    assert model.at({"length": 500.0}).fits(1 << 30) is None


def _lasting(recording: Recording, microseconds: int) -> Recording:
    """The recording with every operator taking the given time."""
    steps = []
    for step in recording.steps:
        assert step.entries is not None
        entries = step.entries.copy()
        timed = (entries["kind"] == EntryKind.OP) & (entries["flags"] > 0)
        entries["flags"][timed] = [
            encode_run(1e-6 * microseconds, replayable=replayable, seeded=seeded)
            for _, replayable, seeded in (decode_run(int(f)) for f in entries["flags"][timed])
        ]
        steps.append(replace(step, entries=entries))
    return replace(recording, steps=tuple(steps))


def test_a_predicted_step_time_excludes_the_overhead_of_recording(tmp_path: Path) -> None:
    """It is the sum of its operators' seconds; for small layers the recording itself takes longer."""
    found = [({"batch": float(size)}, _recorded(_plain, size, tmp_path)) for size in (4, 6, 8)]
    for microseconds in (10, 10_000):
        model = Model([(sizes, _lasting(recording, microseconds)) for sizes, recording in found])
        entries = found[-1][1].steps[-1].entries
        assert entries is not None
        timed = int(((entries["kind"] == EntryKind.OP) & (entries["flags"] > 0)).sum())
        assert model.at({"batch": 8.0}).step_seconds == pytest.approx(1e-6 * microseconds * timed, rel=0.05)


def test_a_larger_step_is_never_predicted_to_take_less_time(tmp_path: Path) -> None:
    """Here the smallest recording took by far the longest, as on a busy machine."""
    found = [({"batch": float(size)}, _recorded(_plain, size, tmp_path)) for size in (16, 24, 32)]
    model = Model([(sizes, _lasting(recording, microseconds)) for (sizes, recording), microseconds in zip(found, (10_000, 10, 10))])
    seconds = [model.at({"batch": float(size)}).step_seconds for size in (16, 64, 256, 1024, 4096)]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0
