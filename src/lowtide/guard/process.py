"""One guarded process and its descendants: starts them, asks them to stop, signals them, and leaves none behind."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, final

import psutil

from lowtide.base.errors import UsageError
from lowtide.base.files import why
from lowtide.base.temporary_folders import Scratch
from lowtide.guard.fence import Fence
from lowtide.guard.memory import Tree
from lowtide.probe import beat
from lowtide.probe.beat import Beat
from lowtide.probe.lend import lend

_LIBC: Final = ctypes.CDLL(None)
_PR_SET_CHILD_SUBREAPER: Final = 36
_PR_GET_CHILD_SUBREAPER: Final = 37
OF_A_CHILD: Final = (
    "ChildFailedError", "CalledProcessError", "ProcessRaisedException", "ProcessExitedException", "BrokenProcessPool",
)
"""Errors that launchers and pools raise when a child fails: the reason is in the child's own error."""
PLACES: Final = (None, "/dev/shm", ".")  # noqa: S108 - the folder gets a random name
"""Folders for temporary files, tried in turn (None: the default one): after hours of work, the default's disk may be full."""
AGAIN_SECONDS: Final = (0.1, 0.5, 1.0, 2.0, 4.0)
"""Waits between attempts to start a process while the system has no room for one more."""
LEAVE_SECONDS: Final = 5.0
"""Time that processes get between SIGTERM and SIGKILL."""
_WARDEN: Final = """
read -r group left || exit
read -r _
kill -s TERM -- "-$group"
while kill -s 0 -- "-$group" && [ "$left" -gt 0 ]; do sleep 1; left=$((left - 1)); done
kill -s KILL -- "-$group"
"""
"""Shell script that waits for the end of its input, which comes when the guard is gone for any reason, and then ends the
command's process group: SIGTERM first, SIGKILL once the patience is over.

A parent-death signal would reach only the command itself, and both together would count as two requests.
"""


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """Make this process adopt every descendant whose parent ends (a subreaper, ``man 2 prctl``), so that none is lost."""
    before = ctypes.c_int(0)
    _LIBC.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


