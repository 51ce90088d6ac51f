"""Offloads each gradient as soon as it is complete, and fetches it when it is read.

This memory optimization is engaged automatically if no plan holds the budget without it. When autograd has accumulated a
parameter's gradient, its bytes are offloaded and ``parameter.grad`` is left empty. Reading ``parameter.grad`` fetches the
gradient, bit for bit, so no script can break because of it. The bytes matter in the optimizer's step: it runs one parameter at
a time (:mod:`lowtide.runtime.levers.single_update`), and each gradient is resident only for its own update. Where that is not
possible (an unknown optimizer, a closure, step hooks), the step reads all gradients as usual.

A property in place of ``Parameter.grad`` catches readers in Python. In C++ only autograd's ``AccumulateGrad`` reads it
(``torch/csrc/autograd/functions/accumulate_grad.h``): a gradient to be added to an offloaded one is added here.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final, final

from torch.optim import optimizer as optim

import torch
from lowtide.base.lever_catalogue import GRADIENTS
from lowtide.runtime.device.offload import Ticket
from lowtide.runtime.levers.single_update import in_order, parameters_of, unfit, update_one
from lowtide.runtime.levers.stand_in import StandIns
from lowtide.runtime.monkeypatch import Wraps, unwrapped
from lowtide.runtime.run_figures import LeverFigures
from lowtide.runtime.storage.arguments import PLAIN_TYPES
from lowtide.runtime.storage.views import Meta, meta_of, sole_owner, view_on
from lowtide.runtime.tensors import beneath_autograd, is_plain
from lowtide.runtime.torch_state import in_process_group

MOST_ADDRESSES: Final = 1024
"""Known addresses are first looked through for those of dead storages once there are so many."""
LEAST_BYTES: Final = 4096
"""Smaller gradients stay resident: offloading them would cost more than it frees."""

_GRAD: Any = torch._C.TensorBase.grad
_NAMES: Final = ("grad", "_grad")
"""The properties of ``torch.Tensor`` that return a gradient."""


_REDUCED = "gradients stay where several processes train together: their reducers read gradients in C++"


@final
class _Moved:
    """One offloaded gradient."""

    __slots__ = ("meta", "parameter", "ticket")

    def __init__(self, parameter: torch.Tensor, ticket: Ticket, meta: Meta) -> None:
        self.parameter = weakref.ref(parameter)
        self.ticket = ticket
        self.meta = meta


@final
class OffloadedGradients:
    """The memory optimization, for all parameters of a process.

    Attributes:
        engaged: whether gradients are offloaded.
        moved: number of gradients offloaded so far.
        updating: whether the optimizer's update of one parameter is running.
    """

    def __init__(
        self, put: Callable[[torch.UntypedStorage], Ticket | None], make_room: Callable[[int], object] = lambda _: None,
        stand_ins: StandIns | None = None,
    ) -> None:
        """Offload nothing yet.

        Args:
            put: offloads a storage's bytes; returns None if they stay, for example because the offload tier has no room.
            make_room: called with the bytes of a gradient that is about to come back.
            stand_ins: tells what updates do.
        """
        self.engaged = False
        self._declined = False
        self.moved = 0
        self.updating = False
        self._put, self._make_room, self._stand_ins = put, make_room, stand_ins or StandIns()
        self._wraps = Wraps()
        self._hooks: list[Any] = []
        self._away: dict[int, _Moved] = {}
        self._stepped: set[int] = set()
        self._left: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._read: weakref.ref[torch.Tensor] | None = None
        self._fetched: dict[int, weakref.ref[torch.Tensor]] = {}
        self._exposed: set[int] = set()
        self._addresses: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._most_addresses = MOST_ADDRESSES
        self._unheld = (0, 0)

    # --- on and off --------------------------------------------------------------------------------------------------

    @staticmethod
    def can_engage(optimizers: Iterable[optim.Optimizer]) -> bool:
        """Whether this can lower the peak: some optimizer can step one parameter at a time, and there is only one process."""
        return not in_process_group() and any(not unfit(optimizer) for optimizer in optimizers)

    def engage(self, optimizers: Iterable[optim.Optimizer]) -> None:
        """Offload the existing gradients, and those of later backwards as they are completed."""
        self.engaged = True
        self._unheld = _references_of_unheld()
        for owner in (optim.Optimizer, torch.nn.Module):
            self._wraps.put(owner, "zero_grad", self._zeroing)
        for name in _NAMES:
            self._wraps.put(torch.nn.Parameter, name, lambda _: property(self._get, self._set, self._delete))
        known = list(optimizers)
        self.follow(known)
        for optimizer in known:
            for parameter in parameters_of(optimizer):
                if isinstance(parameter, torch.nn.Parameter):
                    self.gradient_is_whole(parameter)

    def forked(self) -> None:
        """This process is a forked child: what it offloaded would overwrite the parent's bytes, whose file it shares."""
        self.engaged = False

    def remove(self, *, over: bool) -> None:
        """Stop offloading, and fetch what is offloaded.

        Args:
            over: whether the script has ended, so that offloaded gradients need not be fetched.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if not over:
            for moved in list(self._away.values()):
                if (parameter := moved.parameter()) is not None:
                    self._bring_back(parameter)
        self._away, self._fetched = {}, {}
        self._wraps.undo()
        self.engaged = False

    def unit_begins(self) -> None:
        """Offload the gradients that were fetched: clipping reads all at once, and not every script drops them afterwards."""
        fetched, self._fetched = self._fetched, {}
        for address, ref in fetched.items():
            parameter = ref()
            if parameter is None or not self._lies_at(parameter, address):
                continue
            self._leave_again(parameter)
            if not self._is_away(parameter):  # it is held, or its address is known
                self._fetched[address] = ref

    def follow(self, optimizers: Iterable[optim.Optimizer]) -> None:
        """A backward begins: hook these optimizers' parameters, including ones added since, to offload their gradients."""
        if not self.engaged:
            return
        self._stepped = set()  # a step that raised may have left some
        put = unwrapped(torch.Tensor.register_post_accumulate_grad_hook)
        for optimizer in optimizers:
            for parameter in parameters_of(optimizer):
                followed = isinstance(parameter, torch.nn.Parameter) and parameter.is_leaf and parameter.requires_grad
                if followed and not any(self.is_ours(hook) for hook in (parameter._post_accumulate_grad_hooks or {}).values()):
                    self._hooks.append(put(parameter, self.gradient_is_whole))

    def is_ours(self, hook: Any) -> bool:
        """Whether a hook on a parameter belongs to this memory optimization."""
        return getattr(hook, "__self__", None) is self

    def figures(self) -> list[LeverFigures]:
        """Figures of this memory optimization, for the summary; empty if there was nothing to do."""
        if not self.moved:
            return [LeverFigures(name=GRADIENTS, used=False, text=_REDUCED)] if self._declined else []
        return [LeverFigures(name=GRADIENTS, used=True, text=f"{self.moved} gradients were offloaded until they were needed")]

    # --- gradients ---------------------------------------------------------------------------------------------------

    def gradient_is_whole(self, parameter: torch.Tensor) -> None:
        """Hook: autograd has accumulated a parameter's gradient."""
        if not self.engaged:
            return
        if in_process_group():
            self._declined = True
            return
        grad: torch.Tensor | None = _GRAD.__get__(parameter)
        if grad is None:
            return
        if self._is_away(parameter):
            grad = self._accumulate(parameter, grad)
        references = _references(grad)
        if self._may_leave(grad, references):
            self._move(parameter, grad)

    def _move(self, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        with beneath_autograd():
            ticket = None if id(parameter) in self._exposed else self._put(grad.untyped_storage())
        if ticket is not None:
            self._away[id(parameter)] = _Moved(parameter, ticket, meta_of(grad))
            _GRAD.__set__(parameter, None)
            self.moved += 1

    def exposed(self, storage: torch.UntypedStorage) -> None:
        """The script has a storage's address: a gradient on it stays resident; one that was fetched, in later steps too."""
        if len(self._addresses) >= self._most_addresses:
            self._addresses = {at: ref for at, ref in self._addresses.items() if ref() is not None}
            self._most_addresses = max(MOST_ADDRESSES, 2 * len(self._addresses))
        self._addresses[storage._cdata] = weakref.ref(storage)
        ref = self._fetched.get(storage._cdata)
        parameter = None if ref is None else ref()
        if parameter is not None and self._lies_at(parameter, storage._cdata):
            self._exposed.add(id(parameter))

    @staticmethod
    def _lies_at(parameter: torch.Tensor, address: int) -> bool:
        """Whether a parameter has a resident gradient on the storage at an address."""
        grad = _GRAD.__get__(parameter)
        return grad is not None and is_plain(grad) and grad.untyped_storage()._cdata == address

    def _leave_again(self, parameter: torch.Tensor) -> None:
        """Offload a gradient that was read again, unless something holds it.

        Its bytes are written anew: the script may have written to ``grad.data``, which no version counter shows.
        """
        if self._is_away(parameter):
            return
        grad = _GRAD.__get__(parameter)
        if grad is None:
            return
        references = _references(grad)
        if self._may_leave(grad, references):
            self._move(parameter, grad)

    def _accumulate(self, parameter: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Add a gradient to the offloaded one, as ``AccumulateGrad`` adds to a resident one."""
        old = self._bring_back(parameter)
        if torch.is_grad_enabled():  # the backward builds a graph (create_graph)
            old = old + new
            _GRAD.__set__(parameter, old)
        else:
            old.add_(new)
        return old

    def _may_leave(self, grad: torch.Tensor, references: tuple[int, int]) -> bool:
        """Whether only the parameter holds a gradient, its storage describes it completely, and nobody has its address."""
        return (
            type(grad) in PLAIN_TYPES
            and is_plain(grad)
            and grad.nbytes >= LEAST_BYTES
            and not grad.requires_grad
            and references == self._unheld
            and not weakref.getweakrefcount(grad)
            and not grad.__dict__  # what the script keeps there is part of this very object
            and sole_owner(grad.untyped_storage(), 1)
            and not self._is_exposed(grad.untyped_storage())
        )

    def _is_exposed(self, storage: torch.UntypedStorage) -> bool:
        ref = self._addresses.get(storage._cdata)
        return ref is not None and ref() is storage

    def _is_away(self, parameter: torch.Tensor) -> bool:
        moved = self._away.get(id(parameter))
        return moved is not None and moved.parameter() is parameter

    def _bring_back(self, parameter: torch.Tensor) -> torch.Tensor:
        self._make_room(parameter.nbytes)
        moved = self._away.pop(id(parameter))
        with beneath_autograd():
            grad = view_on(moved.ticket.fetch(), moved.meta)
        _GRAD.__set__(parameter, grad)
        return grad

    def _get(self, parameter: torch.Tensor) -> torch.Tensor | None:
        if self._is_away(parameter) and not self.updating and id(parameter) not in self._stepped:
            before = None if self._read is None else self._read()
            if before is not None:
                self._leave_again(before)
            self._read = weakref.ref(parameter)
            new = _GRAD.__get__(parameter)  # a hook of the script's may run before this one's, after a second backward
            grad = self._bring_back(parameter) if new is None else self._accumulate(parameter, new)
            self._fetched[grad.untyped_storage()._cdata] = self._read
            return grad
        found: torch.Tensor | None = _GRAD.__get__(parameter)
        return found

    def _set(self, parameter: torch.Tensor, value: torch.Tensor | None) -> None:
        _GRAD.__set__(parameter, value)
        self._forget(parameter)

    def _delete(self, parameter: torch.Tensor) -> None:
        _GRAD.__delete__(parameter)
        self._forget(parameter)

    def _forget(self, parameter: torch.Tensor) -> None:
        if self._is_away(parameter):
            del self._away[id(parameter)]

    def _zeroing(self, original: Any) -> Any:
        @functools.wraps(original)
        def zero_grad(owner: Any, set_to_none: bool = True) -> Any:  # noqa: FBT002 - torch's own signature
            if set_to_none and self._away:  # an offloaded gradient need not be fetched to be dropped
                for parameter in owner.parameters() if isinstance(owner, torch.nn.Module) else parameters_of(owner):
                    self._forget(parameter)
            return original(owner, set_to_none)

        return zero_grad

    # --- the step ----------------------------------------------------------------------------------------------------

    def optimizer_begins(self, optimizer: optim.Optimizer, *, closure: bool) -> None:
        """The script calls an optimizer's step: update the parameters whose gradients are offloaded, one by one.

        Args:
            optimizer: the optimizer.
            closure: whether the step was given a closure, which may compute other gradients first.
        """
        self._stepped = set()
        if not self.engaged or closure or unfit(optimizer) or scales(optimizer):
            return
        waiting = [(group, p) for group in optimizer.param_groups for p in group["params"] if self._is_away(p)]
        for place, (group, parameter) in enumerate(waiting):
            self._begin_next(waiting[place + 1 : place + 2])
            moved = self._away[id(parameter)]
            with beneath_autograd():
                grad = view_on(moved.ticket.fetch(), moved.meta)
                _GRAD.__set__(parameter, grad)
            self.updating = True
            try:
                update_one(optimizer, group, parameter)
            finally:
                self.updating = False
                _GRAD.__set__(parameter, None)
            self._stepped.add(id(parameter))
            if self._stand_ins.writes_gradient(optimizer, group, parameter):
                self._keep_written(parameter, grad)

    def _keep_written(self, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        """The update has written to a gradient: offload it anew, or leave it resident where that is not possible."""
        with beneath_autograd():
            ticket = self._put(grad.untyped_storage())
        if ticket is not None:
            self._away[id(parameter)] = _Moved(parameter, ticket, meta_of(grad))
        else:
            self._forget(parameter)
            self._left.append((parameter, grad))

    def _begin_next(self, following: list[tuple[Any, torch.Tensor]]) -> None:
        """On an accelerator, whose copies overlap with its work, fetch the next gradient while this one is used."""
        for _, parameter in following:
            if parameter.device.type != "cpu":
                self._away[id(parameter)].ticket.begin()

    def optimizer_ends(self, optimizer: optim.Optimizer) -> None:
        """The optimizer's step returned; it skipped the parameters that :meth:`optimizer_begins` had updated."""
        left, self._left = self._left, []
        for parameter, grad in left:
            _GRAD.__set__(parameter, grad)
        if self._stepped:
            self._stepped = set()
            in_order(optimizer)


def scales(optimizer: Any) -> bool:
    """Whether the step gets scaled gradients and unscales them in place (``GradScaler`` with a fused optimizer)."""
    return getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None


def _references(grad: torch.Tensor) -> tuple[int, int]:
    """Reference counts of a gradient: of its Python object, the caller's own reference included, and of the tensor in C++."""
    held: Callable[[], int] | None = getattr(grad, "_use_count", None)
    return sys.getrefcount(grad), 0 if held is None else held()


def _references_of_unheld() -> tuple[int, int]:
    """What :func:`_references` returns for a gradient held only by its parameter and by one variable of the caller."""
    with beneath_autograd():
        parameter = torch.nn.Parameter(torch.empty(1))
        _GRAD.__set__(parameter, torch.empty(1))
    grad = _GRAD.__get__(parameter)
    return _references(grad)
