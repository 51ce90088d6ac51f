"""transformers: a Mamba whose scan is a Python loop over words: thousands of tiny operators."""

import logging

from digest import digest
from transformers import MambaConfig, MambaForCausalLM

import torch

logging.disable(logging.WARNING)
torch.manual_seed(0)
model = MambaForCausalLM(MambaConfig(vocab_size=2000, hidden_size=128, num_hidden_layers=3, state_size=8, use_mambapy=False))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model.train()
for step in range(8):
    ids = torch.randint(0, 2000, (4, 64))
    loss = model(input_ids=ids, labels=ids).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item(), flush=True)
print(digest(model))