@final
class Guarded:
    """A running command; leaving the ``with`` block ends it and everything it started."""

    def __init__(
        self, command: Sequence[str], *, generation: int, rule: str, fence: Fence, patience_seconds: float
    ) -> None:
        """Start nothing yet.

        Args:
            command: the program and its arguments.
            generation: number of processes that came before it.
            rule: when it stops on its own (``guard.rule.Rule.text``).
            fence: the limit on its memory.
            patience_seconds: time it gets to stop if this process is killed.
        """
        self._command, self._generation, self._rule, self._fence = list(command), generation, rule, fence
        self._patience = patience_seconds
        self._warden: subprocess.Popen[str] | None = None
        self._lost: int | None = None
        self._passed = False

    def __enter__(self) -> Guarded:
        """Start it.

        Raises:
            UsageError: if it cannot be started.
        """
        self._scratch = Scratch(PLACES)
        self._folder = self._scratch.path
        environment = dict(os.environ)
        environment[beat.FOLDER] = str(self._folder)
        environment[beat.RECYCLE] = self._rule
        environment[beat.GENERATION] = str(self._generation)
        lend(environment)
        try:
            self._warden = _started(
                ["/bin/sh", "-c", _WARDEN, "lowtide-warden"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, start_new_session=True, text=True,
            )  # fmt: skip
            self.began = time.monotonic()
            self._process = _started(self._command, env=environment, start_new_session=True, preexec_fn=self._fence.enter)
        except (OSError, subprocess.SubprocessError) as error:
            self._dismiss()
            raise UsageError(f"cannot start {self._command[0]}: {why(error)}") from None
        assert self._warden.stdin is not None
        self._warden.stdin.write(f"{self._process.pid} {math.ceil(self._patience)}\n")
        self._warden.stdin.flush()
        self.tree = Tree(besides=self._warden.pid)
        return self

    def __exit__(self, *_: object) -> None:
        """End all that is left of it."""
        self.kill()
        self._dismiss()

    def _dismiss(self) -> None:
        if self._warden is not None:
            self._warden.kill()
            self._warden.communicate()
        self._scratch.remove()

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs. Also reaps adopted descendants."""
        with contextlib.suppress(ChildProcessError):  # no children are left
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if ended.si_pid == self._process.pid:  # leave the command's exit code to `subprocess`
                    break
                os.waitpid(ended.si_pid, os.WNOHANG)
        return self._process.poll()

    def kill(self) -> None:
        """Kill it and all its descendants, in any session, and reap them all.

        If a signal was passed on, descendants that outlive the command get SIGTERM and `LEAVE_SECONDS` first.
        """
        if self._passed and self._process.poll() is not None:
            self._leave()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        while pids := self.tree.pids():
            for number in (signal.SIGSTOP, signal.SIGKILL):  # SIGSTOP first, so that none starts another meanwhile
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
            time.sleep(0.01)
        self._process.wait()
        self.poll()

    def _leave(self) -> None:
        """Send descendants SIGTERM, and give them `LEAVE_SECONDS` to end."""
        end = time.monotonic() + LEAVE_SECONDS
        for pid in self.tree.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        while self.tree.pids() and time.monotonic() < end:
            time.sleep(0.05)

    def ready(self) -> list[int]:
        """Ids of processes that will respond to a request to stop at their next safe point."""
        found = {int(path.name.rpartition("-")[2]) for path in self._folder.glob("ready-*")}
        return [pid for pid in self.tree.pids() if pid in found and _catches(pid, signal.SIGUSR1)]

    def ask(self) -> bool:
        """Request a save and a stop at the next safe point; returns whether any process listens."""
        with contextlib.suppress(OSError):  # the signal below requests it too
            (self._folder / beat.STOP).touch()
        ready = self.ready()
        for pid in ready:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        return bool(ready)

    def pass_on(self, number: int) -> None:
        """Send it a signal: SIGINT and SIGQUIT to its process group, as a terminal would; others to the command alone."""
        self._passed = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if number in {signal.SIGINT, signal.SIGQUIT}:
                os.killpg(self._process.pid, number)
            else:
                os.kill(self._process.pid, number)

    def beats(self) -> dict[int, Beat]:
        """The latest report of each process, by process id."""
        found = {}
        for path in self._folder.glob("beat-*"):
            with contextlib.suppress(OSError):
                found[int(path.name.rpartition("-")[2])] = beat.read(path.read_bytes())
        for path in self._folder.glob(f"{beat.SAVED}*"):
            found[int(path.name.rpartition("-")[2])] = Beat(saves=1.0, stopped=1.0)
        return found

    def endings(self) -> list[dict[str, Any]]:
        """Reports that processes wrote when they ended."""
        found = []
        for path in self._folder.glob("ended-*"):
            with contextlib.suppress(OSError, ValueError):
                found.append({"pid": int(path.name.rpartition("-")[2]), **json.loads(path.read_text())})
        return found

    def errors(self, beats: Mapping[int, Beat]) -> list[dict[str, Any]]:
        """Endings by the error that counts: those of processes that trained; else the command's own, unless it only reports
        that a child failed (`OF_A_CHILD`); else those of any process.
        """
        found = [ending for ending in self.endings() if ending["error"]]
        trained = [e for e in found if beats.get(e["pid"], Beat()).points or beats.get(e["pid"], Beat()).steps]
        own = [e for e in found if e["pid"] == self._process.pid and not e["error"].startswith(OF_A_CHILD)]
        return trained or own or found

    def rank_lost(self, beats: Mapping[int, Beat]) -> int:
        """The first rank that was seen to have ended without a report; -1 for none."""
        if self._lost is None:
            gone = {pid: b for pid, b in beats.items() if b.rank >= 0 and not b.stopped and not _lives(pid)}
            said = {ending["pid"] for ending in self.endings()} if gone else set()
            self._lost = next((int(b.rank) for pid, b in gone.items() if pid not in said), None)
        return -1 if self._lost is None else self._lost


def _started(command: Sequence[str], **how: Any) -> subprocess.Popen[Any]:
    """Start a process; retry for some seconds while the system has no room for one, so that a long run does not end."""
    for seconds in AGAIN_SECONDS:
        try:
            return subprocess.Popen(command, **how)  # noqa: S603 - the user's own command, or the warden
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.ENOMEM):
                raise
        time.sleep(seconds)
    return subprocess.Popen(command, **how)  # noqa: S603 - as above


def _catches(pid: int, number: int) -> bool:
    """Whether a process handles a signal: one that no longer has a handler would be killed by it."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        text = Path(f"/proc/{pid}/status").read_text(errors="replace").split("SigCgt:")[1].split()[0]
        return bool(int(text, 16) >> (number - 1) & 1)
    return False


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
