"""The few functions of torch that are wrapped while a budget is in force, and why each one is.

* ``Tensor.numpy``, ``__array__``, ``data_ptr``, ``__dlpack__``: who has a pointer may write unseen, so such a value is not
  made again from its operator.
* ``Tensor.register_hook`` and its kin, ``autograd.Function.apply``: code of the script will run in backward, so writes are
  watched there.
* ``UntypedStorage.resize_``: FSDP frees and fills the storages of parameters so; nothing is made again from such a storage.
* ``torch.compile``: compilers trace and run below our interception; compiled regions run without it.
* ``torch.autograd.graph.disable_saved_tensors_hooks`` and the nesting of ``torch.func``'s transforms: they refuse to run
  under saved-tensor hooks, so ours are put aside meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, final

from torch._functorch import eager_transforms

import torch
from lowtide.live.value import is_plain

if TYPE_CHECKING:
    from lowtide.live.runtime import Runtime

_POINTERS: Final = ("numpy", "__array__", "data_ptr", "__dlpack__")


@final
class Patches:
    """Puts the wrappers on and takes them off."""

    def __init__(self, runtime: Runtime) -> None:
        """Patch nothing yet."""
        self._runtime = runtime
        self._undo: list[Callable[[], None]] = []
        self._depth = 0
        self._aside = contextlib.ExitStack()

    def install(self) -> None:
        """Put the wrappers on."""
        for name in _POINTERS:
            self._wrap(torch.Tensor, name, self._exposing)
        self._wrap(torch.UntypedStorage, "resize_", self._resizing)
        for name in ("register_hook", "register_post_accumulate_grad_hook"):
            self._wrap(torch.Tensor, name, self._hooking)
        self._wrap(torch.autograd.Function, "apply", self._applying)
        self._wrap(torch, "compile", self._compiling)
        self._wrap(torch.autograd.graph, "disable_saved_tensors_hooks", self._disabling)
        for name, wrapper in (("_grad_increment_nesting", self._nesting), ("_grad_decrement_nesting", self._unnesting)):
            if hasattr(eager_transforms, name):
                self._wrap(eager_transforms, name, wrapper)

    def remove(self) -> None:
        """Take them off."""
        for undo in reversed(self._undo):
            undo()
        self._undo = []

    def _wrap(self, owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
        former = vars(owner).get(name)
        setattr(owner, name, wrapper(getattr(owner, name)))
        self._undo.append(lambda: delattr(owner, name) if former is None else setattr(owner, name, former))

    def _exposing(self, original: Any) -> Any:
        runtime = self._runtime

        @functools.wraps(original)
        def exposed(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            recorder = runtime.saver.recorder
            if recorder is not None and not runtime.full.passive and type(tensor) is torch.Tensor and is_plain(tensor):
                value = runtime.ledger.find(tensor.untyped_storage())
                if value is not None:
                    value.tainted = True
                    recorder.taint(value)
            return original(tensor, *args, **kwargs)

        return exposed

    def _resizing(self, original: Any) -> Any:
        runtime = self._runtime

        @functools.wraps(original)
        def resize_(storage: Any, size: int) -> Any:
            value = runtime.ledger.find(storage) or runtime.ledger.enter(storage, None)
            if not value.tainted:
                runtime.evictor.before_write(value)
                value.tainted = True
                if runtime.saver.recorder is not None:
                    runtime.saver.recorder.taint(value)
            return original(storage, size)

        return resize_

    def _hooking(self, original: Any) -> Any:
        runtime = self._runtime

        @functools.wraps(original)
        def register(*args: Any, **kwargs: Any) -> Any:
            runtime.script_code_in_backward = True
            return original(*args, **kwargs)

        return register

    def _applying(self, original: Any) -> Any:
        runtime, function = self._runtime, original.__func__

        @functools.wraps(function)
        def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
            runtime.script_code_in_backward = True
            return function(kind, *args, **kwargs)

        return classmethod(apply)

    def _compiling(self, original: Any) -> Any:
        @functools.wraps(original)
        def compile_(*args: Any, **kwargs: Any) -> Any:
            compiled = original(*args, **kwargs)
            if not args and kwargs.get("model") is None:
                return lambda model: self._wrap_compiled(compiled(model))
            return self._wrap_compiled(compiled)

        return compile_

    def _wrap_compiled(self, compiled: Any) -> Any:
        if isinstance(compiled, torch.nn.Module):
            kind: Any = type(compiled)
            if "_lowtide" not in vars(kind):
                own, original = "__call__" in vars(kind), kind.__call__
                kind.__call__ = self._outside_compiled(original)  # type: ignore[method-assign]
                kind._lowtide = True  # type: ignore[assignment]

                def undo() -> None:
                    del kind._lowtide
                    if own:
                        kind.__call__ = original  # type: ignore[method-assign]
                    else:
                        del kind.__call__

                self._undo.append(undo)
            return compiled
        return self._outside_compiled(compiled)

    def _outside_compiled(self, original: Any) -> Any:
        """Run a compiled region without any interception; the script may keep it longer than the budget lasts."""
        known = weakref.ref(self._runtime)

        @functools.wraps(original)
        def compiled(*args: Any, **kwargs: Any) -> Any:
            runtime = known()
            if runtime is None:
                return original(*args, **kwargs)
            with runtime.stack.aside(), runtime.clock.deaf():
                return original(*args, **kwargs)

        return compiled

    def _nesting(self, original: Any) -> Any:
        @functools.wraps(original)
        def increment() -> Any:
            if not self._depth:
                self._aside = contextlib.ExitStack()
                self._aside.enter_context(self._runtime.stack.aside())
            self._depth += 1
            return original()

        return increment

    def _unnesting(self, original: Any) -> Any:
        @functools.wraps(original)
        def decrement() -> Any:
            level = original()
            self._depth -= 1
            if not self._depth:
                self._aside.close()
            return level

        return decrement

    def _disabling(self, original: Any) -> Any:
        runtime = self._runtime

        @functools.wraps(original)
        @contextlib.contextmanager
        def disabled(*args: Any, **kwargs: Any) -> Iterator[None]:
            with runtime.stack.aside(), original(*args, **kwargs):
                yield

        return disabled

