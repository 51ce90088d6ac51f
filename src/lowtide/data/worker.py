"""The process that reads for `isolate`: ``python -m lowtide.data.worker CONNECTION SLOT...`` (descriptors)."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, Final

from lowtide.checkpoint.parts import random_state, set_random_state
from lowtide.data.wire import Slot, receive, send
from lowtide.probe.counters import set_sizes

COST: Final = 50
"""The unique set size, for which the kernel walks all pages, is read no more often than costs a fiftieth of the time."""


def main() -> None:
    """Answer requests until the other end goes."""
    connection = Connection(int(sys.argv[1]))
    slots = [Slot(int(file)) for file in sys.argv[2:]]
    sys.path[:] = connection.recv()
    reader = _Reader(receive(connection, slots[0]))
    turn = 0
    unique, following = 0, 0.0
    send(connection, slots[0], None)
    while True:
        try:
            name, arguments = connection.recv()
        except (EOFError, OSError):
            return
        try:
            value: Any = (True, getattr(reader, name)(*arguments))
        except BaseException as error:
            value = (False, _told(error))
        now = time.monotonic()
        if now >= following:
            unique = set_sizes(os.getpid())[0]
            following = time.monotonic() + COST * (time.monotonic() - now)
        try:
            send(connection, slots[turn], (*value, unique))
        except (BrokenPipeError, OSError):
            return
        del value
        turn = (turn + 1) % len(slots)


def _told(error: BaseException) -> tuple[BaseException | None, str]:
    """An error and its traceback as text; the error itself only where it can be sent."""
    import pickle

    text = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - what was just made
    except Exception:
        return None, text
    return error, text


class _Reader:
    """What can be asked."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._iterator: Iterator[Any] | None = None

    def item(self, index: Any) -> Any:
        """One sample."""
        return self._dataset[index]

    def items(self, indices: list[Any]) -> Any:
        """Several samples."""
        several: Callable[[list[Any]], Any] | None = getattr(self._dataset, "__getitems__", None)
        return several(indices) if several is not None else [self._dataset[i] for i in indices]

    def sample_bytes(self) -> int:
        """Of one sample of a source."""
        return int(self._dataset.sample_bytes)

    def read(self, start: int, stop: int) -> Any:
        """A slice of a source."""
        return self._dataset.read(start, stop)

    def begin(self, state: Any) -> None:
        """Begin to iterate, from a position."""
        if state is not None:
            self._dataset.load_state_dict(state)
        self._iterator = iter(self._dataset)

    def following(self) -> tuple[bool, Any, Any]:
        """Whether there is another item, the item, and the position after it."""
        assert self._iterator is not None
        for item in self._iterator:
            return True, item, self._dataset.state_dict()
        return False, None, self._dataset.state_dict()

    def random(self) -> Any:
        """The states of the generators."""
        return random_state()

    def restore(self, state: Any) -> None:
        """Go on with these."""
        set_random_state(state)


if __name__ == "__main__":
    main()
