"""skorch: a scikit-learn estimator around a module, with dropout and its own validation after each epoch."""

import numpy as np
from digest import digest
from skorch import NeuralNetClassifier
from skorch.callbacks import Callback

import torch
from torch import nn

torch.manual_seed(0)
np.random.seed(0)


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Dropout(0.5), nn.Linear(512, 512), nn.ReLU(),
                                    nn.Linear(512, 2), nn.Softmax(dim=-1))

    def forward(self, x):
        return self.layers(x)


class Told(Callback):
    def on_batch_end(self, net, training, loss=None, **kwargs):
        if training:
            print(loss.item(), flush=True)


net = NeuralNetClassifier(Module, max_epochs=3, lr=0.1, batch_size=4096, iterator_train__shuffle=True, verbose=0, callbacks=[Told()])
net.fit(np.random.randn(20000, 64).astype(np.float32), np.random.randint(0, 2, 20000))
print(digest(net.module_))
