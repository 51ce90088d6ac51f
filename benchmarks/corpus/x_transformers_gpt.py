"""x-transformers: a decoder with rotary positions, gated feed-forwards and gradient accumulation."""

from digest import digest
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

import torch

torch.manual_seed(0)
model = AutoregressiveWrapper(TransformerWrapper(num_tokens=256, max_seq_len=256, attn_layers=Decoder(
    dim=192, depth=4, heads=6, rotary_pos_emb=True, ff_glu=True, ff_swish=True, attn_dropout=0.1, ff_dropout=0.1)))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
model.train()
for step in range(8):
    for _ in range(2):
        loss = model(torch.randint(0, 256, (4, 257)))
        (loss / 2).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item(), flush=True)
print(digest(model))
