"""Functions of torch that are replaced by wrappers, and how they come back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from torch.jit import _builtins


@final
class Wraps:
    """Functions that were replaced by wrappers, and how they come back."""

    def __init__(self) -> None:
        """Nothing is replaced."""
        self._undo: list[Callable[[], object]] = []

    def put(self, owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
        """Replace ``owner.name`` by what ``wrapper`` makes of it."""
        former = vars(owner).get(name)
        setattr(owner, name, wrapper(getattr(owner, name)))
        self.also(lambda: delattr(owner, name) if former is None else setattr(owner, name, former))

    def put_operator(self, owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
        """The same of an operator of torch, which ``torch.jit.script`` is to take for itself."""
        original = getattr(owner, name)
        self.put(owner, name, wrapper)
        table = getattr(_builtins, "_get_builtin_table", dict[int, str])()
        wrapped = getattr(owner, name)
        if id(original) in table:
            table[id(wrapped)] = table[id(original)]
            self.also(lambda: table.pop(id(wrapped), None))

    def also(self, undo: Callable[[], object]) -> None:
        """Something else that is to be undone."""
        self._undo.append(undo)

    def undo(self) -> None:
        """Put all back, last first."""
        for undo in reversed(self._undo):
            undo()
        self._undo = []


def unwrapped(function: Any) -> Any:
    """A function as torch has it: the script's use of it is watched, ours is not."""
    return getattr(function, "__wrapped__", function)
