"""kornia: augmentation on the fly and a small encoder-decoder with an SSIM loss."""

import kornia
from digest import digest

import torch
from torch import nn

torch.manual_seed(0)


def block(a, b):
    return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True))


model = nn.Sequential(block(3, 24), block(24, 24), nn.MaxPool2d(2), block(24, 48), nn.Upsample(scale_factor=2), block(48, 24),
                      nn.Conv2d(24, 3, 1))
augment = kornia.augmentation.AugmentationSequential(
    kornia.augmentation.RandomHorizontalFlip(p=0.5), kornia.augmentation.RandomAffine(15.0, p=0.8),
    kornia.augmentation.ColorJitter(0.1, 0.1, 0.1, 0.1, p=0.5),
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(10):
    clean = augment(torch.rand(8, 3, 64, 64))
    found = model(clean + 0.1 * torch.randn_like(clean))
    loss = nn.functional.l1_loss(found, clean) + kornia.losses.ssim_loss(found, clean, window_size=5)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item(), flush=True)
print(digest(model))
