"""Suspends the interception around code of torch that cannot run under it, in budgeted and in recorded runs.

* ``torch.compile``: compilers trace and run below Lowtide's interception; compiled regions run without it.
* ``torch.jit.trace``: it traces every operator that runs, Lowtide's included.
* ``FakeTensorMode``: its tensors have no bytes, and it would treat Lowtide's tensors as its own.
* Higher-order operators (``torch.cond``): torch dispatches them in Python, which does not know the native gate's key.
* ``torch.autograd.graph.disable_saved_tensors_hooks`` and the nesting of ``torch.func``'s transforms: they refuse to run
  under saved-tensor hooks, so Lowtide's are taken off meanwhile.
* ``tensor.data = other``: what autograd holds in place of a saved tensor is notified.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, final

from torch._functorch import eager_transforms
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode

import torch
from lowtide.base.package import PACKAGE
from lowtide.probe.marks import WhenImported
from lowtide.runtime.intercept.data_swaps import watch_exchanges
from lowtide.runtime.intercept.mode_stack import ModeStack
from lowtide.runtime.intercept.phases import PhaseTracker
from lowtide.runtime.monkeypatch import Wraps, lifted

Around = Callable[[Any, Callable[..., Any], Any, Any], Any]
"""Runs a compiled region; called with the region (a module or a function), a function that calls it, and its arguments."""


def _nothing_around(_region: Any, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return run(*args, **kwargs)


@final
class Bypass:
    """Takes a stack's mode and hooks off where they must not be on, and puts them back afterwards.

    Attributes:
        around: runs a compiled region.
        before_tracing: called before a compiler traces the script past Lowtide's wrappers.
        only_hooks: whether the mode stays on where torch refuses only the hooks; for a mode that changes nothing there (a
            recording's).
    """

    def __init__(
        self, stack: ModeStack, clock: PhaseTracker, around: Around = _nothing_around, *,
        before_tracing: Callable[[], object] = lambda: None, only_hooks: bool = False,
    ) -> None:
        """Prepare the wrappers; nothing is patched yet."""
        self.stack = stack
        self.clock = clock
        self.around = around
        self.before_tracing = before_tracing
        self.only_hooks = only_hooks
        self._wraps = Wraps()
        self._depth = 0
        self._aside = contextlib.ExitStack()
        self._fakes: list[contextlib.ExitStack] = []
        self._awaited: WhenImported | None = None

    @property
    def transforming(self) -> bool:
        """Whether a function transform or a forward-mode AD level is active: neither mode nor hooks may be put on then."""
        return self._depth > 0 or self.clock.dual

    def install(self) -> None:
        """Put the wrappers on."""
        self._wraps.put(torch, "compile", self._compiling)
        self._wraps.put(torch.autograd.graph, "disable_saved_tensors_hooks", self._disabling)
        for name, wrapper in (("_grad_increment_nesting", self._nesting), ("_grad_decrement_nesting", self._unnesting)):
            if hasattr(eager_transforms, name):
                self._wraps.put(eager_transforms, name, wrapper)
        for name in ("trace", "trace_module"):
            self._wraps.put(torch.jit, name, self._outside)
        self._wraps.put(FakeTensorMode, "__enter__", self._faking)
        self._wraps.put(FakeTensorMode, "__exit__", self._faked)
        self._wraps.put(HigherOrderOperator, "__call__", self._without_gate)
        watch_exchanges(self._wraps)
        self._awaited = WhenImported("torch._dynamo.convert_frame", self._watch_compilers)

    def remove(self) -> None:
        """Take them off."""
        if self._awaited is not None:
            self._awaited.forget()
        self._wraps.undo()

    def _compiling(self, original: Any) -> Any:
        @functools.wraps(original)
        def compile_(*args: Any, **kwargs: Any) -> Any:
            with self.clock.deaf():  # a compiled module keeps the `__call__` that it finds now
                compiled = original(*args, **kwargs)
            if not args and kwargs.get("model") is None:
                return lambda model: self._wrap_compiled(compiled(model))
            return self._wrap_compiled(compiled)

        return compile_

    def _watch_compilers(self, frames: Any) -> None:
        """Patch Dynamo, once it is imported, so that it traces torch without Lowtide's wrappers."""
        modules: Any = sys.modules.get("torch._dynamo.eval_frame")
        if modules is None or not hasattr(modules, "OptimizedModule"):
            return
        for owner, name in ((frames, "_compile"), (modules.OptimizedModule, "_initialize")):
            if hasattr(owner, name):
                self._wraps.put(owner, name, self._without_ours)
        self._wraps.put(modules.OptimizedModule, "__call__", self._outside_compiled)  # the class of all compiled modules
        self._leave_own_frames_alone()

    def _leave_own_frames_alone(self) -> None:
        """Have Dynamo compile no function of Lowtide's: hooks run within a compiled region, too."""
        rules: Any = sys.modules.get("torch._dynamo.trace_rules")
        if not all(hasattr(rules, name) for name in ("add", "SKIP_DIRS", "_recompile_re")):
            return
        before = list(rules.SKIP_DIRS)
        rules.add(PACKAGE.name)

        def undo() -> None:
            rules.SKIP_DIRS[:] = [folder for folder in rules.SKIP_DIRS if folder in before or folder not in added]
            rules._recompile_re()

        added = [folder for folder in rules.SKIP_DIRS if folder not in before]
        self._wraps.also(undo)

    def _without_ours(self, original: Any) -> Any:
        known = weakref.ref(self)

        @functools.wraps(original)
        def compiling(*args: Any, **kwargs: Any) -> Any:
            asides = known()
            if asides is not None:
                asides.before_tracing()
            with lifted():
                return original(*args, **kwargs)

        return compiling

    def _wrap_compiled(self, compiled: Any) -> Any:
        return compiled if isinstance(compiled, torch.nn.Module) else self._outside_compiled(compiled)

    def _outside_compiled(self, original: Any) -> Any:
        """Wrap a compiled region so that it runs without any interception; the script may keep it after the budget ends."""
        known = weakref.ref(self)

        @functools.wraps(original)
        def compiled(*args: Any, **kwargs: Any) -> Any:
            asides = known()
            if asides is None:
                return original(*args, **kwargs)
            region = args[0] if args and isinstance(args[0], torch.nn.Module) else original

            def run(*args: Any, **kwargs: Any) -> Any:
                with asides.stack.aside(), asides.clock.deaf():
                    return original(*args, **kwargs)

            if isinstance(region, torch.nn.Module) and asides.clock.ours:

                def around(*args: Any, **kwargs: Any) -> Any:
                    return asides.around(region, run, args, kwargs)

                return asides.clock.follow(around, region, args[1:], kwargs)
            return asides.around(region, run, args, kwargs)

        return compiled

    def _outside(self, original: Any) -> Any:
        @functools.wraps(original)
        def traced(*args: Any, **kwargs: Any) -> Any:
            with self.stack.aside(), self.clock.deaf():
                return original(*args, **kwargs)

        return traced

    def _faking(self, original: Any) -> Any:
        @functools.wraps(original)
        def enter(mode: Any) -> Any:
            found = contextlib.ExitStack()
            found.enter_context(self.stack.aside())
            found.enter_context(self.clock.deaf())
            self._fakes.append(found)
            return original(mode)

        return enter

    def _faked(self, original: Any) -> Any:
        @functools.wraps(original)
        def leave(mode: Any, *how: Any) -> Any:
            try:
                return original(mode, *how)
            finally:
                if self._fakes:  # the mode may have been entered before these wrappers were on
                    self._fakes.pop().close()

        return leave

    def _without_gate(self, original: Any) -> Any:
        """Run an operator that torch dispatches in Python, which does not know the gate's key, with the mode alone."""

        @functools.wraps(original)
        def call(operator: Any, /, *args: Any, **kwargs: Any) -> Any:
            gate = None if self.stack.mode is None else self.stack.mode.gate
            if gate is None:
                return original(operator, *args, **kwargs)
            gate.disarm()
            try:
                return original(operator, *args, **kwargs)
            finally:
                gate.rearm()

        return call

    def _nesting(self, original: Any) -> Any:
        @functools.wraps(original)
        def increment() -> Any:
            if not self._depth:
                self._aside = contextlib.ExitStack()
                self._aside.enter_context(self._unhooked())
            self._depth += 1
            return original()

        return increment

    def _unnesting(self, original: Any) -> Any:
        @functools.wraps(original)
        def decrement() -> Any:
            level = original()
            if self._depth:  # the transform may have been entered before these wrappers were on
                self._depth -= 1
                if not self._depth:
                    self._aside.close()
            return level

        return decrement

    def _unhooked(self) -> contextlib.AbstractContextManager[None]:
        return self.stack.hooks_aside() if self.only_hooks else self.stack.aside()

    def _disabling(self, original: Any) -> Any:
        asides = self

        @functools.wraps(original)
        @contextlib.contextmanager
        def disabled(*args: Any, **kwargs: Any) -> Iterator[None]:
            with asides._unhooked(), original(*args, **kwargs):
                yield

        return disabled
