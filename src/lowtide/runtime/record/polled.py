"""Things that are looked at a few at a time, in turn, until something has happened to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic, TypeVar, final

MOST: Final = 64
"""Things looked at per operator."""

T = TypeVar("T")


@final
class Polled(Generic[T]):
    """Things that are waited for.

    Example:
        >>> waiting = Polled([1, 2, 3])
        >>> waiting.look(lambda number: number == 2)
        >>> sorted(waiting.items)
        [1, 3]
    """

    def __init__(self, items: list[T] | None = None) -> None:
        """Wait for these."""
        self.items: list[T] = [] if items is None else items
        self._at = 0

    def look(self, happened: Callable[[T], bool]) -> None:
        """Look at the next few of them, and wait no longer for those to which it has ``happened``."""
        items = self.items
        for _ in range(min(MOST, len(items))):
            self._at = self._at - 1 if 0 < self._at <= len(items) else len(items)
            if happened(items[self._at - 1]):
                items[self._at - 1] = items[-1]
                items.pop()
