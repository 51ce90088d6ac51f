"""BoTorch: a surrogate that is fitted with Adam, and an acquisition function that is maximised by it, in one loop."""

from botorch.acquisition import qExpectedImprovement
from botorch.models import SingleTaskGP
from botorch.sampling import SobolQMCNormalSampler
from digest import digest
from gpytorch.mlls import ExactMarginalLogLikelihood

import torch

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.rand(600, 6)
y = (x.sum(dim=1, keepdim=True) * 3).sin() + 0.1 * torch.randn(600, 1)
model = SingleTaskGP(x, y)
mll = ExactMarginalLogLikelihood(model.likelihood, model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
model.train()
for step in range(8):
    optimizer.zero_grad()
    loss = -mll(model(x), model.train_targets)
    loss.backward()
    optimizer.step()
    print("fit", step, loss.item(), flush=True)
model.eval()
improvement = qExpectedImprovement(model, best_f=y.max(), sampler=SobolQMCNormalSampler(torch.Size([128]), seed=0))
candidates = torch.rand(32, 4, 6, requires_grad=True)
search = torch.optim.Adam([candidates], lr=0.02)
for step in range(8):
    search.zero_grad()
    loss = -improvement(candidates).sum()
    loss.backward()
    search.step()
    with torch.no_grad():
        candidates.clamp_(0, 1)
    print("search", step, loss.item(), flush=True)
print(digest(model), candidates.sum().item())
