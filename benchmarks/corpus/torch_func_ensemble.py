"""torch.func: an ensemble of models trained by vmap over functional_call and grad."""

import copy

from digest import digest
from torch.func import functional_call, grad_and_value, stack_module_state, vmap

import torch
from torch import nn

torch.manual_seed(0)
models = [nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)) for _ in range(8)]
params, buffers = stack_module_state(models)
base = copy.deepcopy(models[0]).to("meta")


def loss_of(params, buffers, x, y):
    return nn.functional.cross_entropy(functional_call(base, (params, buffers), (x,)), y)


optimizer = torch.optim.SGD(params.values(), lr=0.1, momentum=0.9)
for step in range(12):
    x, y = torch.randn(8, 1024, 64), torch.randint(0, 10, (8, 1024))
    gradients, loss = vmap(grad_and_value(loss_of))(params, buffers, x, y)
    for name, parameter in params.items():
        parameter.grad = gradients[name]
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.sum().item(), flush=True)
print(digest(nn.ParameterList(params.values())))
