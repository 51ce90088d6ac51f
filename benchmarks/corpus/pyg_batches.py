"""PyTorch Geometric: GIN on mini-batches of small graphs, whose sizes change with every batch."""

import torch.nn.functional as F
from digest import digest
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import MLP, GINConv, global_add_pool

import torch

torch.manual_seed(0)
graphs = []
for _ in range(400):
    nodes = int(torch.randint(20, 80, ()))
    edges = torch.randint(0, nodes, (2, 4 * nodes))
    graphs.append(Data(x=torch.randn(nodes, 32), edge_index=edges, y=torch.randint(0, 2, (1,))))
loader = DataLoader(graphs, batch_size=100, shuffle=True, generator=torch.Generator().manual_seed(0))


class GIN(torch.nn.Module):
    def __init__(self, hidden=96, layers=5):
        super().__init__()
        sizes = [32, *[hidden] * layers]
        self.convs = torch.nn.ModuleList(GINConv(MLP([a, hidden, hidden])) for a in sizes[:-1])
        self.head = MLP([hidden, hidden, 2], norm=None, dropout=0.5)

    def forward(self, x, edge_index, batch, size):
        for conv in self.convs:
            x = conv(x, edge_index).relu()
        return self.head(global_add_pool(x, batch, size=size))


model = GIN()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(4):
    for data in loader:
        optimizer.zero_grad()
        out = model(data.x, data.edge_index, data.batch, data.batch_size)
        loss = F.cross_entropy(out, data.y)
        loss.backward()
        optimizer.step()
        print(epoch, loss.item(), flush=True)
print(digest(model))
