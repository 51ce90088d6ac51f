"""Lowtide trains neural networks in the memory you have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lowtide.base.errors import (
    BudgetError,
    CheckpointError,
    LeverError,
    LowtideError,
    MicroBatchError,
    ReaderError,
    RecordingError,
    ReplayError,
    SizeError,
    UsageError,
)

if TYPE_CHECKING:
    from lowtide import checkpoint, data
    from lowtide.api import budget, record
    from lowtide.probe.marks import mark as step
    from lowtide.runtime.micro_batch import micro_batched

__version__ = "0.1.0"
__all__ = [
    "BudgetError", "CheckpointError", "LeverError", "LowtideError", "MicroBatchError", "ReaderError", "RecordingError",
    "ReplayError", "SizeError", "UsageError", "__version__", "budget", "checkpoint", "data", "micro_batched", "record", "step",
]


def __getattr__(name: str) -> Any:
    """Import attributes that need torch, or are slow to import, on first access."""
    import importlib

    if name in ("checkpoint", "data"):
        return importlib.import_module(f"lowtide.{name}")
    homes = {"budget": "lowtide.api", "record": "lowtide.api", "micro_batched": "lowtide.runtime.micro_batch"}
    if name in homes:
        return getattr(importlib.import_module(homes[name]), name)
    if name == "step":
        from lowtide.probe.marks import mark

        return mark
    raise AttributeError(f"module 'lowtide' has no attribute {name!r}")
