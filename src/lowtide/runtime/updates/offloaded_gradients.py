"""Offloads each gradient as soon as it is complete, and fetches it when it is read.

This memory optimization is engaged automatically if no plan holds the budget without it. When autograd has accumulated a
parameter's gradient, its bytes are offloaded and ``parameter.grad`` is left empty. Reading ``parameter.grad`` fetches the
gradient, bit for bit, so no script can break because of it. The bytes matter in the optimizer's step: it runs one parameter at
a time (:mod:`lowtide.runtime.updates.stepwise_update`), and each gradient is resident only for its own update.

A property in place of ``Parameter.grad`` catches readers in Python. In C++ only autograd's ``AccumulateGrad`` reads it
(``torch/csrc/autograd/functions/accumulate_grad.h``): a gradient to be added to an offloaded one is added here.

One module: every way in which a gradient leaves, comes back and is read rests on the same table of what is offloaded.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, final

from torch.optim import optimizer as optim

import torch
from lowtide.base.lever_catalogue import GRADIENTS
from lowtide.runtime.device.offload import SlicedTicket, Ticket
from lowtide.runtime.monkeypatch import unwrapped
from lowtide.runtime.run_figures import LeverFigures
from lowtide.runtime.storage.arguments import PLAIN_TYPES
from lowtide.runtime.storage.views import meta_of, view_on
from lowtide.runtime.tensors import GRAD, beneath_autograd, is_plain
from lowtide.runtime.torch_state import in_process_group
from lowtide.runtime.updates.early_update import EarlyUpdate
from lowtide.runtime.updates.gradient_access import (
    Counts,
    is_alone,
    is_held_here,
    put_gradient,
    references,
    references_of_unheld,
)
from lowtide.runtime.updates.moved_value import MovedValue, Offloading
from lowtide.runtime.updates.single_update import parameters_of, unfit

LEAST_BYTES: Final = 4096
"""Smaller gradients stay resident: offloading them would cost more than it frees."""

_NAMES: Final = ("grad", "_grad")
"""The properties of ``torch.Tensor`` that return a gradient."""


_REDUCED = "gradients stay where several processes train together: their reducers read gradients in C++"


@final
class _Moved(MovedValue):
    """One offloaded gradient."""

    __slots__ = ("parameter",)

    def __init__(self, parameter: torch.Tensor, ticket: Ticket, grad: torch.Tensor) -> None:
        super().__init__(ticket, meta_of(grad), grad.untyped_storage().nbytes())
        self.parameter = weakref.ref(parameter)


@final
class OffloadedGradients(Offloading):
    """The memory optimization, for all parameters of a process.

    Its many methods are the ways in which gradients leave, come back, are read, replaced and dropped.

    Attributes:
        early: which parameters were updated just before their optimizer's step, which must not see their gradients.
    """

    def __init__(
        self, put: Callable[[torch.UntypedStorage], Ticket | None], make_room: Callable[[int], object] = lambda _: None
    ) -> None:
        """Offload nothing yet (see :class:`Offloading`)."""
        super().__init__(put, make_room)
        self.early = EarlyUpdate()
        self._declined = False
        self._updating = False
        self._hooks: list[Any] = []
        self._away: dict[int, _Moved] = {}
        self._read: weakref.ref[torch.Tensor] | None = None
        self._fetched: dict[int, weakref.ref[torch.Tensor]] = {}
        self._exposed: set[int] = set()

    # --- on and off --------------------------------------------------------------------------------------------------

    @staticmethod
    def can_engage(optimizers: Iterable[optim.Optimizer]) -> bool:
        """Whether this can lower the peak: some optimizer can step one parameter at a time, and there is only one process."""
        return not in_process_group() and any(not unfit(optimizer) for optimizer in optimizers)

    def engage(self, optimizers: Iterable[optim.Optimizer]) -> None:
        """Offload the existing gradients, and those of later backwards as they are completed."""
        self.engaged = True
        self._unheld = references_of_unheld()
        for owner in (optim.Optimizer, torch.nn.Module):
            self._wraps.put(owner, "zero_grad", self._zeroing)
        for name in _NAMES:
            self._wraps.put(torch.nn.Parameter, name, lambda _: property(self._get, self._set, self._delete))
        self._wraps.put(torch.utils, "swap_tensors", self._swapping)
        known = list(optimizers)
        self.follow(known)
        for optimizer in known:
            for parameter in parameters_of(optimizer):
                if isinstance(parameter, torch.nn.Parameter):
                    self.gradient_is_whole(parameter)

    def remove(self, *, over: bool) -> None:
        """Stop offloading, and fetch what is offloaded.

        Args:
            over: whether the script has ended, so that offloaded gradients need not be fetched.
        """
        self.engaged = False
        hooks, self._hooks = self._hooks, []
        with contextlib.ExitStack() as stack:  # all of it is done, even if something raises
            stack.callback(self._wraps.undo)
            stack.callback(self.early.is_over)  # a step that raised may have left something
            stack.callback(self._away.clear)
            stack.callback(self._fetched.clear)
            for moved in () if over else list(self._away.values()):
                if (parameter := moved.parameter()) is not None:
                    stack.callback(self._come_back, parameter)
            for hook in hooks:
                stack.callback(hook.remove)

    def unit_begins(self) -> None:
        """Offload the gradients that were fetched: clipping reads all at once, and not every script drops them afterwards."""
        with self.lock:
            self._forget_dead()
            fetched, self._fetched = self._fetched, {}
            for address, ref in fetched.items():
                parameter = ref()
                if parameter is None or not self._lies_at(parameter, address):
                    continue
                self._leave_again(parameter)
                if not self.is_away(parameter):  # it is held, or its address is known
                    self._fetched[address] = ref

    def bring_back_all(self) -> None:
        """Fetch all gradients; they are offloaded again when the next unit begins."""
        with self.lock:
            for moved in list(self._away.values()):
                if (parameter := moved.parameter()) is not None:
                    grad = self._come_back(parameter)
                    self._fetched[grad.untyped_storage()._cdata] = weakref.ref(parameter)

    def _forget_dead(self) -> None:
        """Drop what belongs to parameters that are gone."""
        dead = [key for key, moved in self._away.items() if moved.parameter() is None]
        for key in dead:
            del self._away[key]
        if dead:
            self._hooks = [hook for hook in self._hooks if hook.hooks_dict_ref() is not None]

    def follow(self, optimizers: Iterable[optim.Optimizer]) -> None:
        """A backward begins: hook these optimizers' parameters, including ones added since, to offload their gradients."""
        if not self.engaged:
            return
        self.early.is_over()  # a step that raised may have left something
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
        with self.lock:
            grad: torch.Tensor | None = GRAD.__get__(parameter)
            if grad is None:
                return
            if self.is_away(parameter):
                grad = self._accumulate(parameter, grad)
            counts = references(grad)
            if self._may_leave(grad, counts):
                self._move(parameter, grad)

    def _move(self, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        with beneath_autograd():
            ticket = None if id(parameter) in self._exposed else self._put(grad.untyped_storage())
        if ticket is not None:
            self._away[id(parameter)] = _Moved(parameter, ticket, grad)
            GRAD.__set__(parameter, None)
            self.moved += 1

    def exposed(self, storage: torch.UntypedStorage) -> None:
        """The script has a storage's address: a gradient on it stays resident; one that was fetched, in later steps too."""
        self._addresses.add(storage)
        ref = self._fetched.get(storage._cdata)
        parameter = None if ref is None else ref()
        if parameter is not None and self._lies_at(parameter, storage._cdata):
            self._exposed.add(id(parameter))

    @staticmethod
    def _lies_at(parameter: torch.Tensor, address: int) -> bool:
        """Whether a parameter has a resident gradient on the storage at an address."""
        grad = GRAD.__get__(parameter)
        return grad is not None and is_plain(grad) and grad.untyped_storage()._cdata == address

    def _leave_again(self, parameter: torch.Tensor) -> None:
        """Offload a gradient that was read again, unless something holds it.

        Its bytes are written anew: the script may have written to ``grad.data``, which no version counter shows.
        """
        if self.is_away(parameter):
            return
        grad = GRAD.__get__(parameter)
        if grad is None:
            return
        counts = references(grad)
        if self._may_leave(grad, counts):
            self._move(parameter, grad)

    def _accumulate(self, parameter: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Add a gradient to the offloaded one, as ``AccumulateGrad`` adds to a resident one."""
        old = self._bring_back(parameter)
        if torch.is_grad_enabled():  # the backward builds a graph (create_graph)
            old = old + new
            GRAD.__set__(parameter, old)
        else:
            old.add_(new)
        return old

    def _may_leave(self, grad: torch.Tensor, counts: Counts) -> bool:
        """Whether only the parameter holds a gradient, its storage describes it completely, and nobody has its address."""
        whole = type(grad) in PLAIN_TYPES and is_plain(grad) and not grad.requires_grad and grad.nbytes >= LEAST_BYTES
        return whole and counts == self._unheld and is_alone(grad) and grad.untyped_storage() not in self._addresses

    def is_away(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter's gradient is offloaded."""
        moved = self._away.get(id(parameter))
        return moved is not None and moved.parameter() is parameter

    def _bring_back(self, parameter: torch.Tensor) -> torch.Tensor:
        self._make_room(parameter.nbytes)
        grad = self._away.pop(id(parameter)).fetch()
        put_gradient(parameter, grad)
        return grad

    def _come_back(self, parameter: torch.Tensor) -> torch.Tensor:
        """Bring an offloaded gradient back; what a backward has left since is added.

        Usually :meth:`gradient_is_whole` has done that. A hook of the script's may run before it, and read, or raise.
        """
        new = GRAD.__get__(parameter)
        return self._bring_back(parameter) if new is None else self._accumulate(parameter, new)

    def _get(self, parameter: torch.Tensor) -> torch.Tensor | None:
        if is_held_here(self.lock):
            held: torch.Tensor | None = GRAD.__get__(parameter)
            return self._away[id(parameter)].fetch() if held is None and self.is_away(parameter) else held
        with self.lock:
            hidden = self.early.hides(parameter) or self._updating
            if self.is_away(parameter) and not hidden:
                before = None if self._read is None else self._read()
                if before is not None:
                    self._leave_again(before)
                self._read = weakref.ref(parameter)
                grad = self._come_back(parameter)
                self._fetched[grad.untyped_storage()._cdata] = self._read
                return grad
            found: torch.Tensor | None = GRAD.__get__(parameter)
            if found is None and self.early.is_read_from_outside():  # by who must see what the step must not
                return self._away[id(parameter)].fetch() if self.is_away(parameter) else self.early.resident(parameter)
            return found

    def _set(self, parameter: torch.Tensor, value: torch.Tensor | None) -> None:
        GRAD.__set__(parameter, value)
        self._forget(parameter)

    def _delete(self, parameter: torch.Tensor) -> None:
        GRAD.__delete__(parameter)
        self._forget(parameter)

    def _forget(self, parameter: torch.Tensor) -> None:
        with self.lock:
            if self.is_away(parameter):
                del self._away[id(parameter)]

    def _zeroing(self, original: Any) -> Any:
        @functools.wraps(original)
        def zero_grad(owner: Any, set_to_none: bool = True) -> Any:  # noqa: FBT002 - torch's own signature
            if set_to_none and self._away:  # an offloaded gradient need not be fetched to be dropped
                for parameter in owner.parameters() if isinstance(owner, torch.nn.Module) else parameters_of(owner):
                    self._forget(parameter)
            return original(owner, set_to_none)

        return zero_grad

    def _swapping(self, original: Any) -> Any:
        @functools.wraps(original)
        def swap_tensors(first: Any, second: Any) -> Any:
            """Swap two tensors, which may have no weak references; what is fetched stays until it is offloaded again."""
            for tensor in (first, second):
                if self.is_away(tensor):
                    self._come_back(tensor)
                self._fetched = {at: ref for at, ref in self._fetched.items() if ref() is not tensor}
                if self._read is not None and self._read() is tensor:
                    self._read = None
            return original(first, second)

        return swap_tensors

    def kind_of(self, parameter: torch.Tensor) -> tuple[str, torch.dtype] | None:
        """Device and data type of a parameter's gradient; None without one. The device of one that is not plain is empty."""
        with self.lock:
            if self.is_away(parameter):
                return parameter.device.type, self._away[id(parameter)].meta[3]
            grad = GRAD.__get__(parameter)
        if grad is None:
            return None
        return grad.device.type if type(grad) in PLAIN_TYPES and is_plain(grad) else "", grad.dtype

    def peek(self, parameter: torch.Tensor, buffer: Callable[[int], torch.Tensor]) -> torch.Tensor | None:
        """A parameter's gradient, to be read only.

        One that is offloaded stays so, and a copy is returned, where the tier allows in memory that ``buffer`` provides; it is
        valid until that is used again.
        """
        with self.lock:
            found: torch.Tensor | None = GRAD.__get__(parameter)
            if not self.is_away(parameter):
                return found
            if found is not None:
                return self._come_back(parameter)
            moved = self._away[id(parameter)]
            if not isinstance(moved.ticket, SlicedTicket):
                self._make_room(moved.bytes)
                return moved.fetch()
            memory = buffer(moved.bytes)
            moved.ticket.read(0, memory)
            return view_on(memory.untyped_storage(), moved.meta)

    def place_of(self, parameter: torch.Tensor) -> MovedValue | None:
        """Where a parameter's gradient is while it is offloaded."""
        return self._away[id(parameter)] if self.is_away(parameter) else None

    def updated(self, parameter: torch.Tensor) -> None:
        """A parameter was updated slice by slice: hide its gradient from the script's own step."""
        self.early.add(parameter)
        with self.lock:
            grad: torch.Tensor | None = GRAD.__get__(parameter)
            if grad is not None and not self.is_away(parameter):
                self.early.remains(parameter, grad)
                GRAD.__set__(parameter, None)

    # --- the step ----------------------------------------------------------------------------------------------------

    def waits(self, parameter: torch.Tensor, *, together: bool) -> bool:
        """Whether a parameter's gradient is offloaded as the step begins.

        It is fetched if all parameters are to be updated ``together``, or if a backward has left something since.
        """
        with self.lock:
            away = self.is_away(parameter)
            if away and (together or GRAD.__get__(parameter) is not None):
                self._come_back(parameter)
            return away

    def begin(self, parameter: torch.Tensor) -> None:
        """On an accelerator, whose copies overlap with its work, start to fetch a gradient."""
        if parameter.device.type != "cpu" and self.is_away(parameter):
            self._away[id(parameter)].ticket.begin()

    @contextlib.contextmanager
    def fetched_for_update(self, parameter: torch.Tensor) -> Iterator[torch.Tensor | None]:
        """Have an offloaded gradient resident for its parameter's update; None if it is not offloaded (any more)."""
        moved = self._away.get(id(parameter))
        if moved is None:
            yield None
            return
        grad = moved.fetch()
        with self.lock:
            self._updating = True
            put_gradient(parameter, grad)
        try:
            yield grad
            self.early.add(parameter)
        finally:
            with self.lock:
                GRAD.__set__(parameter, None)
                self._updating = False

    def written(self, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        """An update has written to a gradient: offload it anew, or leave it resident where that is not possible."""
        with beneath_autograd():
            ticket = self._put(grad.untyped_storage())
        if ticket is not None:
            self._away[id(parameter)] = _Moved(parameter, ticket, grad)
        else:
            self._forget(parameter)
            self.early.remains(parameter, grad)
