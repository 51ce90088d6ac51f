"""torchao: AdamW with 8-bit states on a small language model."""

from digest import digest
from torchao.optim import AdamW8bit
from transformers import GPT2Config, GPT2LMHeadModel

import torch

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=4000, n_positions=128, n_embd=192, n_layer=4, n_head=6))
optimizer = AdamW8bit(model.parameters(), lr=3e-4)
model.train()
for step in range(8):
    ids = torch.randint(0, 4000, (8, 128))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item(), flush=True)
print(digest(model))
