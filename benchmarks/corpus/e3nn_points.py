"""e3nn: an equivariant network on point clouds, with tensor products over spherical harmonics."""

import os

os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"  # e3nn 0.4 loads its constants so
import torch
from digest import digest
from e3nn import nn as enn
from e3nn import o3

torch.manual_seed(0)
sh = o3.Irreps("1x0e + 1x1o + 1x2e")


class Layer(torch.nn.Module):
    def __init__(self, before, after):
        super().__init__()
        self.tp = o3.FullyConnectedTensorProduct(before, sh, after, shared_weights=False)
        self.radial = enn.FullyConnectedNet([8, 32, self.tp.weight_numel], torch.nn.functional.silu)

    def forward(self, x, src, dst, harmonics, lengths):
        weights = self.radial(torch.stack([torch.exp(-((lengths - c / 4) ** 2)) for c in range(8)], dim=1))
        messages = self.tp(x[src], harmonics, weights)
        return torch.zeros(x.shape[0], messages.shape[1]).index_add(0, dst, messages) / 4


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        irreps = ["8x0e", "8x0e + 4x1o", "8x0e + 4x1o", "1x0e"]
        self.layers = torch.nn.ModuleList(Layer(a, b) for a, b in zip(irreps, irreps[1:], strict=False))

    def forward(self, x, positions, src, dst):
        edges = positions[src] - positions[dst]
        harmonics = o3.spherical_harmonics(sh, edges, normalize=True, normalization="component")
        for layer in self.layers:
            x = layer(x, src, dst, harmonics, edges.norm(dim=1))
        return x.sum()


model = Network()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(10):
    atoms = int(torch.randint(60, 120, ()))
    positions = torch.randn(atoms, 3)
    src, dst = (torch.cdist(positions, positions) < 1.2).nonzero().T
    loss = (model(torch.ones(atoms, 8), positions, src, dst) - 1).square()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item(), flush=True)
print(digest(model))
