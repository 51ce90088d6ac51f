"""Training scripts whose recorded steps the planner is measured on: `traces.py NAME [--steps N]`."""

from __future__ import annotations

import argparse

from budget import MODELS
from steps import Step
from torch.nn import functional

import torch
from torch import nn


class Unet(nn.Module):
    """Four levels down and up again, with skips: two convolutions with batch norm at each."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        widths = [width << level for level in range(4)]
        self.down = nn.ModuleList(self._pair(a, b) for a, b in zip([3, *widths[:-1]], widths, strict=True))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in zip(widths, widths[1:], strict=False))
        self.join = nn.ModuleList(self._pair(2 * a, a) for a in widths[:-1])
        self.out = nn.Conv2d(width, 2, 1)

    @staticmethod
    def _pair(a: int, b: int) -> nn.Module:
        def one(i: int, o: int) -> list[nn.Module]:
            return [nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(inplace=True)]

        return nn.Sequential(*one(a, b), *one(b, b))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images (batch, 3, side, side) to two maps of the same side."""
        skips = []
        for level, pair in enumerate(self.down):
            x = pair(x if level == 0 else functional.max_pool2d(x, 2))
            skips.append(x)
        for level in reversed(range(len(self.up))):
            x = self.join[level](torch.cat([skips[level], self.up[level](x)], 1))
        mapped: torch.Tensor = self.out(x)
        return mapped


def unet() -> Step:
    """A U-Net of four levels."""
    model = Unet()
    return Step(model, lambda: functional.cross_entropy(model(torch.randn(4, 3, 96, 96)), torch.randint(2, (4, 96, 96))))


class Unrolled(nn.Module):
    """A GRU cell called once per position, as people write it who change what happens between."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.cell, self.mix, self.out = nn.GRUCell(64, width), nn.Linear(width, width), nn.Linear(width, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sequences (length, batch, 64) to scores (length, batch, 32)."""
        state = x.new_zeros(x.shape[1], self.cell.hidden_size)
        found = []
        for position in x:
            state = self.cell(position, torch.tanh(self.mix(state)))
            found.append(self.out(functional.dropout(state, 0.1)))
        return torch.stack(found)


def unrolled() -> Step:
    """A recurrent network unrolled over 60 positions."""
    model = Unrolled()
    return Step(
        model, lambda: functional.cross_entropy(model(torch.randn(60, 64, 64)).flatten(0, 1), torch.randint(32, (60 * 64,)))
    )


TRACES = {**MODELS, "unet": unet, "unrolled": unrolled}


def main() -> None:
    """Train for some steps."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("name", choices=TRACES)
    options.add_argument("--steps", type=int, default=4)
    given = options.parse_args()
    torch.manual_seed(0)
    step = TRACES[given.name]()
    for _ in range(given.steps):
        step()


if __name__ == "__main__":
    main()
