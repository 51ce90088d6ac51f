"""Law: a recording that begins during training, as in a notebook, knows the tensors that exist by then and their holders."""

from __future__ import annotations

from pathlib import Path

import torch
from harness import live_now
from lowtide.recording.recorded_step import laid_out
from lowtide.recording.peak_report import peak_report
from lowtide.recording.reader import read
from torch import nn
from torch.nn import functional as F

import lowtide


def test_tensors_from_before_the_recording_are_known_in_its_first_step(tmp_path: Path) -> None:
    """Averaged weights that are only touched at the end of a step: a fifth of the first step's peak used to be "unknown". They
    have their role and their name.
    """
    others = live_now()  # libraries keep memory from other tests
    torch.manual_seed(0)
    data, targets = torch.randn(2048, 256), torch.randint(0, 10, (2048,))
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 10))
    optimizer = torch.optim.Adam(model.parameters())
    average = [p.detach().clone() for p in model.parameters()]

    def step(i: int) -> None:
        rows = slice(i * 32, i * 32 + 32)
        optimizer.zero_grad()
        F.cross_entropy(model(data[rows]), targets[rows]).backward()
        optimizer.step()
        for held, p in zip(average, model.parameters(), strict=True):
            held.mul_(0.9).add_(p.detach(), alpha=0.1)

    for i in range(2):
        step(i)
    path = tmp_path / "late.lowtide"
    with lowtide.record(path):
        for i in range(3):
            step(i)
    first = next(s for s in laid_out(read(path)) if s.row.step == 0)
    report = peak_report(first)
    assert report is not None
    assert sum(report.by_role.values()) == report.bytes
    assert report.by_role.get("unknown", 0) <= others + 0.01 * (report.bytes - others)
    named = [b for b in report.top if "average[0]" in str(b)]
    assert named, "the largest averaged weight has no name"
