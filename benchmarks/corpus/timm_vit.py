"""timm: a small vision transformer with drop-path, mixup and label smoothing, AdamW and EMA of the weights."""

import without_torchvision  # noqa: F401 - there is none for this torch; timm asks for it at import
import numpy as np
import timm
import torch
from digest import digest
from timm.data.mixup import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3

torch.manual_seed(0)
np.random.seed(0)
model = timm.create_model("vit_tiny_patch16_224", img_size=96, num_classes=10, drop_path_rate=0.1)
ema = ModelEmaV3(model, decay=0.99)
mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=0.0, label_smoothing=0.1, num_classes=10)
optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
criterion = SoftTargetCrossEntropy()
model.train()
for step in range(10):
    x, y = mixup(torch.randn(16, 3, 96, 96), torch.randint(0, 10, (16,)))
    loss = criterion(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ema.update(model, step=step)
    print(step, loss.item(), flush=True)
print(digest(model, ema.module))
