"""The few functions of torch that are wrapped while a budget is in force, and why each one is.

* ``Tensor.numpy``, ``__array__``, ``data_ptr``, ``__dlpack__``, ``to_dlpack``: who has a pointer may write unseen, so such a
  value is not made again from its operator; under a plan, what replays would read there is made at once, and stays.
* ``Tensor.register_hook`` and its kin, ``autograd.Function.apply``: code of the script will run in backward, so writes are
  watched there. ``Tensor.grad_fn`` and ``get_gradient_edge`` lead to the nodes of the graph, on which hooks may be put unseen.
* Setters of what decides bits (``runtime/numeric_settings``).
* ``UntypedStorage.resize_``: FSDP frees and fills the storages of parameters so; nothing is made again from such a storage.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

import torch.utils.dlpack

import torch
from lowtide.base.package import PACKAGE
from lowtide.runtime import numeric_settings
from lowtide.runtime.intercept.data_swaps import applying
from lowtide.runtime.monkeypatch import Wraps
from lowtide.runtime.tensors import on_storage

if TYPE_CHECKING:
    from lowtide.runtime.control.runtime import Runtime

_POINTERS: Final = ("numpy", "__array__", "data_ptr", "__dlpack__")
_CAPSULES: Final = ((torch, "to_dlpack"), (torch.utils.dlpack, "to_dlpack"), (torch._C, "_to_dlpack"))
_OWN: Final = (str(Path(str(torch.__file__)).parent) + os.sep, str(PACKAGE) + os.sep)
"""Whose looks at a tensor's node put no code of the script there."""


@final
class PointerEscapes:
    """Puts the wrappers on and takes them off."""

    def __init__(self, runtime: Runtime) -> None:
        """Patch nothing yet."""
        self._runtime = runtime
        self._wraps = Wraps()

    def install(self) -> None:
        """Put the wrappers on."""
        for name in _POINTERS:
            self._wraps.put(torch.Tensor, name, self._exposing)
        for owner, name in _CAPSULES:
            if hasattr(owner, name):
                self._wraps.put(owner, name, self._exposing)
        self._wraps.put(torch.UntypedStorage, "resize_", self._resizing)
        for name in ("register_hook", "register_post_accumulate_grad_hook"):
            self._wraps.put(torch.Tensor, name, self._hooking)
        self._wraps.put(torch.autograd.Function, "apply", self._applying)
        self._wraps.put(torch.Tensor, "grad_fn", self._leading)
        if hasattr(torch.autograd.graph, "get_gradient_edge"):
            self._wraps.put(torch.autograd.graph, "get_gradient_edge", self._hooking)
        numeric_settings.watch(self._wraps)

    def remove(self) -> None:
        """Take them off."""
        self._wraps.undo()

    def _exposing(self, original: Any) -> Any:
        runtime = self._runtime

        shows = original.__name__ != "data_ptr"  # addresses are asked for all over torch

        @functools.wraps(original)
        def exposed(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if type(tensor) is torch.Tensor and on_storage(tensor):
                runtime.exposing(tensor, shows=shows)
            shown = original(tensor, *args, **kwargs)
            if shows and on_storage(tensor):
                runtime.levers.in_backward.exposed(tensor, shown)
            return shown

        return exposed

    def _resizing(self, original: Any) -> Any:
        runtime = self._runtime

        @functools.wraps(original)
        def resize_(storage: Any, size: int) -> Any:
            interception = runtime.interception
            value = interception.ledger.find(storage) or interception.ledger.enter(storage, None)
            if not value.tainted:
                interception.evictor.before_write(value)
                value.tainted = True
                interception.recorder.taint(value)
            return original(storage, size)

        return resize_

    def _hooking(self, original: Any) -> Any:
        runtime = self._runtime

        @functools.wraps(original)
        def register(*args: Any, **kwargs: Any) -> Any:
            runtime.script_code_in_backward = True
            return original(*args, **kwargs)

        return register

    def _leading(self, original: Any) -> Any:
        runtime = self._runtime

        def grad_fn(tensor: Any) -> Any:
            found = original.__get__(tensor)
            if found is not None and not runtime.script_code_in_backward:
                runtime.script_code_in_backward = not sys._getframe(1).f_code.co_filename.startswith(_OWN)
            return found

        return property(grad_fn, doc=original.__doc__)

    def _applying(self, original: Any) -> Any:
        runtime, function = self._runtime, original.__func__

        @functools.wraps(function)
        def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
            if not getattr(kind, "of_lowtide", False):
                runtime.script_code_in_backward = True
            with applying():
                return function(kind, *args, **kwargs)

        return classmethod(apply)
