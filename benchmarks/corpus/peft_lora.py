"""PEFT: LoRA on a GPT-2 of random weights."""

from digest import digest
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

import torch

torch.manual_seed(0)
config = GPT2Config(vocab_size=8000, n_positions=256, n_embd=256, n_layer=6, n_head=8)
model = get_peft_model(GPT2LMHeadModel(config), LoraConfig(r=8, lora_alpha=16, lora_dropout=0.05, target_modules=["c_attn"],
                                                           task_type="CAUSAL_LM"))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model.train()
for step in range(10):
    ids = torch.randint(0, 8000, (8, 192))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item(), flush=True)
print(digest(model))
