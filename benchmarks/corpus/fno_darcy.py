"""neuraloperator: a Fourier neural operator, whose layers work on complex spectra."""

from digest import digest
from neuralop import LpLoss
from neuralop.models import FNO

import torch

torch.manual_seed(0)
model = FNO(n_modes=(12, 12), in_channels=1, out_channels=1, hidden_channels=32, n_layers=4)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
criterion = LpLoss(d=2, p=2)
model.train()
for step in range(10):
    x = torch.rand(8, 1, 48, 48)
    optimizer.zero_grad()
    loss = criterion(model(x), x.roll(1, -1).cumsum(-2) / 48)
    loss.backward()
    optimizer.step()
    scheduler.step()
    print(step, loss.item(), flush=True)
print(digest(model))
