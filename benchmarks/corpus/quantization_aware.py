"""Quantization-aware training: fake quantization of weights and activations in eager mode."""

import warnings

from digest import digest
from torch.ao.quantization import DeQuantStub, QuantStub, get_default_qat_qconfig, prepare_qat

import torch
from torch import nn

warnings.filterwarnings("ignore")
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.features = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(),
            nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(),
        )
        self.head = nn.Linear(64 * 16, 10)

    def forward(self, x):
        return self.dequant(self.head(self.features(self.quant(x))))


model = Net().train()
model.qconfig = get_default_qat_qconfig("fbgemm")
model = prepare_qat(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for step in range(10):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(torch.randn(32, 3, 32, 32)), torch.randint(0, 10, (32,)))
    loss.backward()
    optimizer.step()
    print(step, loss.item(), flush=True)
print(digest(model))
