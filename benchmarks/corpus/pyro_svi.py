"""Pyro: stochastic variational inference of a VAE."""

import pyro
import pyro.distributions as dist
from digest import digest
from pyro.infer import SVI, Trace_ELBO

import torch
from torch import nn

pyro.set_rng_seed(0)


class VAE(nn.Module):
    def __init__(self, size=784, hidden=400, z=50):
        super().__init__()
        self.z = z
        self.encoder = nn.Sequential(nn.Linear(size, hidden), nn.Softplus(), nn.Linear(hidden, 2 * z))
        self.decoder = nn.Sequential(nn.Linear(z, hidden), nn.Softplus(), nn.Linear(hidden, size), nn.Sigmoid())

    def model(self, x):
        pyro.module("decoder", self.decoder)
        with pyro.plate("data", x.shape[0]):
            z = pyro.sample("latent", dist.Normal(x.new_zeros(x.shape[0], self.z), x.new_ones(x.shape[0], self.z)).to_event(1))
            pyro.sample("obs", dist.Bernoulli(self.decoder(z), validate_args=False).to_event(1), obs=x)

    def guide(self, x):
        pyro.module("encoder", self.encoder)
        with pyro.plate("data", x.shape[0]):
            mean, scale = self.encoder(x).chunk(2, dim=-1)
            pyro.sample("latent", dist.Normal(mean, scale.exp()).to_event(1))


vae = VAE()
svi = SVI(vae.model, vae.guide, pyro.optim.Adam({"lr": 1e-3}), loss=Trace_ELBO())
for step in range(12):
    print(step, svi.step(torch.rand(2048, 784).round()), flush=True)
print(digest(vae))
