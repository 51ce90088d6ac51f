"""Callbacks for when a process forks that do not keep the objects alive whose methods they call."""

from __future__ import annotations

import weakref
from collections.abc import Callable


def weakly(method: Callable[[], None]) -> Callable[[], None]:
    """A bound method as a callback that does nothing once its object is gone.

    For ``os.register_at_fork``: the interpreter never drops what was registered there.
    """
    known = weakref.WeakMethod(method)

    def call() -> None:
        found = known()
        if found is not None:
            found()

    return call
