"""The other processes of a watched program (loaders' workers, pools, ranks, a shell around it), and what they hold. Linux;
standard library only.
"""

from __future__ import annotations

import os
from typing import Any, Final, final

from lowtide.probe.counters import pages, set_sizes

_PARENT: Final = 1
_SESSION: Final = 3
"""Places in ``/proc/PID/stat``, after the name in brackets."""


@final
class Family:
    """All processes that descend from the command that is watched, without this one."""

    def __init__(self, watcher: int) -> None:
        """Nothing is read yet.

        Args:
            watcher: the process that started the command.
        """
        self._own = os.getpid()
        self._root = self._found_root(watcher)
        self._session = (_stat(self._root) or (0, 0))[1]
        self._ours: set[int] = {self._own, self._root}
        self._others: set[int] = set()
        self._first: dict[int, tuple[int, int]] = {}

    def _found_root(self, watcher: int) -> int:
        at = self._own
        while (found := _stat(at)) is not None and found[0] > 1:
            if found[0] == watcher:
                return at
            at = found[0]
        return self._own  # it was left behind by whoever started it

    def pids(self) -> list[int]:
        """Those that live. Each process of the machine is asked only once whose it is: there may be thousands."""
        there = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        self._others &= there
        self._ours &= there
        new = {pid: found for pid in there - self._others - self._ours if (found := _stat(pid)) is not None}
        joined = {pid for pid, (_, session) in new.items() if session == self._session}
        while joined:
            self._ours |= joined
            joined = {pid for pid, (parent, _) in new.items() if parent in self._ours and pid not in self._ours}
        self._others |= new.keys() - self._ours
        return sorted(pid for pid in self._ours - {self._own} if not _tracks(pid))

    def read(self) -> tuple[int, int]:
        """How many there are, and the bytes that they took for themselves: each what was unique to it when it was first seen
        (the kernel walks its pages for that), and what it has of no file since.

        A page that a forked process shared, and that it or its parent has written since, is not taken but becomes unique.
        """
        taken = self._taken()
        return len(taken), sum(taken.values())

    def members(self) -> list[dict[str, Any]]:
        """Each with its name, the bytes that it took, and those that only it has now."""
        taken = self._taken()
        return [{"pid": pid, "name": _name(pid), "bytes": size, "unique_bytes": _unique(pid)} for pid, size in taken.items()]

    def _taken(self) -> dict[int, int]:
        first, taken = {}, {}
        for pid in self.pids():
            now = pages(pid)[1]
            known = self._first.get(pid)
            if known is None or now < known[1] / 2:  # the latter was forked, and runs another program now
                known = _unique(pid), now
            first[pid] = known
            taken[pid] = max(0, known[0] + now - known[1])
        self._first = first
        return taken


def _unique(pid: int) -> int:
    return max(0, set_sizes(pid)[0])


def _tracks(pid: int) -> bool:
    """Whether a process is the one in which ``multiprocessing`` notes the names of what it has to clean up."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"multiprocessing.resource_tracker" in file.read()
    except OSError:
        return False


def _name(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def _stat(pid: int) -> tuple[int, int] | None:
    """Parent and session of a process; None where it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return (int(fields[_PARENT]), int(fields[_SESSION])) if len(fields) > _SESSION else None
