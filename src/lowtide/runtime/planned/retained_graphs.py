"""Watches writes that replays depend on while no unit is followed: in planned backwards, and for retained graphs."""

from __future__ import annotations

from typing import Any, Protocol, final

import torch
from lowtide.runtime.intercept.dispatch_mode import Mode, call_under, leaves_autograd_on, make_way
from lowtide.runtime.intercept.inplace_accumulation import in_place
from lowtide.runtime.planned.mode import PlannedMode
from lowtide.runtime.storage.arguments import PLAIN_TYPES, written_by
from lowtide.runtime.storage.op_schema import info_of


class WriteListener(Protocol):
    """Something that must be told of a write before it happens."""

    def will_write(self, tensor: torch.Tensor) -> None:
        """A tensor is about to be written."""

    def has_served(self, storage: torch.UntypedStorage) -> bool:
        """Whether autograd got a storage for a saved tensor."""


@final
class RetainedGraphs:
    """Planned units that have ended, but whose saved tensors autograd may still ask for: the script retains their graphs.

    Attributes:
        updating: whether an optimizer is making the current writes.
    """

    def __init__(self) -> None:
        """Start with no units."""
        self.updating = False
        self._units: list[PlannedMode] = []

    def add(self, unit: PlannedMode) -> None:
        """Add a unit that has ended, if autograd may still ask for values of it."""
        if unit.owes():
            self._units.append(unit)

    def hold_all(self) -> None:
        """Rematerialize and keep what autograd may still ask for, because later writes are not observed."""
        for unit in self._units:
            unit.hold_all()

    def left(self) -> bool:
        """Whether there are any units; forgets those that autograd has released."""
        self._units = [unit for unit in self._units if unit.owes()]
        return bool(self._units)

    def has_served(self, storage: torch.UntypedStorage) -> bool:
        """Whether autograd got a storage for a saved tensor of one of these units."""
        return any(unit.has_served(storage) for unit in self._units)

    def will_write(self, tensor: torch.Tensor) -> None:
        """A tensor is about to be written: rematerialize and keep everything whose replay reads it.

        Not so for an optimizer's parameters: that would keep whole graphs, which are hardly ever used again. Instead, replays
        that read a parameter raise from then on.
        """
        for unit in self._units:
            if self.updating:
                unit.spoil(tensor)
            else:
                unit.will_write(tensor)


@final
class WriteMode(Mode):
    """Dispatch mode that reports writes where no unit is followed, but replays may still read what is written.

    It is on in a planned backward in which the script's code may run (hooks, custom functions), and beside retained graphs.
    """

    def __init__(self, *write_listeners: WriteListener) -> None:
        """Report writes to these listeners."""
        super().__init__()
        self._write_listeners = write_listeners

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Report what an operator writes, then run it, in place where the plain run does."""
        if types and not PLAIN_TYPES.issuperset(types):
            return make_way(func, types, args, kwargs)
        if leaves_autograd_on(func):
            return call_under(self, func, args, kwargs)
        func = self._as_without_mode(func, in_place(func, args), args)
        info = info_of(func)
        if info.writes_at:
            for tensor, _ in written_by(info, args, kwargs or {}):
                for listener in self._write_listeners:
                    listener.will_write(tensor)
        return func(*args, **(kwargs or {}))

    def _as_without_mode(self, func: Any, found: Any, args: Any) -> Any:
        """The operator that the plain run calls here, given the one that reference counts speak for.

        A gradient may be a saved tensor (a ``Function`` returned it). Without Lowtide autograd would hold that one, too.
        """
        if found is func:
            return func
        storage = args[0].untyped_storage()
        return func if any(listener.has_served(storage) for listener in self._write_listeners) else found
