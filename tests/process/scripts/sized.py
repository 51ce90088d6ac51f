"""A script whose sizes are set by options, a variable or constants: attention over a sequence, then a wide loss."""

import argparse
import os

import torch
from torch import nn
from torch.nn import functional as F

WIDTH = 32

options = argparse.ArgumentParser()
options.add_argument("--batch-size", type=int, default=int(os.environ.get("BATCH", "4")))
options.add_argument("--length", type=int, default=16)
options.add_argument("--clip", action="store_true")
options.add_argument("--steps", type=int, default=60)
given = options.parse_args()

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(WIDTH, 8 * WIDTH), nn.GELU(), nn.Linear(8 * WIDTH, WIDTH))))
        self.out = nn.Linear(WIDTH, 600)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        scores = torch.softmax(self.mix(x) @ x.transpose(1, 2), -1)
        return self.out(self.feed(scores @ x))


model = Net()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(given.steps):
    ids = torch.randint(50, (given.batch_size, given.length))
    optimizer.zero_grad()
    loss = F.cross_entropy(model(ids).flatten(0, 1), torch.randint(600, (given.batch_size * given.length,)))
    loss.backward()
    if given.clip:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
print("finished", given.batch_size, given.length)
