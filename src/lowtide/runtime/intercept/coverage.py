"""Collects what a script does outside the interception's reach: reasons why a budget may not be held."""

from __future__ import annotations

from typing import Any, Final, final

import torch
from lowtide.runtime.intercept.mode_stack import ModeStack
from lowtide.runtime.storage.arguments import PLAIN_TYPES
from lowtide.runtime.tensors import tensors_in

THREAD: Final = "a model runs in a thread other than the one that started Lowtide"
TRANSFORM: Final = "a model runs inside a torch.func transform or a dual level of forward-mode autograd"
HOOKS: Final = "saved-tensor hooks of the script take what autograd saves"
COMPILED: Final = "a compiled region runs as one operator: its saved tensors are neither recomputed nor offloaded"
MODE: Final = "a dispatch mode of the script sees the operators before Lowtide does"


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
                self.note(f"a model is given tensor subclasses ({type(tensor).__name__})")
