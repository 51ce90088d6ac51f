"""Updates each parameter during the backward, as soon as its gradient is complete, and then frees the gradient.

This is exact only if nothing reads or changes the gradients or the parameters between the backward and the optimizer's step.
So it acts only if the user asks for it by name, and it watches the script for as long as it runs: a script that does such a
thing gets a :class:`LeverError` before anything wrong is computed, because a consumed gradient cannot be restored.
(:mod:`lowtide.runtime.updates.offloaded_gradients` is the memory optimization that a budget may engage automatically: it keeps
gradients readable.)

The update itself is the optimizer's own code, run on one parameter (:mod:`lowtide.runtime.updates.single_update`).

One module, and a class of many fields: whether a gradient may be consumed depends on everything that was seen of its parameter
since the last step, and each event of the script changes part of that.
"""

from __future__ import annotations

import copy
import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Final, final

from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.optim import optimizer as optim
from torch.utils._python_dispatch import _get_current_dispatch_mode, _get_current_dispatch_mode_stack

import torch
from lowtide.base.errors import LeverError
from lowtide.base.lever_catalogue import UPDATE
from lowtide.base.messages import tell
from lowtide.base.package import PACKAGE
from lowtide.base.trace import Phase
from lowtide.runtime.intercept.dispatch_mode import Mode
from lowtide.runtime.monkeypatch import Wraps, unwrapped
from lowtide.runtime.run_figures import LeverFigures
from lowtide.runtime.storage.arguments import flatten
from lowtide.runtime.storage.views import sole_owner
from lowtide.runtime.tensors import GRAD, grad_of, is_plain, on_storage, storages_of
from lowtide.runtime.torch_state import in_process_group
from lowtide.runtime.updates.single_update import in_order, parameters_of, unfit, update_one

SHARED: Final = "something else (a NumPy array, a view) shares a parameter's memory when the optimizer is created"

_TORCH: Final = str(Path(torch.__file__).parent)
_MODULES: Final = torch.nn.modules.module.__file__


