"""pytorch-tabnet: fit of a classifier on a table, with ghost batch norm and sparse attention."""

import numpy as np
from digest import digest
from pytorch_tabnet.callbacks import Callback
from pytorch_tabnet.tab_model import TabNetClassifier

import torch

torch.manual_seed(0)
rng = np.random.default_rng(0)


class Told(Callback):
    def on_batch_end(self, batch, logs=None):
        print(batch, float(logs["loss"]), flush=True)


model = TabNetClassifier(n_d=32, n_a=32, n_steps=4, seed=0, verbose=0, device_name="cpu")
model.fit(rng.standard_normal((16384, 40)).astype(np.float32), rng.integers(0, 3, 16384), max_epochs=2, batch_size=2048,
          virtual_batch_size=256, callbacks=[Told()], compute_importance=False)
print(digest(model.network))
