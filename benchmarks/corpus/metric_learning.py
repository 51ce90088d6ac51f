"""pytorch-metric-learning: a large batch with NT-Xent, whose similarities are a matrix of the batch by itself."""

from digest import digest
from pytorch_metric_learning import losses

import torch
from torch import nn

torch.manual_seed(0)
BATCH = 96
model = nn.Sequential(nn.Linear(128, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 128))
criterion = losses.NTXentLoss(temperature=0.1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
for step in range(10):
    x = torch.randn(BATCH, 128)
    views = torch.cat([x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)])
    loss = criterion(model(views), torch.arange(BATCH).repeat(2))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item(), flush=True)
print(digest(model))
