"""Soft actor-critic as CleanRL writes it: two critics, an actor and a temperature, each with its own optimizer."""

import copy

import gymnasium as gym
from digest import digest

import torch
from torch import nn

torch.manual_seed(0)
env = gym.make("Pendulum-v1")


def mlp(a, b):
    return nn.Sequential(nn.Linear(a, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, b))


actor, critics = mlp(3, 2), nn.ModuleList([mlp(4, 1), mlp(4, 1)])
targets = copy.deepcopy(critics)
log_alpha = torch.zeros(1, requires_grad=True)
q_optimizer, pi_optimizer = torch.optim.Adam(critics.parameters(), lr=1e-3), torch.optim.Adam(actor.parameters(), lr=3e-4)
a_optimizer = torch.optim.Adam([log_alpha], lr=1e-3)


def sample(obs):
    mean, log_std = actor(obs).chunk(2, dim=-1)
    normal = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp())
    x = normal.rsample()
    action = torch.tanh(x)
    return 2 * action, (normal.log_prob(x) - torch.log(2 * (1 - action.square()) + 1e-6)).sum(-1, keepdim=True)


buffer, obs = [], torch.tensor(env.reset(seed=0)[0])
for frame in range(300):
    with torch.no_grad():
        action = sample(obs)[0]
    found, reward, term, trunc, _ = env.step(action.numpy())
    buffer.append((obs, action, torch.tensor([reward], dtype=torch.float32), torch.tensor(found)))
    obs = torch.tensor(env.reset()[0] if term or trunc else found)
    if frame < 256 or frame % 4:
        continue
    s, a, r, n = (torch.stack(x) for x in zip(*(buffer[i] for i in torch.randint(0, len(buffer), (1024,))), strict=True))
    with torch.no_grad():
        action, log_p = sample(n)
        best = torch.min(*(t(torch.cat([n, action], -1)) for t in targets)) - log_alpha.exp() * log_p
    q_loss = sum(nn.functional.mse_loss(c(torch.cat([s, a], -1)), r + 0.99 * best) for c in critics)
    q_optimizer.zero_grad()
    q_loss.backward()
    q_optimizer.step()
    action, log_p = sample(s)
    pi_loss = (log_alpha.exp().detach() * log_p - torch.min(*(c(torch.cat([s, action], -1)) for c in critics))).mean()
    pi_optimizer.zero_grad()
    pi_loss.backward()
    pi_optimizer.step()
    a_loss = (-log_alpha.exp() * (log_p + 1).detach()).mean()
    a_optimizer.zero_grad()
    a_loss.backward()
    a_optimizer.step()
    for slow, fast in zip(targets.parameters(), critics.parameters(), strict=True):
        slow.data.lerp_(fast.data, 0.005)
    print(frame, q_loss.item(), pi_loss.item(), flush=True)
print(digest(actor, critics))
