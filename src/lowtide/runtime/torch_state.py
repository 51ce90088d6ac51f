"""What torch is doing at the moment: whether a function transform is active, whether this process trains with others."""

from __future__ import annotations

import torch


def within_transform() -> bool:
    """Whether a transform of ``torch.func`` is active: torch refuses saved-tensor hooks within some of them."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_compiled_here() -> bool:
    """Whether a compiler runs the code that is calling, and would compile what is called from here, too."""
    frames = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    callback = getattr(frames, "get_eval_frame_callback", None)
    return callback is not None and callable(callback())


def in_process_group() -> bool:
    """Whether this process trains with others: their reducers read gradients in C++."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()
