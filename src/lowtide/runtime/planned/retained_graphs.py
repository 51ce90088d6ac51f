"""Who must know of writes where no unit is followed: planned backwards, and graphs that a script retains."""

from __future__ import annotations

from typing import Any, Protocol, final

import torch
from lowtide.runtime.intercept.dispatch_mode import Mode, make_way
from lowtide.runtime.planned.mode import PlannedMode
from lowtide.runtime.storage.arguments import PLAIN_TYPES, written_by
from lowtide.runtime.storage.op_schema import info_of


class WriteListener(Protocol):
    """Who must know of writes beforehand."""

    def will_write(self, tensor: torch.Tensor) -> None:
        """Somebody is about to write to a tensor."""


@final
class RetainedGraphs:
    """Planned units that ended while autograd may still ask for what they saved: graphs that a script retains.

    Attributes:
        updating: whether it is an optimizer that writes.
    """

    def __init__(self) -> None:
        """None is left."""
        self.updating = False
        self._units: list[PlannedMode] = []

    def add(self, unit: PlannedMode) -> None:
        """A unit ended."""
        if unit.owes():
            self._units.append(unit)

    def hold_all(self) -> None:
        """Nobody looks on any more."""
        for unit in self._units:
            unit.hold_all()

    def left(self) -> bool:
        """Whether there are any; those that owe nothing any more are forgotten."""
        self._units = [unit for unit in self._units if unit.owes()]
        return bool(self._units)

    def will_write(self, tensor: torch.Tensor) -> None:
        """Somebody is about to write to a tensor: what is made from it is made now.

        An optimizer's parameters apart: to keep what is made from those would hold whole graphs that hardly anybody asks for
        again. Nothing is made from them any more.
        """
        for unit in self._units:
            if self.updating:
                unit.spoil(tensor)
            else:
                unit.will_write(tensor)


@final
class WriteMode(Mode):
    """Looks on where no unit is followed but replays may still come: may what runs there write to what they read?

    In a planned backward in which code of the script may run (hooks, custom functions), and beside retained graphs.
    """

    def __init__(self, *write_listeners: WriteListener) -> None:
        """Tell these of writes."""
        super().__init__()
        self._write_listeners = write_listeners

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One operator."""
        if types and not PLAIN_TYPES.issuperset(types):
            return make_way(func, types, args, kwargs)
        info = info_of(func)
        if info.writes_at:
            for tensor, _ in written_by(info, args, kwargs or {}):
                for listener in self._write_listeners:
                    listener.will_write(tensor)
        return func(*args, **(kwargs or {}))
