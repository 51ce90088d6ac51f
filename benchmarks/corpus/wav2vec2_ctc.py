"""transformers: wav2vec2 with CTC, SpecAugment and LayerDrop as its defaults have them; padded audio of many lengths."""

import numpy as np
from digest import digest
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

import torch

torch.manual_seed(0)
np.random.seed(0)
model = Wav2Vec2ForCTC(Wav2Vec2Config(
    hidden_size=192, num_hidden_layers=4, num_attention_heads=6, intermediate_size=512, conv_dim=(128,) * 7, vocab_size=40,
    num_conv_pos_embeddings=32, num_conv_pos_embedding_groups=8, ctc_loss_reduction="mean", pad_token_id=0,
))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
model.train()
for step in range(10):
    lengths = torch.randint(12000, 32000, (4,))
    audio = torch.randn(4, int(lengths.max()))
    mask = (torch.arange(audio.shape[1])[None] < lengths[:, None]).long()
    labels = torch.randint(1, 40, (4, 12))
    loss = model(audio, attention_mask=mask, labels=labels).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item(), flush=True)
print(digest(model))
