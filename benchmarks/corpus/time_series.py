"""transformers: PatchTST on windows of many series."""

from digest import digest
from transformers import PatchTSTConfig, PatchTSTForPrediction

import torch

torch.manual_seed(0)
model = PatchTSTForPrediction(PatchTSTConfig(num_input_channels=7, context_length=192, prediction_length=48, patch_length=12,
                                             patch_stride=12, d_model=128, num_hidden_layers=3, num_attention_heads=4, ffn_dim=256))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
model.train()
for step in range(10):
    series = torch.randn(32, 240, 7).cumsum(dim=1)
    loss = model(past_values=series[:, :192], future_values=series[:, 192:]).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item(), flush=True)
print(digest(model))
