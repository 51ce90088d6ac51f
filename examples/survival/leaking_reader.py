"""Trains on an HDF5 file read sample by sample, which leaks with h5py 3.15.1, and survives it under ``lowtide guard``.

``lowtide guard --memory 400MiB examples/survival/leaking_reader.py --leak 2``: ``--leak`` holds that many MiB a step on to
memory besides, for those whose h5py does not leak.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import h5py
import numpy as np

import lowtide
import torch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "lowtide-leaking-reader")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--leak", type=float, default=0.0)
arguments = parser.parse_args()
arguments.folder.mkdir(exist_ok=True)
file = arguments.folder / "data.h5"
if not file.exists():
    random = np.random.default_rng(0)
    with h5py.File(file, "w") as opened:
        opened["x"], opened["y"] = random.standard_normal((4096, 64)), random.integers(0, 4, 4096)


class Samples(torch.utils.data.Dataset):
    """Opens the file once, reads a sample at a time."""

    def __init__(self) -> None:
        self.file = h5py.File(file)

    def __len__(self) -> int:
        """Samples."""
        return len(self.file["x"])

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """One sample."""
        return torch.from_numpy(self.file["x"][index]).float(), int(self.file["y"][index])


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(128, 4))
optimizer = torch.optim.AdamW(model.parameters())
batches = lowtide.checkpoint.Batches(torch.utils.data.DataLoader(Samples(), batch_size=32, shuffle=True))
state = {"model": model, "optimizer": optimizer, "batches": batches}
at = lowtide.checkpoint.resume(arguments.folder / "checkpoints", state)
step, kept = at.get("step", 0), []
whole = arguments.epochs * len(batches)
for epoch in range(at.get("epoch", 0), arguments.epochs):
    for x, y in batches:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        kept.append(np.ones(int(arguments.leak * 2**17)))
        step += 1
        lowtide.checkpoint(arguments.folder / "checkpoints", state, epoch=epoch, step=step, fraction=step / whole)
print(f"{step} steps, the weights sum to {sum(p.double().sum().item() for p in model.parameters()):.12f}")
