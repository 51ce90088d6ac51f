"""What torch is doing at the moment: whether a function transform is active, whether this process trains with others."""

from __future__ import annotations

import torch


def within_transform() -> bool:
    """Whether a transform of ``torch.func`` is active: torch refuses saved-tensor hooks within some of them."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def in_process_group() -> bool:
    """Whether this process trains with others: their reducers read gradients in C++."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()
