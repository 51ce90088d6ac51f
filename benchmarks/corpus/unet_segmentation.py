"""A plain U-Net for segmentation, with skip connections, mixed losses and evaluation after each epoch."""

from digest import digest

import torch
from torch import nn

torch.manual_seed(0)


def double(a, b):
    return nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True),
                         nn.Conv2d(b, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self, sizes=(16, 32, 64, 128)):
        super().__init__()
        self.down = nn.ModuleList(double(a, b) for a, b in zip((3, *sizes), sizes, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in zip(sizes, sizes[1:], strict=False))
        self.merge = nn.ModuleList(double(2 * a, a) for a in sizes[:-1])
        self.out = nn.Conv2d(sizes[0], 4, 1)

    def forward(self, x):
        kept = []
        for i, block in enumerate(self.down):
            x = block(x if i == 0 else nn.functional.max_pool2d(x, 2))
            kept.append(x)
        for up, merge, skip in zip(reversed(self.up), reversed(self.merge), reversed(kept[:-1]), strict=True):
            x = merge(torch.cat([skip, up(x)], dim=1))
        return self.out(x)


def dice(logits, y):
    p, q = logits.softmax(dim=1), nn.functional.one_hot(y, 4).permute(0, 3, 1, 2).float()
    return 1 - (2 * (p * q).sum((2, 3)) / (p + q).sum((2, 3))).mean()


model = UNet()
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4, momentum=0.9)
for epoch in range(2):
    model.train()
    for step in range(5):
        x, y = torch.rand(6, 3, 96, 96), torch.randint(0, 4, (6, 96, 96))
        logits = model(x)
        loss = nn.functional.cross_entropy(logits, y) + dice(logits, y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(epoch, loss.item(), flush=True)
    model.eval()
    with torch.no_grad():
        print("val", dice(model(torch.rand(6, 3, 96, 96)), torch.randint(0, 4, (6, 96, 96))).item(), flush=True)
print(digest(model))
