"""Reader process of `isolate`: ``python -m lowtide.data.worker CONNECTION SLOT...`` (file descriptors)."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Generator, Iterator
from multiprocessing.connection import Connection
from typing import Any, Final

from lowtide.checkpoint.parts import set_random_state
from lowtide.data.wire import Slot, generators, receive, send
from lowtide.probe.counters import Shares
from lowtide.probe.marks import WhenImported

COST: Final = 50
"""Reading the unique set size makes the kernel walk all pages, so it may take at most one fiftieth of the running time."""


def main() -> None:
    """Answer requests until the other end closes the connection."""
    connection = Connection(int(sys.argv[1]))
    slots = [Slot(int(file)) for file in sys.argv[2:]]
    sys.path[:] = receive(connection, None)
    reader = _Reader(receive(connection, slots[0]))
    size, own = Shares(COST), (os.getpid(),)
    send(connection, slots[0], None)
    while True:
        try:
            name, arguments, at = receive(connection, None)
        except (EOFError, OSError):
            return
        slots[at].begin()
        try:
            reader.answers_in(slots[at])
            value: Any = (True, getattr(reader, name)(*arguments))
        except BaseException as error:
            value = (False, _told(error))
        try:
            send(connection, slots[at], (*value, size.read(own)[0]))
        except OSError:
            return
        except Exception as error:  # the answer cannot be pickled, or the slot has no room for it
            send(connection, slots[at], (False, _told(error), size.read(own)[0]))
        del value


def _told(error: BaseException) -> tuple[BaseException | None, str]:
    """The error and its traceback as text; None in place of an error that cannot be pickled."""
    import pickle

    text = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - our own pickle
    except Exception:
        return None, text
    return error, text


class _Reader:
    """Serves the requests of the script's process; a request names one of the methods."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._iterator: Iterator[Any] | None = None
        self._torch: dict[str, Any] = {}

    def answers_in(self, slot: Slot) -> None:
        """Have `Blocks` allocate its batches in the slot, which saves a copy; other data sets are left alone."""
        blocks = sys.modules.get("lowtide.data.blocks")
        if blocks is not None and isinstance(self._dataset, blocks.Blocks):
            self._dataset.allocate = slot.array

    def item(self, index: Any) -> Any:
        """One sample."""
        return self._dataset[index]

    def items(self, indices: list[Any]) -> Any:
        """Several samples."""
        several: Callable[[list[Any]], Any] | None = getattr(self._dataset, "__getitems__", None)
        return several(indices) if several is not None else [self._dataset[i] for i in indices]

    def sample_bytes(self) -> int:
        """Bytes of one sample of a source."""
        return int(self._dataset.sample_bytes)

    def read(self, start: int, stop: int) -> Any:
        """Samples ``start`` to ``stop`` of a source."""
        return self._dataset.read(start, stop)

    def begin(self, state: Any) -> None:
        """Begin to iterate, from a saved position if ``state`` is one."""
        if state is not None:
            self._dataset.load_state_dict(state)
        self._iterator = iter(self._dataset)

    def following(self) -> tuple[bool, Any, Any]:
        """Whether there is another item, the item, and the position after it."""
        assert self._iterator is not None
        for item in self._iterator:
            return True, item, self._dataset.state_dict()
        return False, None, self._dataset.state_dict()

    def leave(self) -> Any:
        """End the iteration early; returns the position at which the next one begins."""
        if isinstance(self._iterator, Generator):
            self._iterator.close()
        self._iterator = None
        return self._dataset.state_dict()

    def random(self) -> Any:
        """States of the random generators; torch's is the one given to `restore` if the data set has not imported torch."""
        found = generators()
        return found if "torch" in found else {**found, **self._torch}

    def restore(self, state: Any) -> None:
        """Set the states of the random generators; torch's waits until the data set imports torch, and does not import it."""
        set_random_state({key: value for key, value in state.items() if key != "torch"})
        self._torch = {key: value for key, value in state.items() if key == "torch"}
        if self._torch:
            WhenImported("torch", lambda torch: torch.set_rng_state(torch.from_numpy(self._torch["torch"])))


if __name__ == "__main__":
    main()
