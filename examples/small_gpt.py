"""A small GPT on synthetic text: dropout, tied weights, AdamW. A plain PyTorch script: it knows nothing of Lowtide."""

from __future__ import annotations

import argparse

import torch
from torch import nn


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, time, width) to the same."""
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(self.norm1(x)).split(c, dim=2))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(y.transpose(1, 2).reshape(b, t, c)))
        return x + self.feed(self.norm2(x))


class GPT(nn.Module):
    """Token and position embeddings, blocks, a head that shares the token embedding."""

    def __init__(self, vocabulary: int, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, 4) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """(batch, time) to logits (batch, time, vocabulary)."""
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.tokens.weight.T


def main() -> None:
    """Train for some steps and print the losses."""
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int, default=8)
    options.add_argument("--batch", type=int, default=8)
    options.add_argument("--length", type=int, default=256)
    given = options.parse_args()
    torch.manual_seed(0)
    model = GPT(1000, 256, 6, given.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for step in range(given.steps):
        ids = torch.randint(0, 1000, (given.batch, given.length + 1))
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.9f}", flush=True)


if __name__ == "__main__":
    main()
