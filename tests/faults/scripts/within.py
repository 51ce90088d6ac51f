"""The same training twice: without Lowtide, then within `lowtide.budget` or `lowtide.record`; torch is left as it was."""

import contextlib
import hashlib
import sys
from pathlib import Path

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import lowtide
from lowtide.base.errors import LowtideError


def trained() -> str:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(m for _ in range(4) for m in (torch.nn.Linear(256, 256), torch.nn.Tanh())))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    digest = hashlib.sha256()
    for _ in range(4):
        loss = model(torch.randn(1024, 256)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        digest.update(loss.item().hex().encode())
    for value in model.state_dict().values():
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()


def patchable() -> dict[str, object]:
    """What Lowtide puts something else in the place of, for as long as it watches."""
    owners = (
        torch, torch.Tensor, torch.nn.Module, torch.optim.Optimizer, torch.optim.AdamW, torch.autograd, torch.autograd.graph,
        torch.cuda, torch.random, torch.utils.data.DataLoader, torch.nn.functional, torch.func,
    )  # fmt: skip
    return {f"{o.__name__}.{name}": value for o in owners for name, value in vars(o).items() if callable(value)}


torch.set_num_threads(1)
plain, before = trained(), patchable()
print("training begins", flush=True)
entered = contextlib.ExitStack()
try:
    if sys.argv[1] == "budget":
        entered.enter_context(lowtide.budget("12MiB"))
    else:
        entered.enter_context(lowtide.record(Path(sys.argv[2])))
except (LowtideError, OSError) as error:
    print(f"lowtide: {error}", file=sys.stderr)
with entered:
    watched = trained()
if watched != plain:
    sys.exit("bits differ")
changed = [name for name, value in patchable().items() if name in before and before[name] is not value]
if changed or _get_current_dispatch_mode_stack():
    sys.exit(f"left in torch: {changed}, {_get_current_dispatch_mode_stack()}")
print("trained to", watched)
