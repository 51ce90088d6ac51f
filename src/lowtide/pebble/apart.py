"""HiGHS in a process of its own, which can be ended: with whole variables it does not always look at the clock.

Run as a script, this file is that process: programs come by standard input, and what they gave goes to standard output.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final

_EARLY = 0.25
"""Seconds before it is ended at which a process is to have its answer: it looks at the clock now and then."""
_PRELOADED = "LD_PRELOAD"
"""A heap counter has nothing to count there."""
_LENGTH = struct.Struct("<q")


class _Pool:
    """Processes that nothing is asked of at the moment, while somebody keeps them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[subprocess.Popen[bytes]] = []
        self._keepers = 0

    @property
    def is_kept(self) -> bool:
        return self._keepers > 0

    def keep(self) -> None:
        with self._lock:
            begun = None if self._waiting else _begin()
            if begun is not None:
                self._waiting.append(begun)
            self._keepers += 1

    def let_go(self) -> None:
        with self._lock:
            self._keepers -= 1
            if self._keepers:
                return
            ended, self._waiting = self._waiting, []
        for process in ended:
            _end(process)

    def take(self) -> subprocess.Popen[bytes] | None:
        with self._lock:
            return self._waiting.pop() if self._waiting else _begin()

    def give_back(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            if self._keepers:
                self._waiting.append(process)
                return
        _end(process)


_pool: Final = _Pool()


@contextlib.contextmanager
def kept_ready() -> Iterator[None]:
    """Within it a process is there before it is asked for, and is asked again and again; afterwards it is gone."""
    _pool.keep()
    try:
        yield
    finally:
        _pool.let_go()


def milp_apart(arguments: Mapping[str, Any], *, seconds: float) -> Any | None:
    """What ``scipy.optimize.milp`` gives for some arguments; None where it takes longer, or no process can be begun.

    Args:
        arguments: of ``milp``; its time limit is set here.
        seconds: in all, the beginning of the process included.
    """
    deadline = time.monotonic() + seconds
    process = _pool.take()
    if process is None:
        return None
    overdue = threading.Timer(seconds, process.kill)  # whatever it is that takes long: what is written or read then ends
    overdue.daemon = True
    overdue.start()
    found = None
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        _send(process.stdin, (dict(arguments), deadline - _EARLY))
        found = _receive(process.stdout)
    except (OSError, EOFError, pickle.UnpicklingError):
        found = None
    finally:
        overdue.cancel()
        if found is None:
            _end(process)
        else:
            _pool.give_back(process)
    return found


def is_kept() -> bool:
    """Whether a process is kept ready: to begin one takes half a second."""
    return _pool.is_kept


def _begin() -> subprocess.Popen[bytes] | None:
    environment = {k: v for k, v in os.environ.items() if k != _PRELOADED}
    if not sys.executable:
        return None
    command = [sys.executable, "-P", str(Path(__file__))]
    try:
        return subprocess.Popen(  # noqa: S603 - this file
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        )
    except OSError:
        return None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # what it was sent and never read
                pipe.close()
    process.wait()


def _send(pipe: IO[bytes], what: object) -> None:
    data = pickle.dumps(what)
    pipe.write(_LENGTH.pack(len(data)) + data)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> Any:
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    size = _LENGTH.unpack(head)[0]
    data = pipe.read(size)
    if len(data) < size:
        raise EOFError
    return pickle.loads(data)  # noqa: S301 - our own process wrote it


def _serve() -> None:
    from scipy.optimize import milp  # here: who only asks has no use for it

    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # HiGHS may print there, unasked
    with contextlib.suppress(EOFError):
        while True:
            arguments, deadline = _receive(sys.stdin.buffer)
            options = {**arguments.pop("options", {}), "time_limit": max(0.0, deadline - time.monotonic())}
            _send(answers, milp(**arguments, options=options))


if __name__ == "__main__":
    _serve()
