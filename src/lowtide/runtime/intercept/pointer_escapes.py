"""Wraps the functions of torch that let a script write unseen or change settings, while a budget is in force.

* ``Tensor.numpy``, ``__array__``, ``data_ptr``, ``__dlpack__``, ``to_dlpack``: code with a pointer may write unseen. So such a
  value is not rematerialized from its operator. Under a plan, everything that replays would make from it is rematerialized at
  once, and stays.
* ``Tensor.register_hook`` and ``register_post_accumulate_grad_hook``, ``autograd.Function.apply``: code of the script will run
  in backward, so writes are watched there. ``Tensor.grad_fn`` and ``get_gradient_edge`` lead to the graph's nodes, on which
  the script may put hooks unseen.
* Setters of settings that decide bits (``runtime/numeric_settings``).
* ``UntypedStorage.resize_``: FSDP frees and refills parameters' storages with it; nothing is rematerialized from such a
  storage.
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
"""Paths of torch and Lowtide: when code there reads a tensor's ``grad_fn``, it puts no code of the script on the node."""


@final
class PointerEscapes:
    """Puts the wrappers on and takes them off."""

    def __init__(self, runtime: Runtime) -> None:
        """Prepare the wrappers; nothing is patched yet."""
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

        shows = original.__name__ != "data_ptr"  # torch itself asks for addresses everywhere

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
