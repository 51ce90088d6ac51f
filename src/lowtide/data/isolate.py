"""Reading in a process of its own, replaced when it has grown: a reader that leaks cannot fill the script's memory."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any, Final, final

from lowtide.base.errors import ReaderError
from lowtide.base.units import format_bytes, parse_bytes
from lowtide.data.wire import Slot, fetch, generators, receive, send

AHEAD: Final = 2
"""Items that are read ahead while iterating."""
LENT: Final = 5
"""Items that the script may have as they lie in shared memory, without a copy; of more it gets copies."""
SPARE: Final = 0.8
"""Share of the bound from which on the next process is started, so that nobody waits for it."""
SOON, AGAIN = 10, 3
"""A process replaced after so few items, so many times in a row, is told of."""
ITEMS: Final = ("item", "items", "read", "following")
"""Requests that are for something of the data."""
TRIES: Final = 2
"""Processes that may die of one request."""


def isolate(dataset: Any, *, memory: int | str = "1GiB") -> Isolated:
    """Read a data set in a process of its own, replaced when its unique set size passes a bound.

    No sample is lost or doubled: a request that was not answered is asked again of the next process; an iteration goes on
    where it stood. Random numbers that samples draw go on from process to process.

    Args:
        dataset: a map-style ``Dataset`` (``__getitem__``), a `Source`, or something iterable with ``state_dict`` and
            ``load_state_dict`` (`Blocks`). It is sent by ``cloudpickle``: open files in it are not.
        memory: the bound, as ``"1GiB"`` or bytes.

    Raises:
        ReaderError: if it is an iterable whose position cannot be saved: it could not go on in another process.
    """
    return Isolated(dataset, parse_bytes(memory) if isinstance(memory, str) else memory)


@final
class _Process:
    """One reading process."""

    def __init__(self, dataset: Any) -> None:
        """Start it; it is not waited for."""
        ours, theirs = multiprocessing.Pipe()
        self.connection: Connection = ours
        self.slots = [Slot() for _ in range(AHEAD + 1 + LENT)]
        files = [theirs.fileno(), *(s.file for s in self.slots)]
        self._child = subprocess.Popen(  # noqa: S603 - this interpreter, our own module
            [sys.executable, "-m", "lowtide.data.worker", *map(str, files)],
            pass_fds=files,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        theirs.close()
        self._turn = 0
        self._ready = False
        self._asked: deque[int] = deque()
        self.unique = self.items = 0
        send(self.connection, None, sys.path)
        send(self.connection, self.slots[0], dataset)

    def wait(self) -> None:
        """Until it has the data.

        Raises:
            EOFError: if it died.
        """
        if not self._ready:
            receive(self.connection, self.slots[0])
            self._ready = True

    def ask(self, name: str, *arguments: Any) -> None:
        """Send a request."""
        self.wait()
        at = self._place()
        send(self.connection, None, (name, arguments, at))
        self._asked.append(at)
        self.items += name in ITEMS

    @property
    def waiting(self) -> int:
        """Requests that are not answered yet."""
        return len(self._asked)

    def _place(self) -> int:
        """The slot for the next answer: one that may be lent, if any is free; else one of which copies are taken."""
        for at in range(AHEAD + 1, len(self.slots)):
            if at not in self._asked and self.slots[at].free():
                return at
        self._turn = (self._turn + 1) % (AHEAD + 1)
        return self._turn

    def answer(self) -> Any:
        """The answer to the oldest request.

        Raises:
            EOFError: if it died.
            Exception: what the data set raised.
        """
        head, buffers = self._fetched()
        well, value, self.unique = pickle.loads(head, buffers=buffers)  # noqa: S301 - from our own process
        if well:
            return value
        error, text = value
        if error is None:
            raise ReaderError(f"the data set failed:\n{text}")
        error.add_note(f"In the process that reads:\n{text}")
        raise error

    def drop(self) -> None:
        """Pass over the answer to the oldest request, whatever it is.

        Raises:
            EOFError: if it died.
        """
        self._fetched()

    def _fetched(self) -> tuple[bytes, list[Any]]:
        """The oldest answer, taken off the line whatever it turns out to be."""
        at = self._asked[0]
        found = fetch(self.connection, self.slots[at], lent=at > AHEAD)
        self._asked.popleft()
        return found

    def gone(self) -> bool:
        """Whether it has ended."""
        try:
            self._child.wait(0.5)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """End it."""
        self.connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(0.2)
        self._child.kill()
        self._child.wait()
        for slot in self.slots:
            slot.close()


@final
class _Readers:
    """The process that reads now and the one to come; of one process of the script."""

    def __init__(self, dataset: Any, bound: int, state: Any) -> None:
        self.owner = os.getpid()
        self._dataset, self._bound = dataset, bound
        self.started = 0
        self.highest = 0
        self.dropped = 0
        self._soon = 0
        self._spare: _Process | None = None
        self.now = self._next(state)

    def _started(self) -> _Process:
        self.started += 1
        return _Process(self._dataset)

    def _next(self, state: Any) -> _Process:
        """The process that reads from now on, its generators as given."""
        for _ in range(TRIES):
            fresh, self._spare = self._spare or self._started(), None
            try:
                fresh.ask("restore", state)
                fresh.answer()
            except (EOFError, OSError):
                fresh.close()
            else:
                return fresh
        raise ReaderError(f"{TRIES} processes that were to read died before they had the data: is there memory for them?")

    def ask_once(self, name: str, *arguments: Any) -> Any:
        """Ask, and wait for the answer; of the next process, if this one dies of it or before.

        Raises:
            ReaderError: if they die again and again.
        """
        for _ in range(TRIES):
            try:
                while self.now.waiting:  # read ahead of an iteration: it will ask again
                    self.now.drop()
                    self.dropped += 1
                self.now.ask(name, *arguments)
                value = self.now.answer()
            except (EOFError, OSError):
                if not self.died():
                    raise
                continue
            if self.grown():
                self.replace()
            return value
        raise ReaderError(f"the process that reads died {TRIES} times of {name}{arguments}: is there memory for one read?")

    def died(self) -> bool:
        """Go on with another, if the process has gone; an error of the same type may be the data set's own."""
        if not self.now.gone():
            return False
        self.now.close()
        self.now = self._next(generators())
        return True

    def grown(self) -> bool:
        """Whether the process is past the bound; the next is started a little before."""
        self.highest = max(self.highest, self.now.unique)
        if self.now.unique > SPARE * self._bound and self._spare is None:
            self._spare = self._started()
        return self.now.unique > self._bound

    def replace(self) -> None:
        """Go on with a fresh process; nothing must be waiting for an answer.

        Raises:
            ReaderError: if it is past the bound already.
        """
        self.now.ask("random")
        state = self.now.answer()
        self.now.close()
        self._soon = self._soon + 1 if self.now.items <= SOON else 0
        before, self.now = self.now, self._next(state)
        if self._soon == AGAIN and self.now.unique <= self._bound:
            warnings.warn(
                f"the process that reads is replaced after every {before.items} items or so: from "
                f"{format_bytes(self.now.unique)} it grows past the {format_bytes(self._bound)} it may take: "
                "give isolate more memory",
                RuntimeWarning,
                stacklevel=2,
            )
        if self.now.unique > self._bound:
            raise ReaderError(
                f"a process that has read nothing yet takes {format_bytes(self.now.unique)}, more than the "
                f"{format_bytes(self._bound)} it may: give isolate(..., memory=...) more"
            )

    def close(self) -> None:
        """End them."""
        if self.owner != os.getpid():  # a fork's copy: they are the parent's
            return
        for process in (self.now, self._spare):
            if process is not None:
                process.close()


