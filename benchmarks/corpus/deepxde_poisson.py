"""DeepXDE on torch: a Poisson equation, compiled and trained by the library."""

import os

os.environ["DDE_BACKEND"] = "pytorch"
import deepxde as dde
from digest import digest

import torch

torch.set_default_device("cpu")
dde.config.set_random_seed(0)


def pde(x, y):
    return -dde.grad.hessian(y, x, i=0, j=0) - dde.grad.hessian(y, x, i=1, j=1) - 1


geometry = dde.geometry.Rectangle([-1, -1], [1, 1])
data = dde.data.PDE(geometry, pde, dde.icbc.DirichletBC(geometry, lambda x: 0, lambda _, on: on), num_domain=4000, num_boundary=400)
net = dde.nn.FNN([2] + [96] * 4 + [1], "tanh", "Glorot uniform")
model = dde.Model(data, net)
model.compile("adam", lr=1e-3, verbose=0)


class Told(dde.callbacks.Callback):
    def on_batch_end(self):
        print(self.model.train_state.step, float(next(net.parameters()).sum()), flush=True)


model.train(iterations=12, display_every=6, verbose=0, callbacks=[Told()])
print(digest(net))
