"""Convolutions over sequences of random lengths: oneDNN keeps a primitive per length (up to a bound), and malloc what it
cannot give back.

lowtide leak examples/leaks/random_lengths.py
ONEDNN_PRIMITIVE_CACHE_CAPACITY=16 lowtide leak examples/leaks/random_lengths.py
"""

from __future__ import annotations

import torch

STEPS = 400


def main() -> None:
    """Train on another length each step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv1d(16, 32, 5, padding=2), torch.nn.ReLU(), torch.nn.Conv1d(32, 16, 5, padding=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        length = int(torch.randint(50, 2000, ()))
        x = torch.randn(8, 16, length)
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
