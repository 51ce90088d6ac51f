"""PyTorch Geometric: a GCN over one whole graph, as in its introduction."""

import torch.nn.functional as F
from digest import digest
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv

import torch

torch.manual_seed(0)
NODES, EDGES, FEATURES, CLASSES = 8000, 40000, 64, 10
data = Data(x=torch.randn(NODES, FEATURES), edge_index=torch.randint(0, NODES, (2, EDGES)), y=torch.randint(0, CLASSES, (NODES,)))
data.train_mask = torch.rand(NODES) < 0.6


class GCN(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = torch.nn.ModuleList([GCNConv(FEATURES, 128), *(GCNConv(128, 128) for _ in range(4)), GCNConv(128, CLASSES)])

    def forward(self, data):
        x = data.x
        for conv in self.convs[:-1]:
            x = conv(x, data.edge_index)
            x = F.relu(x)
            x = F.dropout(x, p=0.5, training=self.training)
        return F.log_softmax(self.convs[-1](x, data.edge_index), dim=1)


model = GCN()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
for epoch in range(12):
    model.train()
    optimizer.zero_grad()
    out = model(data)
    loss = F.nll_loss(out[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    print(epoch, loss.item(), flush=True)
print(digest(model))
