"""Atomic checkpoints, and safe points at which a run can stop and later resume.

Call the module itself at a safe point::

    state = {"model": model, "optimizer": optimizer, "batches": lowtide.checkpoint.Batches(loader)}
    at = lowtide.checkpoint.resume("checkpoints", state)
    for epoch in range(at.get("epoch", 0), epochs):
        for batch in state["batches"]:
            ...
            lowtide.checkpoint("checkpoints", state, epoch=epoch)
        lowtide.checkpoint("checkpoints", state, epoch=epoch + 1, epoch_end=True)
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from lowtide.checkpoint.batches import Batches
from lowtide.checkpoint.callbacks import keras_callback, lightning_callback, transformers_callback
from lowtide.checkpoint.points import STOPPED, Stop, checkpoint, resume
from lowtide.checkpoint.store import Saved, Store
from lowtide.checkpoint.whole import newest

__all__ = [
    "STOPPED",
    "Batches",
    "Saved",
    "Stop",
    "Store",
    "checkpoint",
    "keras_callback",
    "lightning_callback",
    "newest",
    "resume",
    "transformers_callback",
]


class _Callable(ModuleType):
    """A callable module: ``lowtide.checkpoint(...)`` works as well as ``lowtide.checkpoint.Store``."""

    def __call__(self, *args: Any, **kwargs: Any) -> bool:
        """Pass a safe point."""
        return checkpoint(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
