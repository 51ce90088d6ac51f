"""Train a small network with Lightning."""

from __future__ import annotations

import sys

import lightning
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

STEPS = 8
BATCH = 256
WIDTH = 256


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH), nn.Dropout(0.1)) for _ in range(8)]
        self.net = nn.Sequential(*layers, nn.Linear(WIDTH, 10))
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def data() -> DataLoader:
    images, labels = torch.randn(STEPS * BATCH, WIDTH), torch.randint(0, 10, (STEPS * BATCH,))
    return DataLoader(TensorDataset(images, labels), batch_size=BATCH, shuffle=True)


def main(path: str) -> None:
    lightning.seed_everything(0)
    torch.use_deterministic_algorithms(True)
    model = Net()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, deterministic=True, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, data())
    torch.save({"losses": model.losses, "weights": model.state_dict()}, path)


if __name__ == "__main__":
    main(sys.argv[1])
