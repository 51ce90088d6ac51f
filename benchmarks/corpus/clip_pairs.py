"""transformers: a CLIP of random weights: two towers and a contrastive loss over the batch."""

from digest import digest
from transformers import CLIPConfig, CLIPModel

import torch

torch.manual_seed(0)
tower = {"hidden_size": 160, "intermediate_size": 480, "num_hidden_layers": 4, "num_attention_heads": 5}
model = CLIPModel(CLIPConfig(text_config={**tower, "vocab_size": 2000, "max_position_embeddings": 48, "eos_token_id": 1},
                             vision_config={**tower, "image_size": 64, "patch_size": 8}, projection_dim=128))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.2)
model.train()
for step in range(8):
    ids = torch.randint(2, 2000, (24, 48))
    ids[:, -1] = 1
    loss = model(input_ids=ids, pixel_values=torch.randn(24, 3, 64, 64), return_loss=True).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        model.logit_scale.clamp_(0, 4.6052)
    print(step, loss.item(), flush=True)
print(digest(model))
