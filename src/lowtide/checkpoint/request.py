"""Tells whether the guard, a rule or a signal requests that this process stop at its next safe point."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
from types import FrameType
from typing import Any, final

from lowtide.probe import beat


@final
class Requests:
    """Requests to stop that this process has received."""

    def __init__(self) -> None:
        """Start to listen for signals, if this is the main thread."""
        self._asked = False
        self._folder = os.environ.get(beat.FOLDER)
        self._stop = None if self._folder is None else os.path.join(self._folder, beat.STOP)  # noqa: PTH118 - used each step
        kind, _, number = os.environ.get(beat.RECYCLE, "").partition("=")
        self._kind, self._every = kind, int(number) if kind == "every" else 0
        self._points = 0
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._listen()

    def _listen(self) -> None:
        for number in (signal.SIGUSR1, signal.SIGTERM):
            before = signal.getsignal(number)
            if number == signal.SIGTERM and before is not signal.SIG_DFL:
                continue  # the script has a handler of its own
            self._before[number] = before
            signal.signal(number, self._signalled)
        if signal.SIGTERM in self._before:
            os.register_at_fork(
                before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}),
                after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM}),
                after_in_child=self._leave_children_alone,
            )
        if self._folder is not None and os.path.isdir(self._folder):  # noqa: PTH112
            ready = os.path.join(self._folder, f"ready-{os.getpid()}")  # noqa: PTH118
            with contextlib.suppress(OSError), open(ready, "w") as file:  # noqa: PTH123 - on a full disk an empty file will do
                file.write("SIGUSR1\n")
            atexit.register(self._deaf, os.getpid())

    def _leave_children_alone(self) -> None:
        """Let SIGTERM end a forked child (a reader, a pool's worker), as its parent expects: it passes no safe points."""
        if signal.getsignal(signal.SIGTERM) == self._signalled:
            signal.signal(signal.SIGTERM, self._before[signal.SIGTERM])
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # delivers one that came meanwhile

    def _deaf(self, pid: int) -> None:
        """Ignore SIGUSR1 at the process's end: it passes no more safe points, and a late request must not kill it."""
        if os.getpid() == pid and self._folder is not None:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self._folder, f"ready-{pid}"))  # noqa: PTH108, PTH118

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        if self._asked and number == signal.SIGTERM:  # already asked: end at once
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._asked = True
        before = self._before.get(number)
        if callable(before):
            before(number, frame)

    def at(self, *, epoch: bool, last: bool) -> bool:
        """Count a safe point, and return whether to stop there.

        Args:
            epoch: whether an epoch ends here.
            last: whether all work is done; then only a request stops the process, no rule does.
        """
        self._points += 1
        if self._asked or (self._stop is not None and os.path.exists(self._stop)):  # noqa: PTH110 - used each step
            return True
        if last:
            return False
        return (self._kind == "epoch" and epoch) or (self._every > 0 and self._points >= self._every)


_requests: Requests | None = None


def requests() -> Requests:
    """This process's requests; the first call starts to listen for SIGUSR1 and SIGTERM."""
    global _requests  # noqa: PLW0603 - one per process
    if _requests is None:
        _requests = Requests()
    return _requests
