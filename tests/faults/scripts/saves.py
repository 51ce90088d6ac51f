"""A training that saves its state and reads it back: whatever fails, what `save` returned from is there, and whole."""

import hashlib
import sys
import warnings
from pathlib import Path

import torch

from lowtide.checkpoint import Store
from lowtide.base.errors import CheckpointError

torch.set_num_threads(1)
torch.manual_seed(0)
print("training begins", flush=True)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
folder, saved, states = Path(sys.argv[1]), 0, {}
store = None
for step in range(1, 5):
    loss = model(torch.randn(32, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    states[step] = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        store = store or Store(folder, asynchronous=sys.argv[2] == "asynchronous")
        store.save({"step": step, "model": model.state_dict()})
        store.wait()
        saved = step
    except CheckpointError as error:
        print(f"lowtide: {error}", file=sys.stderr)
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    try:
        found = store.load() if store is not None else None
    except (CheckpointError, MemoryError) as error:  # the second is for a process that is started again
        found = None
        warned.append(error)
print(*(f"lowtide: {w}" for w in warned), sep="\n", file=sys.stderr)
if found is None or found["step"] < saved:
    if not warned and saved:
        sys.exit(f"step {saved} was saved, {found and found['step']} is there")
elif any(not torch.equal(value, states[found["step"]][name]) for name, value in found["model"].items()):
    sys.exit(f"what is there is not the state of step {found['step']}")
left = [p.name for p in folder.glob("*") if not p.name.isdigit() and p.name != ".lock"] if saved == 4 else []
if left:
    sys.exit(f"left in the folder: {left}")
print("trained to", hashlib.sha256(repr(states[4]).encode()).hexdigest())
