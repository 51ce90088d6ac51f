"""Functions of torch that are replaced by wrappers, how they come back, and how they are all lifted for a compiler."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

from torch.jit import _builtins


@dataclass(frozen=True, slots=True, eq=False)
class _Patch:
    """One attribute that was replaced.

    Attributes:
        former: what the owner itself had under that name; None where it inherited it.
        wrapper: what it has now.
    """

    owner: Any
    name: str
    former: Any
    wrapper: Any

    def lift(self) -> None:
        """Put back what was there."""
        if self.former is None:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.former)


_ON: list[_Patch] = []
"""Every attribute of torch that is replaced now, in the order in which that was done: torch itself is one per process, too."""


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
        patch = _Patch(owner, name, former, vars(owner).get(name))
        _ON.append(patch)

        def undo() -> None:
            _ON.remove(patch)
            patch.lift()

        self.also(undo)

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


@contextlib.contextmanager
def lifted() -> Iterator[None]:
    """Torch as it is without Lowtide, while a compiler traces the script: it must not see a frame of ours.

    What the script has replaced since, over a wrapper of ours, stays.
    """
    found = [patch for patch in reversed(_ON) if vars(patch.owner).get(patch.name) is patch.wrapper]
    covered = [patch for patch in reversed(_ON) if patch not in found]
    for patch in covered:  # beneath another wrapper of ours, which is lifted first
        if any(p.owner is patch.owner and p.name == patch.name for p in found):
            found.append(patch)
    for patch in found:
        patch.lift()
    try:
        yield
    finally:
        for patch in reversed(found):
            setattr(patch.owner, patch.name, patch.wrapper)


def unwrapped(function: Any) -> Any:
    """A function as torch has it: the script's use of it is watched, ours is not."""
    return getattr(function, "__wrapped__", function)
