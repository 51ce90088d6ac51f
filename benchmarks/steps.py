"""Training steps that benchmarks share: a model, what it is given, AdamW."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import nn


@final
class Step:
    """Forward, backward, update, gradients let go: called once a step."""

    def __init__(self, model: nn.Module, loss_of: Callable[[], torch.Tensor]) -> None:
        """Train a model on what a function gives."""
        self.model, self._loss_of = model, loss_of
        self._optimizer = torch.optim.AdamW(model.parameters())

    def __call__(self) -> None:
        """One step."""
        self._loss_of().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)


def language(model: nn.Module, vocabulary: int, batch: int, length: int) -> Step:
    """On random words."""
    model.train()

    def loss() -> torch.Tensor:
        ids = torch.randint(0, vocabulary, (batch, length))
        return model(input_ids=ids, labels=ids).loss

    return Step(model, loss)


def image(model: nn.Module, batch: int, size: int) -> Step:
    """On random pictures."""
    model.train()
    return Step(
        model, lambda: model(pixel_values=torch.randn(batch, 3, size, size), labels=torch.randint(0, 10, (batch,))).loss
    )
