"""Puts Lowtide's dispatch mode and saved-tensor hooks on and off, next to the modes and hooks of the script."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, final

from torch.utils._python_dispatch import _get_current_dispatch_mode

import torch
from lowtide.runtime.intercept.dispatch_mode import Mode


@final
class ModeStack:
    """At most one mode and one pair of hooks; the mode is taken off only while it is on top of the stack.

    A mode with an open gate is not on torch's stack itself: its gate stands in for it.
    """

    def __init__(self) -> None:
        """Start with nothing on."""
        self.mode: Mode | None = None
        self._stands = False
        self._hooks: tuple[Any, Any] | None = None

    def put(
        self, mode: Mode, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], Any], *,
        within: bool = False,
    ) -> bool:
        """Put a mode and hooks on, with the hooks beneath the script's own.

        When a mode of the script ends, it takes off whatever is on top of the stack, which would be Lowtide's mode.

        Args:
            mode: the mode to put on.
            pack: the pack hook.
            unpack: the unpack hook.
            within: whether Lowtide's mode comes off before the script continues, so that a mode of the script does not matter.

        Returns:
            Whether they are on now: False if the script has a mode on.
        """
        if not self.put_mode(mode, within=within):
            return False
        above = _pop_until(None)
        _push([(pack, unpack), *above])
        self._hooks = (pack, unpack)
        return True

    def put_mode(self, mode: Mode, *, within: bool = False) -> bool:
        """Put a mode on without hooks; returns False if the script has a mode on (see :meth:`put`)."""
        self.take()
        if self.mode is not None or (self.mode_covered() and not within):
            return False
        self._enter(mode)
        return True

    def take(self) -> None:
        """Take the hooks off, and the mode if it is on top; a mode that the script has covered stays until a later call."""
        self.take_hooks()
        self._take_mode()

    def _take_mode(self) -> None:
        mode = self.mode
        if mode is None:
            return
        if self._is_reachable(mode):
            if mode.gate is not None:
                mode.gate.leave()
            if not self._stands:
                mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self.mode, self._stands = None, False
        elif mode.gate is not None:
            mode.gate.disarm()

    def _is_reachable(self, mode: Mode) -> bool:
        """Whether a mode can be taken off: no mode of the script covers it."""
        return self._stands or _get_current_dispatch_mode() is mode

    def stand(self) -> None:
        """Take the mode off torch's stack if its gate is open, so that the gate stands in for it; the hooks stay on."""
        mode = self.mode
        if mode is not None and mode.gate is not None and mode.gate.open and not self._stands and self._is_reachable(mode):
            self._take_mode()
            self._enter(mode)

    def _enter(self, mode: Mode) -> None:
        self._stands = mode.gate is not None and mode.gate.open
        if mode.gate is not None and self._stands:
            mode.gate.stand(mode)
        else:
            mode.__enter__()  # type: ignore[no-untyped-call]
            if mode.gate is not None:
                mode.gate.enter(mode)
        self.mode = mode

    def take_hooks(self) -> None:
        """Take the hooks off, even from beneath the script's own."""
        if self._hooks is None:
            return
        above = _pop_until(self._hooks)
        if _top_hooks() is not None:
            torch._C._autograd._pop_saved_tensors_default_hooks()
        _push(above)
        self._hooks = None

    def hooks_covered(self) -> bool:
        """Whether the script has saved-tensor hooks on, which autograd calls instead of Lowtide's."""
        top = _top_hooks()
        return top is not None and top != self._hooks

    def mode_covered(self) -> bool:
        """Whether the script has a dispatch mode on top, which sees operators before Lowtide's."""
        top = _get_current_dispatch_mode()
        return top is not None and top is not self.mode and not isinstance(top, Mode)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Run a block without the mode and the hooks; if the mode is not on top of the stack, both stay on."""
        mode, hooks = self.mode, self._hooks
        if mode is None or not self._is_reachable(mode):
            yield
            return
        self.take()
        try:
            yield
        finally:
            if self.mode is None and hooks is not None:
                self.put(mode, *hooks)
            elif self.mode is None:
                self._enter(mode)

    @contextlib.contextmanager
    def hooks_aside(self) -> Iterator[None]:
        """Run a block without the hooks; the mode stays on."""
        hooks = self._hooks
        self.take_hooks()
        try:
            yield
        finally:
            if hooks is not None and self._hooks is None:
                above = _pop_until(None)
                _push([hooks, *above])
                self._hooks = hooks


def _pop_until(hooks: tuple[Any, Any] | None) -> list[tuple[Any, Any]]:
    """Pop hooks down to a given pair (None: all of them); returns the popped pairs, lowest first."""
    popped: list[tuple[Any, Any]] = []
    top = _top_hooks()
    while top is not None and top != hooks:
        popped.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
        top = _top_hooks()
    return popped[::-1]


def _push(pairs: list[tuple[Any, Any]]) -> None:
    for pack, unpack in pairs:
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def _top_hooks() -> tuple[Any, Any] | None:
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if top is None else (top[0], top[1])
