"""Opacus: differentially private training of a small CNN; gradients per sample by hooks."""

import warnings

from digest import digest
from opacus import PrivacyEngine
from torch.utils.data import DataLoader, TensorDataset

import torch
from torch import nn

warnings.filterwarnings("ignore")
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Conv2d(16, 32, 4, 2), nn.ReLU(),
                      nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(32 * 4 * 4, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(2560, 1, 28, 28), torch.randint(0, 10, (2560,)))
loader = DataLoader(data, batch_size=256)
model, optimizer, loader = PrivacyEngine().make_private(
    module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.1, max_grad_norm=1.0, poisson_sampling=False,
    noise_generator=torch.Generator().manual_seed(0),
)
for step, (x, y) in enumerate(loader):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    print(step, loss.item(), flush=True)
print(digest(model))
