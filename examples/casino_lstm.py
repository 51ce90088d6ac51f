"""The dishonest casino: which of two dice was thrown?

Two four-sided dice, one fair and one loaded (0.5, 0.3, 0.2, 0.0); the die is changed after two 1s in a row. Sequences of
throws go in, and at every throw the network says which die it was: LSTM(128), a dense layer per step, squared error, Adam.
A plain PyTorch script: it knows nothing of Lowtide.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

FAIR = torch.tensor([0.25, 0.25, 0.25, 0.25])
LOADED = torch.tensor([0.5, 0.3, 0.2, 0.0])


def throws(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Throws as one-hot vectors (batch, length, 4), and which die they came from (batch, length, 1)."""
    die = torch.zeros(batch, dtype=torch.long)
    ones = torch.zeros(batch, dtype=torch.long)
    faces, dice = [], []
    for _ in range(length):
        face = torch.multinomial(torch.stack([FAIR, LOADED])[die], 1).squeeze(1)
        faces.append(face)
        dice.append(die)
        ones = torch.where(face == 0, ones + 1, 0)
        die = torch.where(ones == 2, 1 - die, die)
        ones = torch.where(ones == 2, 0, ones)
    return nn.functional.one_hot(torch.stack(faces, 1), 4).float(), torch.stack(dice, 1)[..., None].float()


class Casino(nn.Module):
    """Two LSTM layers, tanh and dropout between them, a dense layer per step."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.first, self.second = nn.LSTM(4, hidden, batch_first=True), nn.LSTM(hidden, hidden, batch_first=True)
        self.between = nn.Sequential(nn.Linear(hidden, hidden), nn.Tanh(), nn.LayerNorm(hidden), nn.Dropout(0.1))
        self.out = nn.Sequential(nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores (batch, length, 1)."""
        x = self.between(self.first(x)[0])
        return self.out(self.second(x)[0])


def main() -> None:
    """Train for some steps and print the losses."""
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int, default=8)
    options.add_argument("--batch", type=int, default=200)
    options.add_argument("--length", type=int, default=200)
    given = options.parse_args()
    torch.manual_seed(0)
    model = Casino(128)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(given.steps):
        x, y = throws(given.batch, given.length)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.9f}", flush=True)


if __name__ == "__main__":
    main()