@final
class OptimizerInBackward:
    """The memory optimization, for all optimizers of a process.

    Its many fields and methods are the bookkeeping on parameters and the events that change it (see the module).

    Attributes:
        engaged: whether gradients are consumed.
        reason: why some gradients are not consumed; empty if there is no such reason.
        consumed: number of gradients consumed so far.
        updating: whether an update within the backward is running.
        before_update: called with an optimizer and its parameter before that is updated within the backward.
    """

    def __init__(self, phase: Callable[[], Phase], before_update: Callable[[optim.Optimizer, torch.Tensor], None]) -> None:
        """Watch nothing yet.

        Args:
            phase: returns the phase of the step that the script is in.
            before_update: see the attribute.
        """
        self.engaged = False
        self.reason = ""
        self.consumed = 0
        self.updating = False
        self.before_update = before_update
        self._phase = phase
        self._wraps = Wraps()
        self._optimizers: weakref.WeakSet[optim.Optimizer] = weakref.WeakSet()
        self._owners: dict[int, tuple[weakref.ref[optim.Optimizer], int]] = {}
        self._fit: weakref.WeakSet[optim.Optimizer] = weakref.WeakSet()
        self._hooks: list[Any] = []
        self._gone: dict[int, weakref.ref[torch.Tensor]] = {}
        self._had: dict[int, weakref.ref[torch.Tensor]] = {}
        self._due: dict[int, list[dict[str, Any]]] = {}
        self._states: dict[int, list[Any]] = {}
        self._marks: dict[int, dict[int, Any]] = {}
        self._running = False
        self._broken = ""
        self._unpaired = False
        self._whole: set[int] = set()
        self._stepping = False
        self._shared: weakref.WeakSet[optim.Optimizer] = weakref.WeakSet()
        self._shown: list[weakref.ref[Any]] = []
        self._looker = _Looker(self)
        self._alone = False
        self._blind = False

    # --- on and off --------------------------------------------------------------------------------------------------

    def install(self, optimizers: Iterable[optim.Optimizer]) -> None:
        """Act from the next backward on.

        Args:
            optimizers: those that exist already.
        """
        self.engaged = True
        self._optimizers.update(optimizers)
        self._shared.update(optimizer for optimizer in self._optimizers if _shares_memory(optimizer))
        self._wraps.put(optim.Optimizer, "zero_grad", self._zeroing)
        self._wraps.put(torch.nn.Module, "zero_grad", self._zeroing)
        for owner, name in ((optim.Optimizer, "state_dict"), (optim.Optimizer, "load_state_dict"), (torch, "save")):
            self._wraps.put(owner, name, self._reading)
        self._wraps.put(torch.Tensor, "tolist", self._listing)
        self._wraps.put(torch.nn.Parameter, "grad", lambda _: property(self._get, self._set, self._delete))

    def remove(self) -> None:
        """Stop watching and consuming."""
        self._unpaired = self.engaged and bool(self._due) and not self._broken
        self._look_away()
        self._wraps.undo()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._owners = {}
        self.engaged = False

    def check_left(self) -> None:
        """Complain if :meth:`remove` came between a backward and its step; for use where the script goes on.

        Raises:
            LeverError: if gradients were consumed for a step that has not run. While another error is propagating, a message
                says so instead.
        """
        if self._unpaired and sys.exc_info()[0] is not None:
            tell(
                f"lowtide: {UPDATE}: an error ended the budget between a backward and the optimizer's step: parameters "
                "whose gradients were complete by then are already updated, the others are not"
            )
        elif self._unpaired:
            raise LeverError(
                f"{UPDATE}: the budget ends between a backward and the optimizer's step, with the gradients consumed: "
                f"end it after the step, or use --without {UPDATE}"
            )

    def is_ours(self, hook: Any) -> bool:
        """Whether a hook on a parameter belongs to this memory optimization."""
        return getattr(hook, "__self__", None) is self

    def figures(self) -> list[LeverFigures]:
        """Figures of this memory optimization, for the summary; empty if there was nothing to do."""
        if self.consumed:
            return [LeverFigures(name=UPDATE, used=True, text=f"{self.consumed} gradients were consumed in the backward")]
        return [LeverFigures(name=UPDATE, used=False, text=self.reason)] if self.reason else []

    def optimizer_made(self, optimizer: optim.Optimizer) -> None:
        """The script has made an optimizer."""
        if self.engaged:
            self._optimizers.add(optimizer)
            if _shares_memory(optimizer):
                self._shared.add(optimizer)

    # --- what the script does ----------------------------------------------------------------------------------------

    def backward_begins(self, *, own_code: bool, planned: bool) -> None:
        """Autograd's engine is about to run.

        A planned backward need not be checked operator by operator if the backward before it was planned too and, in it, no
        other tensor shared the storage of a parameter or state when that was updated. After an update, only two things can
        still read such a storage: a saved tensor of the parameter, whose version is compared when it is unpacked, and another
        tensor on the storage. So it is enough to check at each update that there is no other tensor (:meth:`_is_shared`).

        Args:
            own_code: whether code of the script runs in it (hooks, custom functions).
            planned: whether it follows a plan, with no other dispatch mode on.
        """
        self._settle()
        if not self.engaged:
            return
        self._whole.clear()
        self._had = {}
        if any(not isinstance(mode, Mode) for mode in _get_current_dispatch_mode_stack()):
            self._against("a dispatch mode of the script is on in the backward")
        elif own_code:
            self._against("the script's own code (hooks or custom functions) runs in the backward")
        elif self._stepping:
            self._against("the optimizer is given a closure that runs the backward")
        elif in_process_group():
            self._against("gradients are exchanged between processes")
        elif self._due:
            self._against("a backward is not followed by the optimizer's step")
        elif any(array() is not None for array in self._shown):
            self._against("a NumPy array shares a parameter's memory")
        else:
            self._had = {id(p): weakref.ref(p) for o in self._optimizers for p in parameters_of(o) if grad_of(p) is not None}
            self._adopt()
        self._blind = planned and self._alone
        self._alone = planned
        if not self._blind:
            self._look()
        self._running = True

    def backward_ends(self) -> None:
        """Autograd's engine returned, or raised."""
        self._running = False
        self._settle()
        if self.engaged and self._due:
            self._look()
        else:
            self._look_away()

    def root_begins(self) -> None:
        """The script calls a module from outside any module."""
        self._settle()
        if self._due and self.engaged:
            self._against("a model is called between the backward and the optimizer's step")
        self._look_away()

    def optimizer_begins(self, optimizer: optim.Optimizer, *, closure: bool) -> None:
        """The script calls an optimizer's step.

        Args:
            optimizer: the optimizer.
            closure: whether the step was given a closure, which runs before the update.
        """
        self._settle()
        if not self.engaged:
            return
        self._look_away()
        self._optimizers.add(optimizer)
        self._stepping = True
        marks = self._marks.get(id(optimizer), {})
        before = self._due.get(id(optimizer))
        if closure:
            self._against("the optimizer is given a closure, which may read parameters and gradients before the update")
        elif before is not None and not _same(before, _settings(optimizer)):
            self._against("the optimizer's settings (such as the learning rate) change between the backward and its step")
        elif any(_mark(_with_state(optimizer, p)) != marks[id(p)] for p in parameters_of(optimizer) if id(p) in marks):
            self._against("parameters or the optimizer's state are replaced or written between the backward and its step")
        elif any(
            id(p) not in marks and _known(self._gone, p) for p in parameters_of(optimizer)
        ):
            self._against("the optimizer steps on a gradient of an earlier backward")

    def optimizer_ends(self, optimizer: optim.Optimizer) -> None:
        """The optimizer's step returned."""
        self._stepping = False
        self._marks.pop(id(optimizer), None)
        if self._due.pop(id(optimizer), None) is not None:
            if self._due:
                done = (_with_state(optimizer, p) for p in parameters_of(optimizer))
                self._whole.difference_update(storages_of(t for tensors in done for t in tensors))
            else:
                self._whole.clear()
            in_order(optimizer, self._states.pop(id(optimizer), ()))
        if self.engaged and self._due:
            self._look()

    # --- gradients ---------------------------------------------------------------------------------------------------

    def _adopt(self) -> None:
        """Find each parameter's optimizer, and hook the parameter to learn when its gradient is complete."""
        self._owners = {}
        reasons = {optimizer: unfit(optimizer) for optimizer in self._optimizers}
        self._fit = weakref.WeakSet(o for o, reason in reasons.items() if not reason)
        self.reason = self.reason or next(filter(None, reasons.values()), "")
        seen: dict[int, torch.Tensor] = {}
        put = unwrapped(torch.Tensor.register_post_accumulate_grad_hook)
        for optimizer in self._optimizers:
            for number, group in enumerate(optimizer.param_groups):
                for p in group["params"]:
                    if not isinstance(p, torch.nn.Parameter) or not p.requires_grad or not p.is_leaf:
                        continue
                    if isinstance(p, UninitializedTensorMixin):  # a lazy module's, before its first call
                        continue
                    if id(p) in self._owners:
                        self._against("two optimizers have the same parameter")
                        return
                    if on_storage(p) and seen.setdefault(p.untyped_storage()._cdata, p) is not p:
                        self._against("two parameters share memory")
                        return
                    self._owners[id(p)] = weakref.ref(optimizer), number
                    if not any(self.is_ours(hook) for hook in (p._post_accumulate_grad_hooks or {}).values()):
                        self._hooks.append(put(p, self.gradient_is_whole))

    def gradient_is_whole(self, parameter: torch.Tensor) -> None:
        """Hook: autograd has accumulated a parameter's gradient. Update the parameter and free the gradient."""
        if not self.engaged:
            return
        owner, number = self._owners.get(id(parameter), (None, 0))
        optimizer = None if owner is None else owner()
        grad = grad_of(parameter)
        if optimizer is None or grad is None:
            return
        if _known(self._gone, parameter) or _known(self._had, parameter):
            self._against("gradients are summed over several backwards, or zeroed in place (zero_grad(set_to_none=False))")
            return
        if optimizer in self._shared:
            self.reason = SHARED
            return
        self._whole.add(parameter.untyped_storage()._cdata)
        if grad.requires_grad or optimizer not in self._fit:
            return
        self.before_update(optimizer, parameter)
        if self._is_shared(optimizer, parameter):
            self._alone = False
            if self._blind:  # leave the update to the script's own step
                self._whole.difference_update(storages_of([parameter]))
                return
        if id(optimizer) not in self._due:
            self._due[id(optimizer)] = _settings(optimizer)
            self._states[id(optimizer)] = list(optimizer.state)
        self.updating = True
        try:
            with self._unseen():
                update_one(optimizer, optimizer.param_groups[number], parameter)
        finally:
            self.updating = False
        self._must_stay(optimizer, parameter)
        GRAD.__set__(parameter, None)
        self._gone[id(parameter)] = weakref.ref(parameter)
        self.consumed += 1

    def _must_stay(self, optimizer: optim.Optimizer, parameter: torch.Tensor) -> None:
        """Forbid reads and writes of a parameter and its states until the optimizer steps."""
        tensors = _with_state(optimizer, parameter)
        self._whole.update(storages_of(tensors))
        self._marks.setdefault(id(optimizer), {})[id(parameter)] = _mark(tensors)

    def _is_shared(self, optimizer: optim.Optimizer, parameter: torch.Tensor) -> bool:
        """Whether another tensor shares the storage of a parameter that is about to be updated, or of its states."""
        if not (self._alone or self._blind):  # every operator is checked anyway
            return False
        return not all(is_plain(t) and sole_owner(t.untyped_storage(), 1) for t in _with_state(optimizer, parameter))

    def _get(self, parameter: torch.Tensor) -> torch.Tensor | None:
        found: torch.Tensor | None = GRAD.__get__(parameter)
        if self.updating or self._stepping:
            return found
        if self._phase() is Phase.ZERO_GRAD:
            self._dropped(parameter, found)
        elif _known(self._gone, parameter) and not _moves_modules():
            self._against("a consumed gradient is read")
        return found

    def _set(self, parameter: torch.Tensor, value: torch.Tensor | None) -> None:
        if value is None or self.updating or self._stepping:
            if not (self.updating or self._stepping):
                self._dropped(parameter, grad_of(parameter))
        else:
            self._against("gradients are assigned")
        GRAD.__set__(parameter, value)

    def _delete(self, parameter: torch.Tensor) -> None:
        self._dropped(parameter, grad_of(parameter))
        GRAD.__delete__(parameter)

    def _dropped(self, parameter: torch.Tensor, grad: torch.Tensor | None) -> None:
        """The script drops a gradient, or would if it had not been consumed."""
        gone = _known(self._gone, parameter)
        if not gone and grad is None:
            return
        owner, _ = self._owners.get(id(parameter), (None, None))
        optimizer = None if owner is None else owner()
        if optimizer is not None and id(optimizer) in self._due:
            self._against("gradients are dropped before the optimizer's step")
        self._gone.pop(id(parameter), None)

    def _reading(self, original: Any) -> Any:
        @functools.wraps(original)
        def read(*args: Any, **kwargs: Any) -> Any:
            self._settle()
            if self._due and not self._stepping:
                self._against("parameters or states are saved or loaded between the backward and the optimizer's step")
            return original(*args, **kwargs)

        return read

    def exposed(self, tensor: torch.Tensor, shown: Any) -> None:
        """A tensor's memory is shown to code that torch does not see, once or for as long as an array (``shown``) lives."""
        if not self.engaged or self.updating or self._stepping:
            return
        address = tensor.untyped_storage()._cdata
        if (self._due or self._running) and address in self._whole:
            self._against("parameters or states are read after their gradients are complete, before the optimizer's step")
        elif any(on_storage(p) and p.untyped_storage()._cdata == address for o in self._optimizers for p in parameters_of(o)):
            self._shown = [ref for ref in self._shown if ref() is not None]
            with suppress(TypeError):  # a DLPack capsule does not say how long it is used
                self._shown.append(weakref.ref(shown))

    def _listing(self, original: Any) -> Any:
        @functools.wraps(original)
        def tolist(tensor: torch.Tensor) -> Any:
            if on_storage(tensor):
                self.exposed(tensor, None)
            return original(tensor)

        return tolist

    def _zeroing(self, original: Any) -> Any:
        @functools.wraps(original)
        def zero_grad(what: Any, set_to_none: bool = True) -> Any:  # noqa: FBT002 - torch's own signature
            if not set_to_none and self._gone:
                self._against("gradients are zeroed in place (zero_grad(set_to_none=False))")
            return original(what, set_to_none)

        return zero_grad

    # --- parameters --------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        self._looker.on = True
        if not self._looker.entered:
            self._looker.entered = True
            self._looker.__enter__()  # type: ignore[no-untyped-call]

    def _look_away(self) -> None:
        """Stop looking; beneath a mode of the script, the looker stays on the stack until a later call."""
        looker = self._looker
        looker.on = False
        if looker.entered and _get_current_dispatch_mode() is looker:
            looker.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            looker.entered = False

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Take the looker off while other modes are put on or taken off: it must not cover them."""
        looking = self._looker.on
        self._look_away()
        yield
        if looking and self.engaged:
            self._look()

    def _unseen(self) -> AbstractContextManager[None]:
        """If only the looker is on, run the update without dispatch, so that its operators do not pass through Python."""
        alone = self._looker.entered and torch._C._len_torch_dispatch_stack() == 1  # type: ignore[attr-defined]
        return torch._C._DisableTorchDispatch() if alone else nullcontext()  # type: ignore[attr-defined]

    def look_at(self, func: Any, args: Any, kwargs: Any) -> None:
        """Check an operator that runs after the first gradient is complete and before the optimizer's step."""
        if self.updating or not self._whole:
            return
        for item in flatten((*args, *kwargs.values())):
            if isinstance(item, torch.Tensor) and on_storage(item) and item.untyped_storage()._cdata in self._whole:
                self._against(
                    f"parameters or states are used after their gradients are complete, before the optimizer's step ({func})"
                )

    def _settle(self) -> None:
        """Raise the pending error again if the script has caught it."""
        if self._broken:
            raise LeverError(self._broken)

    def _against(self, reason: str) -> None:
        """Refuse something that would change the script's results.

        Raises:
            LeverError: always, while engaged; also at later events (:meth:`_settle`).
        """
        if not self.engaged:
            return
        self._broken = (
            f"{UPDATE}: {reason}{_where()}; a consumed gradient cannot be restored: leave {UPDATE} out of --allow "
            "(a budget offloads gradients if it needs to, and keeps them readable)"
        )
        raise LeverError(self._broken)


