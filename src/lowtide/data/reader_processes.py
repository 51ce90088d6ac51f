"""Processes that read for this one, each within its memory, begun again where one ends."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import subprocess
import sys
import warnings
from collections import deque
from multiprocessing.connection import Connection
from typing import Any, Final, final

from lowtide.base.errors import ReaderError
from lowtide.base.units import format_bytes
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
class Readers:
    """The process that reads now and the one to come; of one process of the script."""

    def __init__(self, dataset: Any, bound: int, state: Any) -> None:
        """Start the first one.

        Args:
            dataset: what is read.
            bound: bytes that a process may take.
            state: of the generators with which it begins.
        """
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
