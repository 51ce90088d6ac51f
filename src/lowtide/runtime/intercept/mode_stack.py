"""Putting the dispatch mode and the saved-tensor hooks on, and taking them off, beside whatever the script stacks up."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, final

from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

import torch
from lowtide.runtime.intercept.dispatch_mode import Mode


@final
class ModeStack:
    """One mode and one pair of hooks at a time; taken off only while they are on top."""

    def __init__(self) -> None:
        """Nothing is on."""
        self.mode: TorchDispatchMode | None = None
        self._hooks: tuple[Any, Any] | None = None

    def put(
        self, mode: TorchDispatchMode, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], Any], *,
        within: bool = False,
    ) -> bool:
        """Put a mode and hooks on, the hooks beneath the script's own; False if the script has a mode on.

        A script's mode takes off what is on top when it ends, which would be ours.

        Args:
            mode: what is put on.
            pack: of the hooks.
            unpack: of the hooks.
            within: whether ours is taken off before the script goes on, so that a mode of its own does not matter.
        """
        if not self.put_mode(mode, within=within):
            return False
        above = _pop_until(None)
        _push([(pack, unpack), *above])
        self._hooks = (pack, unpack)
        return True

    def put_mode(self, mode: TorchDispatchMode, *, within: bool = False) -> bool:
        """Put a mode on, and no hooks; False if the script has a mode on."""
        self.take()
        if self.mode is not None or (self.mode_covered() and not within):
            return False
        mode.__enter__()
        self.mode = mode
        return True

    def take(self) -> None:
        """Take off what is on top; what the script has covered stays until a later call."""
        self.take_hooks()
        if self.mode is not None and _get_current_dispatch_mode() is self.mode:
            self.mode.__exit__(None, None, None)
            self.mode = None

    def take_hooks(self) -> None:
        """Take the hooks off, from beneath the script's own if need be."""
        if self._hooks is None:
            return
        above = _pop_until(self._hooks)
        if _top_hooks() is not None:
            torch._C._autograd._pop_saved_tensors_default_hooks()
        _push(above)
        self._hooks = None

    def hooks_covered(self) -> bool:
        """Whether the script has saved-tensor hooks on, which are asked instead of ours."""
        top = _top_hooks()
        return top is not None and top != self._hooks

    def mode_covered(self) -> bool:
        """Whether the script has a dispatch mode on, which is asked before ours."""
        top = _get_current_dispatch_mode()
        return top is not None and top is not self.mode and not isinstance(top, Mode)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Run something without the mode and the hooks, where both are on top."""
        mode, hooks = self.mode, self._hooks
        if mode is None or _get_current_dispatch_mode() is not mode:
            yield
            return
        self.take()
        try:
            yield
        finally:
            if self.mode is None and hooks is not None:
                self.put(mode, *hooks)
            elif self.mode is None:
                mode.__enter__()
                self.mode = mode

    @contextlib.contextmanager
    def hooks_aside(self) -> Iterator[None]:
        """Run something without the hooks; the mode stays on."""
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
    """Pop hooks until a pair of ours (None: all); those popped, lowest first."""
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