@final
class _Looker(Mode):
    """Dispatch mode that detects uses of parameters and states while they are forbidden."""

    def __init__(self, updates: OptimizerInBackward) -> None:
        super().__init__()
        self._updates = updates
        self.on = False
        self.entered = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Check and run one operator."""
        kwargs = kwargs or {}
        if self.on:
            self._updates.look_at(func, args, kwargs)
        return func(*args, **kwargs)


def _shares_memory(optimizer: Any) -> bool:
    """Whether another tensor shares a parameter's storage: a NumPy array may show it, and reads of that are not seen."""
    plain = [p for p in parameters_of(optimizer) if on_storage(p)]
    shared = {p.untyped_storage()._cdata for p in plain if not sole_owner(p.untyped_storage(), 1)}
    if not shared:
        return False
    hidden = gc.get_freeze_count() > 0  # get_objects() does not list frozen objects
    return hidden or any(
        type(o) is torch.Tensor and on_storage(o) and o.untyped_storage()._cdata in shared for o in gc.get_objects()
    )


def _settings(optimizer: Any) -> list[dict[str, Any]]:
    """A copy of everything an update depends on besides gradients and state: the settings of each group."""
    return [
        {k: v.clone() if isinstance(v, torch.Tensor) else copy.copy(v) for k, v in group.items() if k != "params"}
        for group in optimizer.param_groups
    ]


