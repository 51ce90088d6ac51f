"""Whether this process has been asked to stop at its next safe point: by its guard, or by a signal."""

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
    """What has been asked of this process."""

    def __init__(self) -> None:
        """Listen, where this is the main thread."""
        self._asked = False
        self._folder = os.environ.get(beat.FOLDER)
        self._stop = None if self._folder is None else os.path.join(self._folder, beat.STOP)  # noqa: PTH118 - asked each step
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
                continue  # the script has an answer of its own
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
            with contextlib.suppress(OSError), open(ready, "w") as file:  # noqa: PTH123 - on a full disk the name is enough
                file.write("SIGUSR1\n")
            atexit.register(self._deaf, os.getpid())

    def _leave_children_alone(self) -> None:
        """A child that was forked (a reader, a pool's worker) passes no safe point: SIGTERM ends it, as its parent expects."""
        if signal.getsignal(signal.SIGTERM) == self._signalled:
            signal.signal(signal.SIGTERM, self._before[signal.SIGTERM])
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # one that came meanwhile

    def _deaf(self, pid: int) -> None:
        """This process ends: it passes no safe point any more, and a late request must not kill it."""
        if os.getpid() == pid and self._folder is not None:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self._folder, f"ready-{pid}"))  # noqa: PTH108, PTH118

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        if self._asked and number == signal.SIGTERM:  # asked a second time: at once
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._asked = True
        before = self._before.get(number)
        if callable(before):
            before(number, frame)

    def at(self, *, epoch: bool, last: bool) -> bool:
        """Whether to stop at this safe point, which is counted.

        Args:
            epoch: whether an epoch ends here.
            last: whether nothing is left to be done: then no rule stops it, only a request.
        """
        self._points += 1
        if self._asked or (self._stop is not None and os.path.exists(self._stop)):  # noqa: PTH110 - asked each step
            return True
        if last:
            return False
        return (self._kind == "epoch" and epoch) or (self._every > 0 and self._points >= self._every)


_requests: Requests | None = None


def requests() -> Requests:
    """Of this process; the first call begins to listen for SIGUSR1 and SIGTERM."""
    global _requests  # noqa: PLW0603 - one per process
    if _requests is None:
        _requests = Requests()
    return _requests
