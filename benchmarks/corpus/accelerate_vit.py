"""accelerate: a ViT of transformers with gradient accumulation and clipping through the Accelerator."""

from accelerate import Accelerator
from digest import digest
from torch.utils.data import DataLoader, TensorDataset
from transformers import ViTConfig, ViTForImageClassification, get_linear_schedule_with_warmup

import torch

torch.manual_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = ViTForImageClassification(ViTConfig(hidden_size=192, num_hidden_layers=6, num_attention_heads=6, intermediate_size=768,
                                            image_size=64, patch_size=8, num_labels=10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
scheduler = get_linear_schedule_with_warmup(optimizer, 2, 20)
loader = DataLoader(TensorDataset(torch.randn(320, 3, 64, 64), torch.randint(0, 10, (320,))), batch_size=16, shuffle=True)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
model.train()
for step, (x, y) in enumerate(loader):
    with accelerator.accumulate(model):
        loss = model(pixel_values=x, labels=y).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if accelerator.sync_gradients:
            print(step, loss.item(), flush=True)
print(digest(accelerator.unwrap_model(model)))
