"""Items that recorders look at before every operator: saved tensors with other owners, and those that a node has unpacked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar, final

from lowtide.runtime.intercept.inplace_accumulation import graph_task, running

MOST: Final = 64
"""Maximum number of items polled per call, which is per operator, unless a caller asks for fewer."""

T = TypeVar("T")


@final
class Polled(Generic[T]):
    """Items that are polled in turn.

    Example:
        >>> waiting = Polled([1, 2, 3])
        >>> waiting.look(lambda number: number == 2)
        >>> sorted(waiting.items)
        [1, 3]
    """

    def __init__(self, items: list[T] | None = None, most: int = MOST) -> None:
        """Poll these items, at most ``most`` of them per call; the list is used as it is, not copied."""
        self.items: list[T] = [] if items is None else items
        self._most = most
        self._at = 0

    def look(self, happened: Callable[[T], bool]) -> None:
        """Poll the next items, and remove those for which ``happened`` is true."""
        items = self.items
        for _ in range(min(self._most, len(items))):
            self._at = self._at - 1 if 1 < self._at <= len(items) else len(items)
            if happened(items[self._at - 1]):
                items[self._at - 1] = items[-1]
                items.pop()


@dataclass(slots=True, eq=False)
class _OpenNeed(Generic[T]):
    """What was unpacked, the sequence number of the node that did it, and the graph task in which that node runs."""

    item: T
    node: int
    task: int

    def has_ended(self, node: int, task: int) -> bool:
        """Whether its node has ended, given that ``node`` runs in ``task`` now.

        A backward within a node runs in a task of its own, with a higher number; the outer node is still running then.
        """
        return self.task >= task and (self.node, self.task) != (node, task)


@final
class OpenNeeds(Generic[T]):
    """Items that nodes have unpacked, until their nodes have ended and nothing that the nodes passed them to holds them."""

    def __init__(self, is_held: Callable[[T], bool], ended: Callable[[T], None]) -> None:
        """Start with none.

        Args:
            is_held: whether something besides autograd and Lowtide holds an item whose node has ended.
            ended: called with each item that nothing holds any more.
        """
        self._is_held, self._ended = is_held, ended
        self._open: list[_OpenNeed[T]] = []

    def add(self, item: T) -> None:
        """Note that the running node has unpacked an item."""
        self._open.append(_OpenNeed(item, running(), graph_task()))

    def discard(self, is_gone: Callable[[T], bool]) -> None:
        """Stop watching the items for which ``is_gone`` is true."""
        self._open = [need for need in self._open if not is_gone(need.item)]

    def look(self) -> None:
        """Look for nodes that have ended since the last call; to be called before each operator and backward."""
        if not self._open:
            return
        node, task = running(), graph_task()
        still = []
        for need in self._open:
            if not need.has_ended(node, task) or self._is_held(need.item):
                still.append(need)
            else:
                self._ended(need.item)
        self._open = still
