"""torchsde: a stochastic differential equation whose drift and diffusion are networks."""

import torchsde
from digest import digest

import torch
from torch import nn

torch.manual_seed(0)


class SDE(nn.Module):
    noise_type, sde_type = "diagonal", "ito"

    def __init__(self):
        super().__init__()
        self.drift = nn.Sequential(nn.Linear(8, 128), nn.Tanh(), nn.Linear(128, 8))
        self.spread = nn.Sequential(nn.Linear(8, 128), nn.Tanh(), nn.Linear(128, 8), nn.Sigmoid())

    def f(self, t, y):
        return self.drift(y)

    def g(self, t, y):
        return self.spread(y)


sde = SDE()
optimizer = torch.optim.Adam(sde.parameters(), lr=1e-3)
times = torch.linspace(0, 1, 40)
for step in range(10):
    brownian = torchsde.BrownianInterval(t0=0.0, t1=1.0, size=(1024, 8), entropy=step)
    ys = torchsde.sdeint(sde, torch.randn(1024, 8), times, method="euler", dt=0.025, bm=brownian)
    loss = (ys.mean(dim=1) - times[:, None]).square().mean() + (ys.std(dim=1) - 0.5).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item(), flush=True)
print(digest(sde))
