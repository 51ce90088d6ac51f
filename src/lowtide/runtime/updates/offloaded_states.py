"""Offloads optimizer states between updates, and fetches each for its own parameter's update.

Adam's two moments take twice the bytes of the parameters, from the first update on, and are used only in the optimizer's step.
With this memory optimization they are on the offload tier for the rest of the time. The step updates one parameter at a time
(:mod:`lowtide.runtime.updates.offloaded_gradients`), and only that parameter's states are resident then. An optimizer whose
parameters cannot be updated one by one gets all its states back for its step, so that they are away only in the forward and
the backward.

An offloaded state leaves a placeholder in the parameter's dictionary. Nobody sees one: a property in place of
``Optimizer.state`` brings every state of the optimizer back, bit for bit, before it returns the dictionary, and torch's own
``state_dict``, ``load_state_dict``, pickling and copying read that attribute. What the script holds, a state, its storage, its
address, a parameter's dictionary or the dictionary of all, stays resident.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, final

from torch.optim import Optimizer

import torch
from lowtide.base.lever_catalogue import STATES
from lowtide.runtime.device.offload import Ticket
from lowtide.runtime.run_figures import LeverFigures
from lowtide.runtime.storage.views import meta_of
from lowtide.runtime.tensors import beneath_autograd, is_plain, states_of
from lowtide.runtime.torch_state import in_process_group
from lowtide.runtime.updates.gradient_access import Counts, is_alone, is_held_here, references
from lowtide.runtime.updates.moved_value import MovedValue, Offloading
from lowtide.runtime.updates.single_update import is_updating_one

LEAST_BYTES: Final = 4096
"""Smaller states (step counts, scalars) stay resident."""
_ATTRIBUTE: Final = "state"


@final
class Moved(MovedValue):
    """What is in a state's place in its parameter's dictionary while the state is offloaded."""

    __slots__ = ()

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        """A copy of the state: the script copies the dictionary past the property (``copy.deepcopy(vars(optimizer))``)."""
        return self.fetch()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the state."""
        return self.fetch().__reduce_ex__(protocol)


@final
class _Optimizers:
    """A set of optimizers, held weakly and told apart by identity; a signal's handler may change it at any moment."""

    def __init__(self) -> None:
        self._known: dict[int, weakref.ref[Any]] = {}

    def __contains__(self, optimizer: Any) -> bool:
        known = self._known.get(id(optimizer))
        return known is not None and known() is optimizer

    def __iter__(self) -> Iterator[Any]:
        return iter([optimizer for known in tuple(self._known.values()) if (optimizer := known()) is not None])

    def __bool__(self) -> bool:
        return bool(self._known)

    def add(self, optimizer: Any) -> None:
        self._known[id(optimizer)] = weakref.ref(optimizer)

    def discard(self, optimizer: Any) -> None:
        self._known.pop(id(optimizer), None)


