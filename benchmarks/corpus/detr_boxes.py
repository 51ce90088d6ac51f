"""transformers: a DETR-like detector (YOLOS): bipartite matching in the loss, another number of boxes in every picture."""

from digest import digest
from transformers import YolosConfig, YolosForObjectDetection

import torch

torch.manual_seed(0)
model = YolosForObjectDetection(YolosConfig(hidden_size=144, num_hidden_layers=4, num_attention_heads=4, intermediate_size=432,
                                            image_size=[96, 96], patch_size=8, num_detection_tokens=20, num_labels=5))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
model.train()
for step in range(10):
    labels = []
    for _ in range(6):
        count = int(torch.randint(1, 9, ()))
        boxes = torch.cat([torch.rand(count, 2) * 0.5 + 0.25, torch.rand(count, 2) * 0.3 + 0.1], dim=1)
        labels.append({"class_labels": torch.randint(0, 5, (count,)), "boxes": boxes})
    loss = model(pixel_values=torch.randn(6, 3, 96, 96), labels=labels).loss
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    print(step, loss.item(), flush=True)
print(digest(model))
