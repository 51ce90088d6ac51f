"""Tracks the phases of a step, and the path of the module that is running.

A wrapper around ``nn.Module.__call__`` marks the forward and the module path (global module hooks would not pass on keyword
arguments, and would cost every module its fast path). A wrapper around autograd's engine marks the backward, optimizer hooks
mark the update, and wrappers around ``zero_grad`` mark what precedes it. Nothing in the script is changed.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol, final

from torch._C._functorch import is_legacy_batchedtensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.optim import optimizer as optim

import torch
from lowtide.base.trace import Phase
from lowtide.probe.marks import watch_made
from lowtide.runtime.intercept.mode_sensitive_backward import ModeSensitiveBackward
from lowtide.runtime.monkeypatch import Wraps
from lowtide.runtime.torch_state import within_transform

MOST_ACCUMULATED = 4096
"""After this many backwards without an optimizer step, none is expected any more, even if an optimizer exists."""


class PhaseListener(Protocol):
    """Receives the events of a :class:`PhaseTracker`."""

    def phase_begins(self, phase: Phase) -> None:
        """The script enters another phase."""

    def root_begins(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """A module is about to be called from outside any module."""

    def root_ends(self, result: Any) -> None:
        """That call returned."""

    def called_elsewhere(self, module: torch.nn.Module) -> None:
        """A module is called in another thread; the call is not followed."""

    def backward_begins(self) -> None:
        """Autograd's engine is about to run; :attr:`PhaseTracker.differentiable` says whether it builds a graph."""

    def backward_ends(self) -> None:
        """Autograd's engine returned, or raised."""

    def optimizer_begins(self, optimizer: Any) -> None:
        """An optimizer is about to step."""

    def optimizer_ends(self, optimizer: Any) -> None:
        """An optimizer stepped."""