@final
class OffloadedStates(Offloading):
    """The memory optimization, for all optimizers of a process."""

    def __init__(
        self, put: Callable[[torch.UntypedStorage], Ticket | None], make_room: Callable[[int], object] = lambda _: None
    ) -> None:
        """Offload nothing yet (see :class:`Offloading`)."""
        super().__init__(put, make_room)
        self._away, self._there, self._stay = _Optimizers(), _Optimizers(), _Optimizers()
        """Optimizers that may have states offloaded, whose states were all brought back since, and whose states stay."""
        self._holders = 0
        self._updating: Any = None

    # --- on and off --------------------------------------------------------------------------------------------------

    def engage(self, optimizers: Iterable[Any]) -> None:
        """Offload the states that there are, and from now on all states after each update."""
        self.engaged = True
        self._unheld, self._holders = _references_of_unheld(), _holders_of_unheld()
        self._wraps.put(Optimizer, _ATTRIBUTE, lambda _: property(self._get, self._set, self._delete))
        for optimizer in list(optimizers):
            self.leave(optimizer)

    def remove(self, *, over: bool) -> None:
        """Stop offloading, and fetch what is offloaded.

        Args:
            over: whether the script has ended, so that offloaded states need not be fetched.
        """
        self.engaged = False
        with contextlib.ExitStack() as stack:  # all of it is done, even if something raises
            stack.callback(self._wraps.undo)
            if not over:
                for optimizer in self._away:
                    stack.callback(self.bring_back, optimizer)

    def figures(self) -> list[LeverFigures]:
        """Figures of this memory optimization, for the summary; empty if there was nothing to do."""
        if not self.moved:
            return []
        return [LeverFigures(name=STATES, used=True, text=f"{self.moved} optimizer states were offloaded between updates")]

    # --- when states leave and come back ----------------------------------------------------------------------------

    def unit_begins(self) -> None:
        """Offload states that the script has read since they left."""
        if self.engaged:
            for optimizer in self._there:
                self.leave(optimizer)

    @staticmethod
    def movable_bytes(optimizers: Iterable[Any]) -> int:
        """Bytes of the resident states that are large enough to be offloaded, of some optimizers; those held are included."""
        states = (t for o in optimizers for state in states_of(o).values() if type(state) is dict for t in state.values())
        return sum(t.nbytes for t in states if type(t) is torch.Tensor and is_plain(t) and t.nbytes >= LEAST_BYTES)

    def optimizer_ends(self, optimizer: Any) -> None:
        """An optimizer's step returned: offload the states that it left resident."""
        if self.engaged:
            self.leave(optimizer)

    def exposed(self, storage: torch.UntypedStorage) -> None:
        """The script has a storage's address: a state on it stays resident."""
        self._addresses.add(storage)

    def leave(self, optimizer: Any) -> None:
        """Offload all states of an optimizer, but for those that the script holds."""
        with self.lock:
            for parameter in list(states_of(optimizer)):
                self._leave(optimizer, parameter)
            self._there.discard(optimizer)

    def stays(self, optimizer: Any) -> None:
        """An optimizer steps in compiled code, which is specialized to its states: they are resident from now on."""
        self._stay.add(optimizer)
        self.bring_back(optimizer)

    @contextlib.contextmanager
    def during_update(self, optimizer: Any, parameter: torch.Tensor) -> Iterator[None]:
        """Have one parameter's states resident for its update (:func:`update_one`), and offload them after it."""
        if optimizer in self._away:
            with self.lock:
                self._fetch([states_of(optimizer).get(parameter)])
        try:
            yield
        finally:
            if self.engaged:
                with self.lock:
                    self._leave(optimizer, parameter)

    @contextlib.contextmanager
    def while_updating(self, optimizer: Any) -> Iterator[None]:
        """Expect that the update of an optimizer's parameter offloads states itself."""
        outer, self._updating = self._updating, optimizer
        self._away.add(optimizer)
        try:
            yield
        finally:
            self._updating = outer

    def updated(self, optimizer: Any, parameter: Any) -> None:
        """A parameter was updated slice by slice: its states are offloaded, but for those that were resident, which leave."""
        with self.lock:
            self.moved += sum(type(value) is Moved for value in states_of(optimizer).get(parameter, {}).values())
            if self.engaged:
                self._leave(optimizer, parameter)

    def bring_back_all(self) -> None:
        """Fetch everything that is offloaded: code is about to run that may read states past the property."""
        for optimizer in self._away:
            self.bring_back(optimizer)

    def bring_back(self, optimizer: Any) -> None:
        """Fetch all states of an optimizer."""
        with self.lock:
            self._fetch(states_of(optimizer).values())
            if optimizer is not self._updating:
                self._away.discard(optimizer)
            self._there.add(optimizer)

    def _fetch(self, dictionaries: Iterable[Any]) -> None:
        found = [
            (state, name, moved) for state in dictionaries if isinstance(state, dict)
            for name, moved in state.items() if type(moved) is Moved
        ]
        for state, name, moved in found:
            self._make_room(moved.bytes)
            state[name] = moved.fetch()

    def _leave(self, optimizer: Any, parameter: Any) -> None:
        """Offload one parameter's states."""
        if in_process_group() or optimizer in self._stay:
            return
        states = states_of(optimizer)
        state = states.get(parameter)
        if type(state) is not dict or _holders(states, parameter) != self._holders:
            return
        if _holders(vars(optimizer), _ATTRIBUTE) != self._holders:
            return
        for name in list(state):
            tensor = state[name]
            if not isinstance(tensor, torch.Tensor):
                continue
            counts = references(tensor)
            if self._may_leave(tensor, counts):
                with beneath_autograd():
                    ticket = self._put(tensor.untyped_storage())
                if ticket is not None:
                    self._away.add(optimizer)
                    state[name] = Moved(ticket, meta_of(tensor), tensor.untyped_storage().nbytes())
                    self.moved += 1

    def may_leave(self, optimizer: Any, parameter: Any) -> bool:
        """Whether placeholders may stand for states of a parameter: nobody holds its dictionary, or that of all."""
        if not self.engaged or in_process_group() or optimizer in self._stay:
            return False
        states = states_of(optimizer)
        state = states.get(parameter)
        if state is not None and (type(state) is not dict or _holders(states, parameter) != self._holders):
            return False
        return _holders(vars(optimizer), _ATTRIBUTE) == self._holders

    def _may_leave(self, state: torch.Tensor, counts: Counts) -> bool:
        """Whether only its dictionary holds a state, its storage describes it completely, and nobody has its address."""
        whole = type(state) is torch.Tensor and is_plain(state) and not (state.requires_grad or state.is_inference())
        unheld = counts == self._unheld and is_alone(state) and state.untyped_storage() not in self._addresses
        return whole and unheld and state.nbytes >= LEAST_BYTES

    # --- the property in place of ``Optimizer.state`` ------------------------------------------------------------------

    def _get(self, optimizer: Any) -> Any:
        try:
            states = vars(optimizer)[_ATTRIBUTE]
        except KeyError:
            raise AttributeError(f"{type(optimizer).__name__!r} object has no attribute {_ATTRIBUTE!r}") from None
        if self._away and not is_updating_one(optimizer):
            if is_held_here(self.lock):
                return _fetched(states)
            for owner in self._away:  # usually one; another may have the same dictionary
                if owner is optimizer or vars(owner).get(_ATTRIBUTE) is states:
                    self.bring_back(owner)
        return states

    @staticmethod
    def _set(optimizer: Any, states: Any) -> None:
        vars(optimizer)[_ATTRIBUTE] = states

    @staticmethod
    def _delete(optimizer: Any) -> None:
        try:
            del vars(optimizer)[_ATTRIBUTE]
        except KeyError:
            raise AttributeError(_ATTRIBUTE) from None


def _fetched(states: Any) -> Any:
    """Copies of all states by parameter, for a signal's handler that interrupts while states leave or come back."""
    found = copy.copy(states)
    for parameter, state in states.items():
        if isinstance(state, dict):
            found[parameter] = {name: value.fetch() if type(value) is Moved else value for name, value in state.items()}
    return found


def _holders(table: Any, key: Any) -> int:
    """Reference count of a table's entry; comparable only between callers that hold the entry by as many variables."""
    item = table[key]
    return sys.getrefcount(item)


def _holders_of_unheld() -> int:
    """What :func:`_holders` returns for an entry that nothing holds but its table, and one variable of the caller."""
    table: dict[str, Any] = {"": {}}
    entry = table[""]
    count = _holders(table, "")
    del entry
    return count


def _references_of_unheld() -> Counts:
    """What :func:`references` returns for a state held only by its dictionary and by one variable of the caller."""
    with beneath_autograd():
        held = {"": torch.empty(1)}
    tensor = held[""]
    return references(tensor)
