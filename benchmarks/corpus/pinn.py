"""A physics-informed network for Burgers' equation: derivatives of the output by the inputs are part of the loss."""

from digest import digest

import torch

torch.manual_seed(0)
model = torch.nn.Sequential(*(m for a, b in [(2, 128), *[(128, 128)] * 5] for m in (torch.nn.Linear(a, b), torch.nn.Tanh())),
                            torch.nn.Linear(128, 1))


def gradient(y, x):
    return torch.autograd.grad(y, x, grad_outputs=torch.ones_like(y), create_graph=True)[0]


def residual(x, t):
    u = model(torch.stack([x, t], dim=1))
    u_t, u_x = gradient(u, t), gradient(u, x)
    return u_t + u[:, 0] * u_x - 0.01 / torch.pi * gradient(u_x, x)


optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)
for step in range(12):
    x = (torch.rand(4000) * 2 - 1).requires_grad_()
    t = torch.rand(4000).requires_grad_()
    start = torch.rand(1000) * 2 - 1
    initial = model(torch.stack([start, torch.zeros_like(start)], dim=1))[:, 0] + torch.sin(torch.pi * start)
    loss = residual(x, t).square().mean() + initial.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    print(step, loss.item(), flush=True)
print(digest(model))
