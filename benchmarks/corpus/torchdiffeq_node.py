"""torchdiffeq: a neural ODE with the adaptive solver dopri5, whose number of evaluations changes from step to step."""

from digest import digest
from torchdiffeq import odeint

import torch

torch.manual_seed(0)
truth = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]])
times = torch.linspace(0.0, 5.0, 200)


class Lambda(torch.nn.Module):
    def forward(self, t, y):
        return torch.mm(y**3, truth)


class ODEFunc(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(2, 256), torch.nn.Tanh(), torch.nn.Linear(256, 256), torch.nn.Tanh(),
                                       torch.nn.Linear(256, 2))
        for m in self.net.modules():
            if isinstance(m, torch.nn.Linear):
                torch.nn.init.normal_(m.weight, mean=0, std=0.05)
                torch.nn.init.constant_(m.bias, val=0)

    def forward(self, t, y):
        return self.net(y**3)


with torch.no_grad():
    true_y = odeint(Lambda(), torch.tensor([[2.0, 0.0]]), times, method="dopri5")


def batch(size=400, length=10):
    starts = torch.randint(0, len(times) - length, (size,))
    return true_y[starts, 0], times[:length], torch.stack([true_y[starts + i, 0] for i in range(length)], dim=0)


func = ODEFunc()
optimizer = torch.optim.RMSprop(func.parameters(), lr=1e-3)
for step in range(15):
    optimizer.zero_grad()
    y0, t, y = batch()
    loss = torch.mean(torch.abs(odeint(func, y0, t) - y))
    loss.backward()
    optimizer.step()
    print(step, loss.item(), flush=True)
print(digest(func))