def _same(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> bool:
    if len(a) != len(b) or any(x.keys() != y.keys() for x, y in zip(a, b, strict=True)):
        return False
    for x, y in zip(a, b, strict=True):
        for k in x:
            if isinstance(x[k], torch.Tensor) or isinstance(y[k], torch.Tensor):
                with suppress(TypeError):
                    if torch.equal(x[k], y[k]):
                        continue
                return False
            try:
                same = bool(x[k] == y[k])
            except (ValueError, TypeError, RuntimeError):  # comparing arrays gives no single bool
                same = repr(x[k]) == repr(y[k])
            if not same:
                return False
    return True


def _known(among: dict[int, weakref.ref[torch.Tensor]], parameter: torch.Tensor) -> bool:
    """Whether a parameter is in ``among``; the id alone does not tell, as ids are reused."""
    found = among.get(id(parameter))
    return found is not None and found() is parameter


def _with_state(optimizer: Any, parameter: torch.Tensor) -> list[torch.Tensor]:
    """A parameter and the tensors of the optimizer's state for it."""
    state = optimizer.state.get(parameter, {})
    return [parameter, *(t for t in state.values() if isinstance(t, torch.Tensor))]


def _mark(tensors: Iterable[torch.Tensor]) -> Any:
    """Ids, addresses and versions of tensors: one changes when a tensor is replaced or written."""
    return [(id(t), t.data_ptr() if t.layout is torch.strided else 0, t._version) for t in tensors]


def _moves_modules() -> bool:
    """Whether ``nn.Module`` itself reads a gradient, to move or convert parameters with their gradients."""
    return sys._getframe(2).f_code.co_filename == _MODULES


def _where() -> str:
    """File and line of the script's innermost frame, for an error message; empty if there is none."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, str(PACKAGE))):
        frame = frame.f_back  # type: ignore[assignment]
    return "" if frame is None else f" ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
