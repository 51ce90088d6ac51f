"""The step of an optimizer some of whose parameters were updated just before it, so that it must skip them."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any, final

import torch
from lowtide.runtime.tensors import states_of
from lowtide.runtime.updates.gradient_access import put_gradient
from lowtide.runtime.updates.single_update import bare, in_order


@final
class EarlyUpdate:
    """Which parameters the running step must not see, and what is to be put right when it is over.

    A step is over when it returns, or when it has raised: then no hook tells so, and the next one who asks finds out.
    """

    def __init__(self) -> None:
        """No step is running."""
        self._updated: set[int] = set()
        self._resident: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._states: list[Any] = []
        self._thread = 0
        self._updating = False
        self._codes: set[CodeType] = set()
        """Of the step, and of torch's wrapper around it, which calls Lowtide's hook before it."""

    @contextlib.contextmanager
    def begins(self, optimizer: Any) -> Iterator[None]:
        """An optimizer's step is about to run in this thread; parameters are updated within the context."""
        self._states, self._thread = list(states_of(optimizer)), threading.get_ident()
        step = type(optimizer).step
        self._codes = {step.__code__, bare(step).__code__}
        self._updating = True
        try:
            yield
        finally:
            self._updating = False

    def add(self, parameter: torch.Tensor) -> None:
        """A parameter has been updated: the step must not see its gradient."""
        self._updated.add(id(parameter))

    def remains(self, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        """An updated parameter's gradient is to be resident again when the step is over."""
        self._resident.append((parameter, grad))

    def hides(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter's gradient is hidden from the step, which is running."""
        if id(parameter) not in self._updated:
            return False
        if self._is_here() and not self._is_running():
            self.is_over()
            return False
        return True

    def is_read_from_outside(self) -> bool:
        """Whether who reads a gradient is not the step: another thread, or a signal's handler before the step."""
        return not self._is_here() or self._updating

    def resident(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """A hidden gradient that is resident, for whoever is to see it; None if there is none."""
        return next((grad for kept, grad in self._resident if kept is parameter), None)

    def _is_here(self) -> bool:
        """Whether the step runs in this thread."""
        return threading.get_ident() == self._thread

    def _is_running(self) -> bool:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code not in self._codes:
            frame = frame.f_back
        return frame is not None

    def returned(self, optimizer: Any) -> None:
        """The step has returned: its states are put into the order in which it would have made them."""
        if self._updated:
            in_order(optimizer, self._states)
        self.is_over()

    def is_over(self) -> None:
        """No step is running any more."""
        resident, self._resident = self._resident, []
        for parameter, grad in resident:
            put_gradient(parameter, grad)
        self._updated, self._states, self._thread, self._updating = set(), [], 0, False
