"""Collects what a script does outside the interception's reach: reasons why a budget may not be held."""

from __future__ import annotations

from typing import Any, Final, final

import torch
from lowtide.runtime.intercept.mode_stack import ModeStack
from lowtide.runtime.storage.arguments import PLAIN_TYPES
from lowtide.runtime.tensors import tensors_in

THREAD: Final = "a model is called in another thread than the one in which Lowtide was started"
TRANSFORM: Final = "a model is called under a transform of torch.func, or in a level of dual numbers"
HOOKS: Final = "the script's own saved-tensor hooks take what autograd saves"
COMPILED: Final = "a compiled region runs as one operator: what it saves for backward is neither recomputed nor offloaded"
MODE: Final = "a dispatch mode of the script's own sees the operators first"


@final
class Coverage:
    """Collects reasons, each once, in the order in which they first occur."""

    def __init__(self, stack: ModeStack) -> None:
        """Start without reasons."""
        self._stack = stack
        self._reasons: dict[str, None] = {}

    @property
    def reasons(self) -> tuple[str, ...]:
        """The reasons found so far, as texts."""
        return tuple(self._reasons)

    def note(self, reason: str) -> None:
        """Add a reason."""
        self._reasons[reason] = None

    def elsewhere(self, module: torch.nn.Module) -> None:
        """Note that a module is called in another thread, if gradients are on and one of its parameters requires them."""
        if THREAD not in self._reasons and torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()):
            self.note(THREAD)

    def look(self, args: Any, kwargs: Any) -> None:
        """Look for reasons before a model is called with these arguments."""
        if self._stack.hooks_covered():
            self.note(HOOKS)
        if self._stack.mode_covered():
            self.note(MODE)
        for tensor in tensors_in((args, kwargs)):
            if type(tensor) not in PLAIN_TYPES:
                self.note(f"a model is given tensors of a class of their own ({type(tensor).__name__})")
