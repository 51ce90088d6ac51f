"""Reader processes for one process of the script: each within a memory bound, replaced when it grows or dies."""

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
"""Items read ahead while iterating."""
LENT: Final = 5
"""Items that the script may hold directly in shared memory; further ones are copied."""
SPARE: Final = 0.8
"""Share of the bound at which the next process is started, so that the switch causes no wait."""
SOON, AGAIN = 10, 3
"""Warn when processes are replaced after at most `SOON` items, `AGAIN` times in a row."""
ITEMS: Final = ("item", "items", "read", "following")
"""Requests that read data, which count as items."""
TRIES: Final = 2
"""Number of processes that may die on one request."""


@final
class _Process:
    """One reader process."""

    def __init__(self, dataset: Any) -> None:
        """Start it without waiting for it."""
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
        """Wait until it has received the data set.

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
        """Number of requests not answered yet."""
        return len(self._asked)

    def _place(self) -> int:
        """Slot for the next answer: a free one whose arrays can be lent, else the next of those whose arrays are copied."""
        for at in range(AHEAD + 1, len(self.slots)):
            if at not in self._asked and self.slots[at].free():
                return at
        self._turn = (self._turn + 1) % (AHEAD + 1)
        return self._turn

    def answer(self) -> Any:
        """Wait for the answer to the oldest request.

        Raises:
            EOFError: if the process died.
            ReaderError: if the data set raised an error that cannot be pickled.
            Exception: any other error that the data set raised.
        """
        head, buffers = self._fetched()
        well, value, self.unique = pickle.loads(head, buffers=buffers)  # noqa: S301 - from our own process
        if well:
            return value
        error, text = value
        if error is None:
            raise ReaderError(f"the data set failed:\n{text}")
        error.add_note(f"In the reading process:\n{text}")
        raise error

    def drop(self) -> None:
        """Discard the answer to the oldest request, whatever it is.

        Raises:
            EOFError: if the process died.
        """
        self._fetched()

    def _fetched(self) -> tuple[bytes, list[Any]]:
        """Receive the oldest answer and remove its request from the queue, even if the answer turns out to be an error."""
        at = self._asked[0]
        found = fetch(self.connection, self.slots[at], lent=at > AHEAD)
        self._asked.popleft()
        return found

    def gone(self) -> bool:
        """Whether it has exited; waits up to 0.5 s for that."""
        try:
            self._child.wait(0.5)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """End it: close the connection, and kill it if it still runs after 0.2 s."""
        self.connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(0.2)
        self._child.kill()
        self._child.wait()
        for slot in self.slots:
            slot.close()


@final
class Readers:
    """The current reader process and the spare that will follow it, for one process of the script."""

    def __init__(self, dataset: Any, bound: int, state: Any) -> None:
        """Start the first one.

        Args:
            dataset: the data set to read.
            bound: largest unique set size of a process, bytes.
            state: states of the random generators that it begins with.
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
        """The next process (the spare if there is one), with its random generators set to ``state``."""
        for _ in range(TRIES):
            fresh, self._spare = self._spare or self._started(), None
            try:
                fresh.ask("restore", state)
                fresh.answer()
            except (EOFError, OSError):
                fresh.close()
            else:
                return fresh
        raise ReaderError(f"{TRIES} reading processes died before they received the data: check that there is memory for it")

    def ask_once(self, name: str, *arguments: Any) -> Any:
        """Send a request and wait for the answer; if the process dies before it answers, ask the next one.

        Raises:
            ReaderError: if `TRIES` processes die.
        """
        for _ in range(TRIES):
            try:
                while self.now.waiting:  # read ahead for an iteration, which will ask again
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
        raise ReaderError(
            f"the reading process died {TRIES} times in {name}{arguments}: check that there is memory for one read"
        )

    def died(self) -> bool:
        """Switch to another process if this one has exited; if not, the EOFError or OSError is the data set's own."""
        if not self.now.gone():
            return False
        self.now.close()
        self.now = self._next(generators())
        return True

    def grown(self) -> bool:
        """Whether the process exceeds the bound; starts the spare a little earlier, at `SPARE` of it."""
        self.highest = max(self.highest, self.now.unique)
        if self.now.unique > SPARE * self._bound and self._spare is None:
            self._spare = self._started()
        return self.now.unique > self._bound

    def replace(self) -> None:
        """Switch to a fresh process with the same generator states; no request may be waiting for an answer.

        Raises:
            ReaderError: if the fresh process exceeds the bound before it reads anything.
        """
        self.now.ask("random")
        state = self.now.answer()
        self.now.close()
        self._soon = self._soon + 1 if self.now.items <= SOON else 0
        before, self.now = self.now, self._next(state)
        if self._soon == AGAIN and self.now.unique <= self._bound:
            warnings.warn(
                f"the reading process is replaced about every {before.items} items: it grows from "
                f"{format_bytes(self.now.unique)} past its limit of {format_bytes(self._bound)}: "
                "raise isolate(..., memory=...)",
                RuntimeWarning,
                stacklevel=2,
            )
        if self.now.unique > self._bound:
            raise ReaderError(
                f"a reading process takes {format_bytes(self.now.unique)} before it reads anything, more than its limit of "
                f"{format_bytes(self._bound)}: raise isolate(..., memory=...)"
            )

    def close(self) -> None:
        """End both processes."""
        if self.owner != os.getpid():  # a forked copy: the processes belong to the parent
            return
        for process in (self.now, self._spare):
            if process is not None:
                process.close()
