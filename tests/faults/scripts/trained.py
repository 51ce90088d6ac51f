"""A small training with known figures: it prints its final state and ends with exit code 7."""

import argparse
import hashlib
import sys

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--batch", type=int, default=1024)
parser.add_argument("--code", type=int, default=7)
asked = parser.parse_args()

torch.manual_seed(0)
torch.set_num_threads(1)
print("training begins", flush=True)
model = torch.nn.Sequential(*(m for _ in range(6) for m in (torch.nn.Linear(256, 256), torch.nn.Tanh())))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for _ in range(asked.steps):
    loss = model(torch.randn(asked.batch, 256)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item().hex())
digest = hashlib.sha256("".join(losses).encode())
for value in model.state_dict().values():
    digest.update(value.numpy().tobytes())
print("trained to", digest.hexdigest(), flush=True)
sys.exit(asked.code)
