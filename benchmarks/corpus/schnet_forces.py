"""SchNet (as PyTorch Geometric has it) with forces: the loss is of the energy's derivative by the positions."""

import torch
from digest import digest
from torch_geometric.nn.models import SchNet

torch.manual_seed(0)


def near(positions, batch):
    """Pairs within reach, by distances alone (the library's own needs torch-cluster)."""
    distances = torch.cdist(positions.detach(), positions.detach())
    pairs = (distances < 4.0) & (batch[:, None] == batch[None]) & ~torch.eye(len(batch), dtype=torch.bool)
    row, column = pairs.nonzero().T
    return torch.stack([row, column]), (positions[row] - positions[column]).norm(dim=-1)


model = SchNet(hidden_channels=96, num_filters=96, num_interactions=4, num_gaussians=40, cutoff=4.0, interaction_graph=near)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
for step in range(10):
    counts = torch.randint(10, 30, (12,))
    batch = torch.repeat_interleave(torch.arange(12), counts)
    z = torch.randint(1, 9, (len(batch),))
    positions = (torch.rand(len(batch), 3) * 4).requires_grad_()
    energy = model(z, positions, batch)
    forces = -torch.autograd.grad(energy.sum(), positions, create_graph=True)[0]
    loss = energy.square().mean() + 10 * forces.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item(), flush=True)
print(digest(model))