@final
class Isolated:
    """A data set that another process reads. Made by `isolate`.

    Attributes:
        memory_bytes: the bound.
    """

    def __init__(self, dataset: Any, memory_bytes: int) -> None:
        """Nothing runs before something is read."""
        self._positioned = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
        if not (hasattr(dataset, "__getitem__") or hasattr(dataset, "read") or self._positioned):
            raise ReaderError(
                f"{type(dataset).__name__} can only be iterated, and its position cannot be saved (no state_dict"
                "): another process could not go on where one stopped; use lowtide.data.Blocks, or a map-style data set"
            )
        self._dataset, self.memory_bytes = dataset, memory_bytes
        self._state: Mapping[str, Any] | None = None
        self._readers: _Readers | None = None
        self._finalizer: Any = None
        self._random: Any = None
        self._iteration = 0
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        """Without the processes."""
        return {**self.__dict__, "_readers": None, "_finalizer": None, "_lock": None}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """In another process, which starts readers of its own."""
        self.__dict__.update(state)
        self._lock = threading.RLock()

    def _line(self) -> _Readers:
        if self._readers is None or self._readers.owner != os.getpid():
            self._readers = _Readers(self._dataset, self.memory_bytes, self._random or generators())
            self._finalizer = weakref.finalize(self, self._readers.close)
        return self._readers

    def _ask(self, name: str, *arguments: Any) -> Any:
        with self._lock:
            return self._line().ask_once(name, *arguments)

    @property
    def started(self) -> int:
        """How many processes have been started."""
        return 0 if self._readers is None else self._readers.started

    @property
    def highest_bytes(self) -> int:
        """Highest unique set size seen of any."""
        return 0 if self._readers is None else self._readers.highest

    def close(self) -> None:
        """End the process; another is started if something is read again."""
        with self._lock:
            if self._readers is not None:
                self._finalizer()  # closes them, once
                self._readers = None

    def __len__(self) -> int:
        """Of the data set, told here: nothing is read for it."""
        return len(self._dataset)

    @property
    def sample_bytes(self) -> int:
        """Of one sample, where the data set is a `Source`."""
        return int(self._ask("sample_bytes"))

    def __getitem__(self, index: Any) -> Any:
        """One sample."""
        if not isinstance(index, slice) and hasattr(index, "__index__") and not -len(self) <= int(index) < len(self):
            raise IndexError(index)
        return self._ask("item", index)

    def __getitems__(self, indices: list[Any]) -> Any:
        """Several samples at once, as torch's loaders ask for them."""
        return self._ask("items", list(indices))

    def read(self, start: int, stop: int) -> Any:
        """A slice, where the data set is a `Source`."""
        return self._ask("read", start, stop)

    def state_dict(self) -> dict[str, Any]:
        """The position after the item that was given last; of a map-style data set, the reader's generators."""
        if self._positioned:
            return {"position": dict(self._dataset.state_dict() if self._state is None else self._state)}
        return {"random": self._random if self._readers is None else self._ask("random")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        if self._positioned:
            self._state = state["position"]
        else:
            self._random = state["random"]
            if self._readers is not None and self._random is not None:
                self._ask("restore", self._random)

    def __iter__(self) -> Iterator[Any]:
        """Items, read ahead. Left before its end, the next iteration begins as the data set's own would."""
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
                    raise ReaderError("this data set is iterated a second time before the first was over: isolate it twice")
                with self._lock:
                    ahead.go_on()
                if not ahead.read:
                    break
                item, self._state = ahead.read.popleft()
                yield item
            self._state, whole = ahead.at, True
        finally:
            if not whole and mine == self._iteration:
                with contextlib.suppress(Exception):  # the script has other things on its mind
                    self._state = self._ask("leave")


@final
class _Ahead:
    """Reads a few items ahead of an iteration."""

    def __init__(self, line: _Readers, at: Any) -> None:
        self._line, self.at = line, at
        self.read: deque[tuple[Any, Any]] = deque()
        self._going, self._begun, self._died, self._dropped = True, False, 0, line.dropped

    def go_on(self) -> None:
        """Ask for what is wanted, and take an answer, until there is one to be given or nothing more comes.

        Raises:
            ReaderError: if processes die again and again of the same item.
        """
        while self._going:
            try:
                self._exchange()
            except (EOFError, OSError):
                self._died += 1
                if not self._line.died():
                    raise
                if self._died >= TRIES:
                    raise ReaderError(f"the process that reads died {TRIES} times of the same item") from None
                self._begun = False
            if self.read:
                return

    def _exchange(self) -> None:
        line = self._line
        if self._dropped != line.dropped:  # something else was asked in between
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
        while line.now.waiting:  # asked for beyond the end
            line.now.drop()
