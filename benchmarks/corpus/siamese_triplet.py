"""A siamese convolutional network with triplets, hard ones chosen within the batch."""

from digest import digest

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 32, 5), nn.PReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.PReLU(), nn.MaxPool2d(2),
                      nn.Flatten(), nn.Linear(64 * 16, 256), nn.PReLU(), nn.Linear(256, 64))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(12):
    images, labels = torch.rand(256, 1, 28, 28), torch.randint(0, 10, (256,))
    found = nn.functional.normalize(model(images))
    distances = torch.cdist(found, found)
    same = labels[:, None] == labels[None]
    hardest = (distances * same).max(dim=1).values - (distances + 1e3 * same).min(dim=1).values
    loss = nn.functional.relu(hardest + 0.5).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item(), flush=True)
print(digest(model))
