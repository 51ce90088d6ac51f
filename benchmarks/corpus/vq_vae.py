"""vector-quantize-pytorch: a VQ-VAE whose codebook is updated by moving averages within the forward."""

from digest import digest
from vector_quantize_pytorch import VectorQuantize

import torch
from torch import nn

torch.manual_seed(0)
encoder = nn.Sequential(nn.Conv2d(3, 48, 4, 2, 1), nn.GELU(), nn.Conv2d(48, 48, 4, 2, 1), nn.GELU(), nn.Conv2d(48, 32, 1))
quantizer = VectorQuantize(dim=32, codebook_size=256, accept_image_fmap=True, decay=0.9)
decoder = nn.Sequential(nn.ConvTranspose2d(32, 48, 4, 2, 1), nn.GELU(), nn.ConvTranspose2d(48, 48, 4, 2, 1), nn.GELU(),
                        nn.Conv2d(48, 3, 3, padding=1))
model = nn.ModuleList([encoder, quantizer, decoder])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(10):
    x = torch.rand(16, 3, 64, 64)
    quantized, _, commit = quantizer(encoder(x))
    loss = (decoder(quantized) - x).abs().mean() + 10 * commit.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item(), flush=True)
print(digest(model))
