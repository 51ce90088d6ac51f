"""transformers: a small Whisper under bfloat16 autocast, whose decoder meets new lengths in every step."""

from digest import digest
from transformers import WhisperConfig, WhisperForConditionalGeneration

import torch

torch.manual_seed(0)
model = WhisperForConditionalGeneration(WhisperConfig(
    vocab_size=4000, d_model=192, encoder_layers=3, decoder_layers=3, encoder_attention_heads=6, decoder_attention_heads=6,
    encoder_ffn_dim=512, decoder_ffn_dim=512, max_source_positions=300, max_target_positions=200, pad_token_id=0, bos_token_id=1,
    eos_token_id=2, decoder_start_token_id=1, suppress_tokens=[], begin_suppress_tokens=[],
))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
model.train()
for step in range(14):
    features = torch.randn(4, 80, 600)
    labels = torch.randint(3, 4000, (4, int(torch.randint(40, 150, ()))))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(input_features=features, labels=labels).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item(), flush=True)
print(digest(model))
