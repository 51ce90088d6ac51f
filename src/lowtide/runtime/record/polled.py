"""Polls a list of items in turn, a few at a time, until a condition holds for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic, TypeVar, final

MOST: Final = 64
"""Maximum number of items polled per call, which is per operator."""

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

    def __init__(self, items: list[T] | None = None) -> None:
        """Poll these items; the list is used as it is, not copied."""
        self.items: list[T] = [] if items is None else items
        self._at = 0

    def look(self, happened: Callable[[T], bool]) -> None:
        """Poll the next items, at most :data:`MOST`, and remove those for which ``happened`` is true."""
        items = self.items
        for _ in range(min(MOST, len(items))):
            self._at = self._at - 1 if 0 < self._at <= len(items) else len(items)
            if happened(items[self._at - 1]):
                items[self._at - 1] = items[-1]
                items.pop()
