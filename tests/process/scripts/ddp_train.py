"""Train a small convolutional network with DistributedDataParallel on gloo; start with torchrun."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

STEPS = 8
BATCH = 16


def block(inner: int, outer: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.GELU(), nn.Dropout(0.1))


def build() -> nn.Sequential:
    return nn.Sequential(
        block(3, 16), block(16, 16), nn.AvgPool2d(2), block(16, 32), block(32, 32), nn.AvgPool2d(2), block(32, 32),
        nn.Flatten(), nn.Linear(32 * 8 * 8, 10),
    )  # fmt: skip


def main(path: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    model = DistributedDataParallel(build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(100 + rank)
    losses = []
    for _ in range(STEPS):
        images, labels = torch.randn(BATCH, 3, 32, 32), torch.randint(0, 10, (BATCH,))
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    torch.save({"losses": losses, "weights": model.module.state_dict()}, f"{path}.rank{rank}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
