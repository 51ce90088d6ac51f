"""transformers: a Mixtral of random weights: which expert takes how many words changes from step to step."""

from digest import digest
from transformers import MixtralConfig, MixtralForCausalLM

import torch

torch.manual_seed(0)
model = MixtralForCausalLM(MixtralConfig(
    vocab_size=2000, hidden_size=160, intermediate_size=320, num_hidden_layers=4, num_attention_heads=5, num_key_value_heads=5,
    num_local_experts=6, num_experts_per_tok=2, max_position_embeddings=256, output_router_logits=True,
))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
model.train()
for step in range(10):
    ids = torch.randint(0, 2000, (6, 160))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item(), flush=True)
print(digest(model))
