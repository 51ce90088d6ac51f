"""A recommender of embedding bags and two perceptrons, with sparse gradients for the tables, as DLRM has them."""

from digest import digest

import torch
from torch import nn

torch.manual_seed(0)
TABLES, ROWS, SIZE, BATCH = 8, 20000, 32, 4096


def mlp(*sizes):
    return nn.Sequential(*(m for a, b in zip(sizes, sizes[1:], strict=False) for m in (nn.Linear(a, b), nn.ReLU())))


class DLRM(nn.Module):
    def __init__(self):
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(ROWS, SIZE, mode="sum", sparse=True) for _ in range(TABLES))
        self.bottom, self.top, self.out = mlp(13, 256, 64, SIZE), mlp(SIZE + 36, 512, 256), nn.Linear(256, 1)

    def forward(self, dense, indices, offsets):
        x = self.bottom(dense)
        features = torch.stack([x, *(bag(i, o) for bag, i, o in zip(self.bags, indices, offsets, strict=True))], dim=1)
        rows, columns = torch.tril_indices(TABLES + 1, TABLES + 1, offset=-1)
        crossed = torch.bmm(features, features.transpose(1, 2))[:, rows, columns]
        return self.out(self.top(torch.cat([x, crossed], dim=1)))[:, 0]


model = DLRM()
tables = torch.optim.SparseAdam(list(model.bags.parameters()), lr=1e-3)
rest = torch.optim.Adam([p for n, p in model.named_parameters() if "bags" not in n], lr=1e-3)
for step in range(12):
    counts = torch.randint(1, 8, (TABLES, BATCH))
    offsets = [torch.cat([torch.zeros(1, dtype=torch.long), c.cumsum(0)[:-1]]) for c in counts]
    indices = [torch.randint(0, ROWS, (int(c.sum()),)) for c in counts]
    loss = nn.functional.binary_cross_entropy_with_logits(model(torch.rand(BATCH, 13), indices, offsets), torch.rand(BATCH).round())
    tables.zero_grad()
    rest.zero_grad()
    loss.backward()
    tables.step()
    rest.step()
    print(step, loss.item(), flush=True)
print(digest(model))
