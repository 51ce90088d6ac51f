"""MONAI: a 3-D U-Net on MetaTensors, with DiceCELoss."""

from digest import digest
from monai.data import MetaTensor
from monai.losses import DiceCELoss
from monai.networks.nets import UNet

import torch

torch.manual_seed(0)
model = UNet(spatial_dims=3, in_channels=1, out_channels=3, channels=(16, 32, 64), strides=(2, 2), num_res_units=2)
loss_function = DiceCELoss(to_onehot_y=True, softmax=True)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
model.train()
for step in range(10):
    image = MetaTensor(torch.rand(2, 1, 32, 32, 32))
    label = MetaTensor(torch.randint(0, 3, (2, 1, 32, 32, 32)).float())
    optimizer.zero_grad()
    loss = loss_function(model(image), label)
    loss.backward()
    optimizer.step()
    print(step, loss.item(), flush=True)
print(digest(model))
