"""transformers: sequence-to-sequence training of a T5, sources and targets padded to the longest of each batch."""

from digest import digest
from transformers import Adafactor, T5Config, T5ForConditionalGeneration

import torch

torch.manual_seed(0)
model = T5ForConditionalGeneration(T5Config(vocab_size=4000, d_model=192, d_kv=32, d_ff=512, num_layers=3, num_heads=6,
                                            decoder_start_token_id=0))
optimizer = Adafactor(model.parameters(), scale_parameter=True, relative_step=True, warmup_init=True)
model.train()
for step in range(12):
    lengths = torch.randint(30, 120, (12,))
    source = torch.randint(1, 4000, (12, int(lengths.max())))
    mask = (torch.arange(source.shape[1])[None] < lengths[:, None]).long()
    target = torch.randint(1, 4000, (12, int(torch.randint(30, 90, ()))))
    loss = model(input_ids=source * mask, attention_mask=mask, labels=target).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item(), flush=True)
print(digest(model))
