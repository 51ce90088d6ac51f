"""A DCGAN as PyTorch's examples write it: two backwards of the discriminator and one of the generator a step."""

from digest import digest

import torch
from torch import nn

torch.manual_seed(0)
NZ, F = 64, 24
netG = nn.Sequential(
    nn.ConvTranspose2d(NZ, F * 4, 4, 1, 0, bias=False), nn.BatchNorm2d(F * 4), nn.ReLU(True),
    nn.ConvTranspose2d(F * 4, F * 2, 4, 2, 1, bias=False), nn.BatchNorm2d(F * 2), nn.ReLU(True),
    nn.ConvTranspose2d(F * 2, F, 4, 2, 1, bias=False), nn.BatchNorm2d(F), nn.ReLU(True),
    nn.ConvTranspose2d(F, 3, 4, 2, 1, bias=False), nn.Tanh(),
)
netD = nn.Sequential(
    nn.Conv2d(3, F, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(F, F * 2, 4, 2, 1, bias=False), nn.BatchNorm2d(F * 2), nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(F * 2, F * 4, 4, 2, 1, bias=False), nn.BatchNorm2d(F * 4), nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(F * 4, 1, 4, 1, 0, bias=False), nn.Sigmoid(),
)
criterion = nn.BCELoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
for i in range(10):
    netD.zero_grad()
    label = torch.full((64,), 1.0)
    errD_real = criterion(netD(torch.rand(64, 3, 32, 32) * 2 - 1).view(-1), label)
    errD_real.backward()
    fake = netG(torch.randn(64, NZ, 1, 1))
    label.fill_(0.0)
    errD_fake = criterion(netD(fake.detach()).view(-1), label)
    errD_fake.backward()
    optimizerD.step()
    netG.zero_grad()
    label.fill_(1.0)
    errG = criterion(netD(fake).view(-1), label)
    errG.backward()
    optimizerG.step()
    print(i, (errD_real + errD_fake).item(), errG.item(), flush=True)
print(digest(netG, netD))
