"""Lightning: an autoencoder in a LightningModule, with the Trainer's own loop and gradient clipping."""

import warnings

import lightning as L
from digest import digest
from torch.utils.data import DataLoader, TensorDataset

import torch
from torch import nn

warnings.filterwarnings("ignore")
L.seed_everything(0, verbose=False)


class LitAutoEncoder(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(28 * 28, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 64))
        self.decoder = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 28 * 28))

    def training_step(self, batch, batch_idx):
        x = batch[0].view(batch[0].size(0), -1)
        loss = nn.functional.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss)
        print(batch_idx, loss.item(), flush=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x = batch[0].view(batch[0].size(0), -1)
        self.log("val_loss", nn.functional.mse_loss(self.decoder(self.encoder(x)), x))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


data = TensorDataset(torch.rand(24000, 1, 28, 28))
model = LitAutoEncoder()
trainer = L.Trainer(max_epochs=2, limit_train_batches=7, limit_val_batches=2, gradient_clip_val=1.0, logger=False, accelerator="cpu",
                    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(model, DataLoader(data, batch_size=4096, shuffle=True), DataLoader(data, batch_size=2048))
print(digest(model))
