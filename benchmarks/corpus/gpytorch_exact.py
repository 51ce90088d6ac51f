"""GPyTorch: exact Gaussian-process regression, as in its first tutorial."""

import gpytorch
from digest import digest

import torch

torch.manual_seed(0)
train_x = torch.linspace(0, 1, 1200)
train_y = torch.sin(train_x * (2 * torch.pi)) + torch.randn(train_x.size()) * 0.2


class ExactGPModel(gpytorch.models.ExactGP):
    def __init__(self, train_x, train_y, likelihood):
        super().__init__(train_x, train_y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=2.5))

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


likelihood = gpytorch.likelihoods.GaussianLikelihood()
model = ExactGPModel(train_x, train_y, likelihood)
model.train()
likelihood.train()
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
for step in range(15):
    optimizer.zero_grad()
    loss = -mll(model(train_x), train_y)
    loss.backward()
    print(step, loss.item(), model.likelihood.noise.item(), flush=True)
    optimizer.step()
print(digest(model))
