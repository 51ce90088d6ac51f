"""Deep Q-learning from pixels: a replay buffer, a target network, and many small updates."""

import copy
import random

from digest import digest

import torch
from torch import nn

torch.manual_seed(0)
random.seed(0)
q = nn.Sequential(nn.Conv2d(4, 16, 8, 4), nn.ReLU(), nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 9 * 9, 256),
                  nn.ReLU(), nn.Linear(256, 6))
target = copy.deepcopy(q)
optimizer = torch.optim.Adam(q.parameters(), lr=1e-4)
buffer = []
state = torch.randint(0, 256, (4, 84, 84), dtype=torch.uint8)
for frame in range(128):
    with torch.no_grad():
        action = random.randrange(6) if random.random() < 0.5 else int(q(state[None].float() / 255).argmax())
    following = torch.randint(0, 256, (4, 84, 84), dtype=torch.uint8)
    buffer.append((state, action, random.random(), following))
    state = following
    if frame < 64 or frame % 4:
        continue
    states, actions, rewards, nexts = zip(*random.sample(buffer, 64), strict=True)
    with torch.no_grad():
        best = target(torch.stack(nexts).float() / 255).max(dim=1).values
    value = q(torch.stack(states).float() / 255).gather(1, torch.tensor(actions)[:, None])[:, 0]
    loss = nn.functional.smooth_l1_loss(value, torch.tensor(rewards) + 0.99 * best)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for slow, fast in zip(target.parameters(), q.parameters(), strict=True):
        slow.data.copy_(0.995 * slow.data + 0.005 * fast.data)
    print(frame, loss.item(), flush=True)
print(digest(q, target))
