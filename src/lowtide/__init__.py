"""Lowtide trains neural networks in the memory you have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lowtide.errors import BudgetError, LowtideError, RecordingError, ReplayError, SizeError, UsageError

if TYPE_CHECKING:
    from lowtide.api import budget, record
    from lowtide.probe.marks import mark as step

__version__ = "0.1.0"
__all__ = [
    "BudgetError", "LowtideError", "RecordingError", "ReplayError", "SizeError", "UsageError", "__version__", "budget",
    "record", "step",
]


def __getattr__(name: str) -> Any:
    """Load what needs torch only when it is asked for."""
    if name in ("budget", "record"):
        from lowtide import api

        return getattr(api, name)
    if name == "step":
        from lowtide.probe.marks import mark

        return mark
    raise AttributeError(f"module 'lowtide' has no attribute {name!r}")
