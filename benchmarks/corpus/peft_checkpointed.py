"""PEFT: LoRA on a Llama of random weights, with the library's own gradient checkpointing on."""

from digest import digest
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import torch

torch.manual_seed(0)
config = LlamaConfig(vocab_size=4000, hidden_size=256, intermediate_size=688, num_hidden_layers=6, num_attention_heads=8,
                     max_position_embeddings=256)
model = LlamaForCausalLM(config)
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
model.enable_input_require_grads()
model.config.use_cache = False
model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
model.train()
for step in range(10):
    ids = torch.randint(0, 4000, (8, 192))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item(), flush=True)
print(digest(model))
