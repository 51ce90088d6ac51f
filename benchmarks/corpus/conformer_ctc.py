"""transformers: a wav2vec2 Conformer with CTC on padded features."""

import numpy as np
from digest import digest
from transformers import Wav2Vec2ConformerConfig, Wav2Vec2ConformerForCTC

import torch

torch.manual_seed(0)
np.random.seed(0)
model = Wav2Vec2ConformerForCTC(Wav2Vec2ConformerConfig(
    hidden_size=144, num_hidden_layers=3, num_attention_heads=4, intermediate_size=384, conv_dim=(96,) * 7, vocab_size=40,
    conv_depthwise_kernel_size=15, ctc_loss_reduction="mean", pad_token_id=0,
))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
model.train()
for step in range(10):
    audio = torch.randn(4, int(torch.randint(14000, 30000, ())))
    loss = model(audio, labels=torch.randint(1, 40, (4, 10))).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item(), flush=True)
print(digest(model))