@final
class PhaseTracker:
    """The current phase and module path.

    Its many fields are the state of torch's calls, which nest within each other; each field is written in one place.

    Attributes:
        open: number of open module calls.
        detailed: whether every module call is followed (for paths), or only calls from outside any module.
        differentiable: whether the running backward builds a graph of its own (``create_graph``); its operators are then a
            forward for a later backward.
        retains: whether the running backward retains its graph (``retain_graph``).
        outputs: the tensors from which the running backward starts.
        closure: whether the optimizer that steps was given a closure.
        on_optimizer: called with each optimizer that is created.
    """

    def __init__(self, listener: PhaseListener, derivatives: ModeSensitiveBackward | None = None) -> None:
        """Install nothing yet."""
        self.listener = listener
        self._derivatives = derivatives
        self._phase = Phase.DATA
        self.open = 0
        self._floor = 0
        self.detailed = False
        self.differentiable = False
        self.outputs: tuple[Any, ...] = ()
        self.retains = False
        self.closure = False
        self.on_optimizer: Callable[[Any], None] | None = None
        self._stepped = False
        self._made = False
        self._waited = 0
        self._names: dict[int, str] = {}
        self._stack: list[str] = []
        self._always: list[Any] = []
        self._wraps = Wraps()
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._call: Any = None
        self._wrapped_call: Any = None
        self._in_backward = 0
        self._rest = Phase.DATA
        self._owner = threading.get_ident()

    @property
    def optimizers_seen(self) -> bool:
        """Whether a step ends with an optimizer step: an optimizer has stepped, or one exists that may still step.

        Gradients may be accumulated over many backwards before the first step. No step is expected any more once gradients are
        zeroed after a backward without one, or after `MOST_ACCUMULATED` backwards.
        """
        return self._stepped or (self._made and self._waited < MOST_ACCUMULATED)

    @property
    def depth(self) -> int:
        """Number of open module calls that enclose the running code."""
        return self.open - self._floor

    @property
    def ours(self) -> bool:
        """Whether the calling thread is the one that is tracked."""
        return threading.get_ident() == self._owner

    def begin_anew(self) -> None:
        """Treat what follows as outside any module, though module calls are open (a whole step may be one call)."""
        self._floor = self.open

    def expect_optimizer(self, optimizer: Any) -> None:
        """Note that an optimizer exists."""
        self._optimizers.add(optimizer)
        self._made = True

    @property
    def phase(self) -> Phase:
        """The phase that the script is in."""
        return self._phase

    @phase.setter
    def phase(self, phase: Phase) -> None:
        if phase is not self._phase:
            self._phase = phase
            self.listener.phase_begins(phase)

    @property
    def scripted(self) -> bool:
        """Whether a later backward may ask for values made now; a plan then follows the script operator by operator."""
        return self.differentiable or self.phase not in (Phase.BACKWARD, Phase.OPTIMIZER)

    def path(self) -> str:
        """Dotted path of the innermost module that is running."""
        return self._stack[-1] if self._stack else ""

    # --- installing --------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Put the wrappers and hooks on."""
        if self._derivatives is not None:
            self._derivatives.install()
        self._hook()
        self._wraps.put(torch.autograd, "_engine_run_backward", self._wrap_engine)
        self._call = torch.nn.Module.__call__
        self._wraps.put(torch.nn.Module, "__call__", self._wrap_call)
        self._wrapped_call = torch.nn.Module.__call__
        for kind in (optim.Optimizer, torch.nn.Module):
            self._wraps.put(kind, "zero_grad", self._zeroing)
        self._wraps.also(watch_made(optim.Optimizer, self._made_one))

    def _hook(self) -> None:
        self._always = [
            optim.register_optimizer_step_pre_hook(self._optimizer_pre),
            optim.register_optimizer_step_post_hook(self._optimizer_post),
        ]

    def _unhook(self) -> None:
        for hook in self._always:
            hook.remove()
        self._always = []

    def remove(self) -> None:
        """Take the wrappers and hooks off."""
        if self._derivatives is not None:
            self._derivatives.remove()
        self._unhook()
        self._wraps.undo()
        self._call = None

    @contextlib.contextmanager
    def deaf(self) -> Iterator[None]:
        """Restore torch's own ``nn.Module.__call__`` and optimizer hooks while a compiled region runs.

        Compilers trace through both, and guard the trace on the hooks that were present. Whether an optimizer stepped within
        the block is found by the version counters of its parameters.
        """
        if self._call is None or torch.nn.Module.__call__ is not self._wrapped_call:
            yield
            return
        torch.nn.Module.__call__ = self._call  # type: ignore[method-assign]
        self._unhook()
        before = {optimizer: _versions(optimizer) for optimizer in self._optimizers}
        try:
            yield
        finally:
            self._hook()
            torch.nn.Module.__call__ = self._wrapped_call  # type: ignore[method-assign]
            for optimizer, versions in before.items():
                if _versions(optimizer) != versions:
                    self._stepped = True
                    self._optimizer_post(optimizer)

    def _made_one(self, optimizer: Any) -> None:
        self.expect_optimizer(optimizer)
        if self.on_optimizer is not None:
            self.on_optimizer(optimizer)

    # --- wrappers and hooks ------------------------------------------------------------------------------------------

    def _wrap_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def called(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self.depth and not self.detailed:
                return original(module, *args, **kwargs)
            if not self.ours:
                self.listener.called_elsewhere(module)
                return original(module, *args, **kwargs)
            return self.follow(original, module, args, kwargs)

        return called

    def follow(self, original: Callable[..., Any], module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a module's call, track it, and notify the listener if it is a root call."""
        root = self.depth == 0 and not self._in_backward
        if root:
            if self.detailed:
                self._name(module)
            self.phase = self._kind_of(module, args)
            self.listener.root_begins(module, args, kwargs)
        self.open += 1
        self._stack.append(self._names.get(id(module), type(module).__name__))
        try:
            result = original(module, *args, **kwargs)
        finally:
            self._stack.pop()
            self.open -= 1
            self._floor = min(self._floor, self.open)
            if root:
                self.phase = Phase.LOSS if torch.is_grad_enabled() else self._rest
        if root:
            self.listener.root_ends(result)
        return result

    def _kind_of(self, module: torch.nn.Module, args: Any) -> Phase:
        """The phase of a root call: evaluation, loss or forward.

        Without grad mode it is an evaluation. It is the loss if, after a forward, a module without parameters (a criterion) is
        given tensors that require gradients.
        """
        if not torch.is_grad_enabled():
            return Phase.EVALUATION
        judges = next(module.parameters(), None) is None and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
        return Phase.LOSS if judges and self._phase is Phase.LOSS else Phase.FORWARD

    def _zeroing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def zero_grad(*args: Any, **kwargs: Any) -> Any:
            if self.depth or self._in_backward or not self.ours:
                return original(*args, **kwargs)
            if self._waited:
                self._made = False
            before, self.phase = self._phase, Phase.ZERO_GRAD
            try:
                return original(*args, **kwargs)
            finally:
                self.phase = before if before is not Phase.ZERO_GRAD else self._rest

        return zero_grad

    def _name(self, root: torch.nn.Module) -> None:
        kind = type(root).__name__
        self._names = {id(m): f"{kind}.{name}" if name else kind for name, m in root.named_modules()}

    def _wrap_engine(self, engine: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(engine)
        def run_backward(
            outputs: Any, grads: Any = None, retain_graph: Any = None, create_graph: Any = None, *args: Any, **kwargs: Any
        ) -> Any:
            args = (outputs, grads, retain_graph, create_graph, *args)
            if not self.ours or self.dual or _traced(outputs):
                return engine(*args, **kwargs)
            roots = tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)
            if within_transform() or _batched(grads):
                with self._around(roots, told=False):
                    return engine(*args, **kwargs)
            if self._in_backward:
                with self._around(roots):
                    return engine(*args, **kwargs)
            before, self.phase = self.phase, Phase.BACKWARD
            self._in_backward += 1
            self.differentiable, self.retains = bool(create_graph), bool(retain_graph)
            self.outputs = roots
            begun = False  # the listener may run out of memory while it prepares, and the script may catch that error
            try:
                self.listener.backward_begins()
                begun = True
                with self._around(roots):
                    return engine(*args, **kwargs)
            finally:
                self._in_backward -= 1
                self._waited += 1
                self.outputs = ()
                if begun:
                    self.listener.backward_ends()
                within = (before is Phase.FORWARD and self.depth) or (before is Phase.LOSS and self.differentiable)
                self.phase = before if within else self._rest  # the loss goes on with the derivatives that it has asked for
                self.differentiable = False

        return run_backward

    def _around(self, roots: tuple[Any, ...], *, told: bool = True) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._derivatives is None else self._derivatives.around(roots, told=told)

    def settle(self) -> None:
        """Call after putting a mode on: a forward-mode AD level may be open, in which the mode must not stay."""
        if self._derivatives is not None:
            self._derivatives.settle()

    @property
    def dual(self) -> bool:
        """Whether a level of forward-mode AD (dual numbers) is open, in which none of Lowtide's modes is on."""
        return self._derivatives is not None and self._derivatives.dual

    def _optimizer_pre(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.closure = any(a is not None for a in (*args[1:], *kwargs.values()))
        if not self.ours:
            return
        self._stepped = True
        if not self._in_backward:
            self.phase = self._rest = Phase.OPTIMIZER  # a closure may run a forward and a backward in between
            self.listener.optimizer_begins(optimizer)

    def _optimizer_post(self, optimizer: Any, *_: Any) -> None:
        if not self.ours:
            return
        self._waited = 0
        if not self._in_backward:
            self.phase = self._rest = Phase.DATA
        self.listener.optimizer_ends(optimizer)


def _versions(optimizer: Any) -> int:
    """The sum of the parameters' version counters, which rises when any of an optimizer's parameters is written."""
    parameters = (p for group in getattr(optimizer, "param_groups", ()) for p in group["params"])
    return sum(p._version for p in parameters if not p.is_inference())


def _batched(grads: Any) -> bool:
    """Whether the gradients are batched (``is_grads_batched``): tensors that only torch's legacy ``vmap`` can take apart."""
    found = grads if isinstance(grads, (tuple, list)) else (grads,)
    return any(isinstance(g, torch.Tensor) and is_legacy_batchedtensor(g) for g in found)


def _traced(outputs: Any) -> bool:
    """Whether a backward is only traced: a compiler derives a region's backward from tensors without bytes."""
    found = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    return any(isinstance(t, (FakeTensor, FunctionalTensor)) for t in found)
