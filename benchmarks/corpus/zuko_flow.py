"""zuko: a neural spline flow, trained by maximum likelihood."""

import zuko
from digest import digest

import torch

torch.manual_seed(0)
flow = zuko.flows.NSF(features=8, context=4, transforms=4, hidden_features=(128, 128))
optimizer = torch.optim.Adam(flow.parameters(), lr=1e-3)
for step in range(12):
    x, c = torch.randn(1024, 8).cumsum(dim=1), torch.randn(1024, 4)
    loss = -flow(c).log_prob(x).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item(), flush=True)
print(digest(flow))
