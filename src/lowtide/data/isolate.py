"""Reads data in a separate process that is replaced as it grows: a leak cannot fill the script's memory."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, final

from lowtide.base.errors import ReaderError
from lowtide.base.units import parse_bytes
from lowtide.data.reader_processes import AHEAD, TRIES, Readers
from lowtide.data.wire import generators


def isolate(dataset: Any, *, memory: int | str = "1GiB") -> Isolated:
    """Read a data set in a separate process, which is replaced when its unique set size exceeds a bound.

    No sample is lost or duplicated: a request without an answer is sent again to the next process, and an iteration
    continues where it stood. The random generators that samples draw from continue from process to process.

    Args:
        dataset: a map-style ``Dataset`` (``__getitem__``), a `Source`, or an iterable with ``state_dict`` and
            ``load_state_dict`` (`Blocks`). It is pickled with ``cloudpickle``, which cannot carry open files over.
        memory: the bound, as ``"1GiB"`` or in bytes.

    Raises:
        ReaderError: if the data set can only be iterated and its position cannot be saved: another process could not
            continue it.
    """
    return Isolated(dataset, parse_bytes(memory) if isinstance(memory, str) else memory)


@final
class Isolated:
    """A data set that another process reads. Made by `isolate`.

    Attributes:
        memory_bytes: bound on the unique set size of that process.
    """

    def __init__(self, dataset: Any, memory_bytes: int) -> None:
        """Start no process yet: the first read does."""
        self._positioned = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
        if not (hasattr(dataset, "__getitem__") or hasattr(dataset, "read") or self._positioned):
            raise ReaderError(
                f"{type(dataset).__name__} can only be iterated, and its position cannot be saved (no state_dict"
                "), so that a fresh process could not resume it: use lowtide.data.Blocks, or a map-style data set"
            )
        self._dataset, self.memory_bytes = dataset, memory_bytes
        self._state: Mapping[str, Any] | None = None
        self._readers: Readers | None = None
        self._finalizer: Any = None
        self._random: Any = None
        self._iteration = 0
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        """The state without the reader processes."""
        return {**self.__dict__, "_readers": None, "_finalizer": None, "_lock": None}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Restore in another process, which starts its own readers."""
        self.__dict__.update(state)
        self._lock = threading.RLock()

    def _line(self) -> Readers:
        if self._readers is None or self._readers.owner != os.getpid():
            self._readers = Readers(self._dataset, self.memory_bytes, self._random or generators())
            self._finalizer = weakref.finalize(self, self._readers.close)
        return self._readers

    def _ask(self, name: str, *arguments: Any) -> Any:
        with self._lock:
            return self._line().ask_once(name, *arguments)

    @property
    def started(self) -> int:
        """Number of processes started since the first read, or since the first one after `close`."""
        return 0 if self._readers is None else self._readers.started

    @property
    def highest_bytes(self) -> int:
        """Highest unique set size seen in any of these processes."""
        return 0 if self._readers is None else self._readers.highest

    def close(self) -> None:
        """End the process; the next read starts another."""
        with self._lock:
            if self._readers is not None:
                self._finalizer()  # calls Readers.close, at most once
                self._readers = None

    def __len__(self) -> int:
        """Length of the data set, taken from the copy in this process without asking a reader."""
        return len(self._dataset)

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample, if the data set is a `Source`."""
        return int(self._ask("sample_bytes"))

    def __getitem__(self, index: Any) -> Any:
        """One sample."""
        if not isinstance(index, slice) and hasattr(index, "__index__") and not -len(self) <= int(index) < len(self):
            raise IndexError(index)
        return self._ask("item", index)

    def __getitems__(self, indices: list[Any]) -> Any:
        """Several samples at once, as torch's loaders request them."""
        return self._ask("items", list(indices))

    def read(self, start: int, stop: int) -> Any:
        """Samples ``start`` to ``stop``, if the data set is a `Source`."""
        return self._ask("read", start, stop)

    def state_dict(self) -> dict[str, Any]:
        """The position after the last item yielded; for a map-style data set, the states of the reader's random generators."""
        if self._positioned:
            return {"position": dict(self._dataset.state_dict() if self._state is None else self._state)}
        return {"random": self._random if self._readers is None else self._ask("random")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state_dict` returned."""
        if self._positioned:
            self._state = state["position"]
        else:
            self._random = state["random"]
            if self._readers is not None and self._random is not None:
                self._ask("restore", self._random)

    def __iter__(self) -> Iterator[Any]:
        """Items, read ahead. After an iteration is left early, the next one begins where the data set's own would."""
        if not self._positioned:
            for i in range(len(self)):
                yield self[i]
            return
        self._iteration += 1
        mine = self._iteration
        ahead = _Ahead(self._line(), self._state)
        whole = False
        try:
            while True:
                if mine != self._iteration:
                    raise ReaderError("this data set is iterated again before the first iteration is over: isolate it twice")
                with self._lock:
                    ahead.go_on()
                if not ahead.read:
                    break
                item, self._state = ahead.read.popleft()
                yield item
            self._state, whole = ahead.at, True
        finally:
            if not whole and mine == self._iteration:
                with contextlib.suppress(Exception):  # must not hide the script's own error
                    self._state = self._ask("leave")


@final
class _Ahead:
    """Reads a few items ahead of an iteration."""

    def __init__(self, line: Readers, at: Any) -> None:
        self._line, self.at = line, at
        self.read: deque[tuple[Any, Any]] = deque()
        self._going, self._begun, self._died, self._dropped = True, False, 0, line.dropped

    def go_on(self) -> None:
        """Send requests and take answers until an item is ready or the data set is exhausted.

        Raises:
            ReaderError: if `TRIES` processes in a row die while reading the same item.
        """
        while self._going:
            try:
                self._exchange()
            except (EOFError, OSError):
                self._died += 1
                if not self._line.died():
                    raise
                if self._died >= TRIES:
                    raise ReaderError(
                        f"the reading process died {TRIES} times at the same item: check that there is memory for it"
                    ) from None
                self._begun = False
            if self.read:
                return

    def _exchange(self) -> None:
        line = self._line
        if self._dropped != line.dropped:  # another request dropped the answers that were waiting
            self._begun, self._dropped = False, line.dropped
        if not self._begun:
            line.ask_once("begin", self.at)
            self._begun, self._dropped = True, line.dropped
        if not line.grown():
            while line.now.waiting < AHEAD:
                line.now.ask("following")
        if not line.now.waiting:
            line.replace()
            self._begun = False
            return
        more, item, after = line.now.answer()
        self._died, self.at = 0, after
        if more:
            self.read.append((item, after))
            return
        self._going = False
        while line.now.waiting:  # requests sent beyond the end
            line.now.drop()
