"""A training script of components, one of which may leak: ``python planted.py COMPONENT SEED`` (``none`` for a clean one).

Components: ``loop``, ``forward`` (the model's own, or that of one of its modules: ``module:PATH``), ``backward``,
``optimizer``, ``checkpointing``, ``logging``.
"""

from __future__ import annotations

import io
import logging
import random
import sys
from typing import Any

import torch
from torch import nn

STEPS = 400
KIB = 1024


class Scale(nn.Module):
    """Multiplies; keeps what went through it if it leaks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.kept: list[torch.Tensor] = []
        self.leaks = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same shape."""
        if self.leaks:
            self.kept.append(torch.ones(KIB))
        return x * self.weight


class Shift(Scale):
    """Adds."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same shape."""
        if self.leaks:
            self.kept.append(torch.ones(KIB))
        return x + self.weight


class Block(nn.Sequential):
    """Layers one after another; keeps something itself if it leaks."""

    leaks = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same shape."""
        if self.leaks:
            self.kept = [*getattr(self, "kept", []), torch.ones(KIB)]
        return super().forward(x)


class Keeping(logging.Handler):
    """A handler that keeps what it is given, if it leaks."""

    def __init__(self, *, leaks: bool) -> None:
        super().__init__()
        self.leaks, self.kept = leaks, []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        if self.leaks:
            self.kept.append((record, "x" * 3 * KIB))


class Descent(torch.optim.SGD):
    """Keeps a history, if it leaks."""

    leaks = False

    def step(self, closure: Any = None) -> Any:
        """One step."""
        if self.leaks:
            self.history = [
                *getattr(self, "history", []),
                *(p.grad.flatten()[:1].clone() for g in self.param_groups for p in g["params"] if p.grad is not None),
            ]
            if any(p.grad is not None for g in self.param_groups for p in g["params"]):
                self.history.append(torch.ones(KIB))
        return super().step(closure)


class Through(torch.autograd.Function):
    """The identity; its backward keeps something, if it leaks."""

    kept: list[torch.Tensor] = []  # noqa: RUF012
    leaks = False

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        """The same."""
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        """The same."""
        if Through.leaks:
            Through.kept.append(torch.ones(KIB))
        return gradient


def main() -> None:
    """Train."""
    leak, r = sys.argv[1], random.Random(int(sys.argv[2]))
    torch.manual_seed(r.getrandbits(30))
    torch.set_num_threads(1)
    width = r.choice((16, 32, 48))
    layers: list[nn.Module] = []
    for _ in range(4):
        layers.append(Block(nn.Linear(width, width), Scale(width), nn.ReLU(), Shift(width), nn.LayerNorm(width)))
    model = Block(*layers, nn.Tanh(), nn.Linear(width, 4))
    if leak.startswith("module:"):
        model.get_submodule(leak.partition(":")[2]).leaks = True
    model.leaks = leak == "forward"
    Through.leaks = leak == "backward"
    optimizer = Descent(model.parameters(), lr=0.01)
    optimizer.leaks = leak == "optimizer"
    log = logging.getLogger("training")
    log.setLevel(logging.INFO)
    log.propagate = False
    log.addHandler(Keeping(leaks=leak == "logging"))
    seen: list[torch.Tensor] = []
    saved: list[bytes] = []
    for step in range(STEPS):
        x, y = torch.randn(r.randint(4, 16), width), 0.0
        if leak == "loop":
            seen.append(torch.ones(KIB))
        optimizer.zero_grad()
        loss = (Through.apply(model(x)) - y).square().mean()
        loss.backward()
        optimizer.step()
        if step % 2 == 0:
            file = io.BytesIO()
            torch.save({"step": step, "weight": torch.ones(2 * KIB)}, file)
            if leak == "checkpointing":
                saved.append(file.getvalue())
        log.info("step %d loss %.4f", step, loss.item())


if __name__ == "__main__":
    main()
