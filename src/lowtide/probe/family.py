"""Finds a watched program's other processes (workers, pools, ranks, a shell around it) and measures their memory.

Linux; standard library only.
"""

from __future__ import annotations

import os
from typing import Any, Final, final

from lowtide.probe.counters import pages, set_sizes

_PARENT: Final = 1
_SESSION: Final = 3
"""Indices of the parent's and the session's id among the fields of ``/proc/PID/stat`` that follow the name in parentheses."""


@final
class Family:
    """All processes that descend from the watched command or share its session, except this one."""

    def __init__(self, watcher: int) -> None:
        """Find the command's process.

        Args:
            watcher: id of the process that started the command.
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
        return self._own  # not below the watcher any more: an ancestor has ended

    def pids(self) -> list[int]:
        """Ids of those that are alive. Each process of the machine is classified only once: there may be thousands."""
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
        """Number of processes, and the bytes that they took.

        A process took its unique set size when it was first seen (the kernel walks its pages for it) plus the growth of its
        anonymous resident bytes since. A page shared at a fork that the process or its parent writes later becomes unique to
        it, but does not count as taken.
        """
        taken = self._taken()
        return len(taken), sum(taken.values())

    def members(self) -> list[dict[str, Any]]:
        """Each process with its id, name, the bytes that it took, and its unique set size now."""
        taken = self._taken()
        return [{"pid": pid, "name": _name(pid), "bytes": size, "unique_bytes": _unique(pid)} for pid, size in taken.items()]

    def _taken(self) -> dict[int, int]:
        first, taken = {}, {}
        for pid in self.pids():
            now = pages(pid)[1]
            known = self._first.get(pid)
            if known is None or now < known[1] / 2:  # so large a drop: a forked process now runs another program
                known = _unique(pid), now
            first[pid] = known
            taken[pid] = max(0, known[0] + now - known[1])
        self._first = first
        return taken


def _unique(pid: int) -> int:
    return max(0, set_sizes(pid)[0])


def _tracks(pid: int) -> bool:
    """Whether a process is the resource tracker of ``multiprocessing``, which records what it has to clean up."""
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
    """Ids of a process's parent and session; None if the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return (int(fields[_PARENT]), int(fields[_SESSION])) if len(fields) > _SESSION else None
