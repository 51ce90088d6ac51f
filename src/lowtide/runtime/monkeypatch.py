"""Replaces functions of torch by wrappers, restores them, and lifts all wrappers while a compiler traces."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

from torch.jit import _builtins


@dataclass(frozen=True, slots=True, eq=False)
class _Patch:
    """One replaced attribute.

    Attributes:
        former: the owner's own attribute of that name before; None if the owner inherited it.
        wrapper: the attribute now.
    """

    owner: Any
    name: str
    former: Any
    wrapper: Any

    def lift(self) -> None:
        """Restore the former attribute."""
        if self.former is None:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.former)


_ON: list[_Patch] = []
"""All attributes of torch that are replaced now, in the order of replacement. A global, as torch itself is one per process."""


@final
class Wraps:
    """A set of wrappers that are put on one by one and undone together."""

    def __init__(self) -> None:
        """Replace nothing yet."""
        self._undo: list[Callable[[], object]] = []

    def put(self, owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
        """Replace ``owner.name`` by ``wrapper(owner.name)``; an attribute that is not there yet is None."""
        former = vars(owner).get(name)
        setattr(owner, name, wrapper(getattr(owner, name, None)))
        patch = _Patch(owner, name, former, vars(owner).get(name))
        _ON.append(patch)

        def undo() -> None:
            _ON.remove(patch)
            patch.lift()

        self.also(undo)

    def put_operator(self, owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
        """Like :meth:`put`, for an operator of torch: ``torch.jit.script`` treats the wrapper as the operator itself."""
        original = getattr(owner, name)
        self.put(owner, name, wrapper)
        table = getattr(_builtins, "_get_builtin_table", dict[int, str])()
        wrapped = getattr(owner, name)
        if id(original) in table:
            table[id(wrapped)] = table[id(original)]
            self.also(lambda: table.pop(id(wrapped), None))

    def also(self, undo: Callable[[], object]) -> None:
        """Register another action that :meth:`undo` calls."""
        self._undo.append(undo)

    def undo(self) -> None:
        """Restore everything, in reverse order."""
        for undo in reversed(self._undo):
            undo()
        self._undo = []


@contextlib.contextmanager
def lifted() -> Iterator[None]:
    """Lift all wrappers while a compiler traces the script: it must not see a frame of Lowtide.

    An attribute that the script has since replaced, on top of Lowtide's wrapper, stays as it is.
    """
    found = [patch for patch in reversed(_ON) if vars(patch.owner).get(patch.name) is patch.wrapper]
    covered = [patch for patch in reversed(_ON) if patch not in found]
    for patch in covered:  # covered by another wrapper of ours, which is lifted first
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
    """The function behind a wrapper: only the script's calls are watched, not Lowtide's own."""
    return getattr(function, "__wrapped__", function)
