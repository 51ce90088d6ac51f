"""nflows: a masked autoregressive flow with permutations."""

from digest import digest
from nflows.distributions.normal import StandardNormal
from nflows.flows.base import Flow
from nflows.transforms.autoregressive import MaskedAffineAutoregressiveTransform
from nflows.transforms.base import CompositeTransform
from nflows.transforms.permutations import ReversePermutation

import torch

torch.manual_seed(0)
transforms = []
for _ in range(6):
    transforms += [ReversePermutation(features=16), MaskedAffineAutoregressiveTransform(features=16, hidden_features=128)]
flow = Flow(CompositeTransform(transforms), StandardNormal(shape=[16]))
optimizer = torch.optim.Adam(flow.parameters(), lr=1e-3)
for step in range(12):
    x = torch.randn(2048, 16).cumsum(dim=1)
    optimizer.zero_grad()
    loss = -flow.log_prob(inputs=x).mean()
    loss.backward()
    optimizer.step()
    print(step, loss.item(), flush=True)
print(digest(flow))
