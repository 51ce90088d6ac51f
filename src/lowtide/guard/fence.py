"""What limits a tree of processes, how a limit is put on it, and whom the kernel killed there."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol, final

import psutil

from lowtide.base.units import KIB, LARGEST

CGROUPS: Final = Path("/sys/fs/cgroup")


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and int(text) < LARGEST // 2 else None


def _own(controller: str) -> str | None:
    """This process's cgroup; ``controller`` is empty for version 2."""
    with contextlib.suppress(OSError):
        for line in os.fsdecode(Path("/proc/self/cgroup").read_bytes()).splitlines():
            _, names, path = line.split(":", 2)
            if (controller in names.split(",")) if controller else not names:
                return path
    return None


def room() -> int:
    """Bytes that the machine, or the cgroup in which this process is, has at most."""
    found = [psutil.virtual_memory().total]
    for root, controller, name in ((CGROUPS, "", "memory.max"), (CGROUPS / "memory", "memory", "memory.limit_in_bytes")):
        own = _own(controller)
        if own is None:
            continue
        folder = root / own.lstrip("/")
        while folder.is_relative_to(root):
            limit = _number(folder / name)
            if limit is not None:
                found.append(limit)
            if folder == root:
                break
            folder = folder.parent
    return min(found)


class Fence(Protocol):
    """A limit on a tree of processes.

    Attributes:
        kind: as people are told.
        alone: whether `kills` counts nobody else's processes.
    """

    kind: str
    alone: bool

    def enter(self) -> None:
        """In the new process, before its program begins."""

    def used(self, pids: Sequence[int]) -> int | None:
        """Bytes that count against the limit, of these processes within; None where the fence does not tell."""

    def kills(self) -> int | None:
        """Processes that the kernel killed for want of memory so far; None where nobody counts."""

    def reached(self) -> bool:
        """Whether the kernel found the tree at the limit and could not make room."""

    def remove(self) -> None:
        """Once all processes within are gone."""


class Watching:
    """No limit of the system's: the guard watches, and kills what crosses the cap."""

    kind = "watch"
    alone = False

    def enter(self) -> None:
        """Nothing to do."""

    def used(self, pids: Sequence[int]) -> int | None:  # noqa: ARG002 - of whatever processes
        """Unknown."""
        return None

    def kills(self) -> int | None:
        """In the cgroup in which we all are."""
        return own_kills()

    def reached(self) -> bool:
        """Nobody but the guard looks at the limit."""
        return False

    def remove(self) -> None:
        """Nothing to do."""


@final
class DataLimit(Watching):
    """``RLIMIT_DATA``: each process's private writable memory; allocations beyond fail, nothing is killed."""

    kind = "rlimit"

    def __init__(self, size: int) -> None:
        """With so many bytes for each process."""
        self._size = size

    def enter(self) -> None:
        """Set it; it goes with the process."""
        resource.setrlimit(resource.RLIMIT_DATA, (self._size, self._size))

    def used(self, pids: Sequence[int]) -> int | None:
        """Of the process that is nearest to it, what was asked for, touched or not: `VmData` of ``/proc/PID/status``."""
        found = [size for pid in pids if (size := _data_bytes(pid)) is not None]
        return max(found, default=None)


def _data_bytes(pid: int) -> int | None:
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int(Path(f"/proc/{pid}/status").read_text(errors="replace").split("VmData:")[1].split()[0]) * KIB
    return None


@dataclass(frozen=True, slots=True)
class _Words:
    """The names of files of one version of cgroups."""

    limit: str
    swap: tuple[str, str]
    usage: str
    droppable: tuple[str, str]
    events: str
    highest: str


_CHARGED_BYTES: Final = 4 << 20
"""What one request may take at once (a huge page, and what the kernel charges ahead on each core)."""
_V1: Final = _Words("memory.limit_in_bytes", ("memory.memsw.limit_in_bytes", ""), "memory.usage_in_bytes",
                    ("total_inactive_file", "total_active_file"), "memory.oom_control",
                    "memory.max_usage_in_bytes")  # fmt: skip
_V2: Final = _Words("memory.max", ("memory.swap.max", "0"), "memory.current", ("inactive_file", "active_file"),
                    "memory.events", "memory.peak")  # fmt: skip


@final
@dataclass(slots=True)
class Cgroup:
    """A cgroup of its own: the kernel holds the tree to the limit, and counts whom it kills there."""

    folder: Path
    words: _Words
    kind: str = field(default="cgroup")
    alone: bool = field(default=True)

    def enter(self) -> None:
        """Go in."""
        with open(self.folder / "cgroup.procs", "w") as file:  # noqa: PTH123 - between fork and exec
            file.write("0")

    def used(self, pids: Sequence[int]) -> int | None:  # noqa: ARG002 - of all that were put in
        """What is charged, less pages of files that can be dropped."""
        usage = _number(self.folder / self.words.usage)
        if usage is None:
            return None
        return max(0, usage - sum(_entry(self.folder / "memory.stat", name) for name in self.words.droppable))

    def kills(self) -> int | None:
        """Whom the kernel killed."""
        return _entry(self.folder / self.words.events, "oom_kill")

    def reached(self) -> bool:
        """What it held at most was the limit, but for what one request may take."""
        highest, limit = _number(self.folder / self.words.highest), _number(self.folder / self.words.limit)
        if highest is None or limit is None:  # memory.peak came with Linux 5.19
            return _entry(self.folder / self.words.events, "oom") > 0
        return highest > limit - _CHARGED_BYTES

    def remove(self) -> None:
        """Take it away."""
        for _ in range(50):
            try:
                self.folder.rmdir()
            except FileNotFoundError:
                return
            except OSError:  # the last process has not quite gone
                time.sleep(0.02)
            else:
                return


def own_kills() -> int | None:
    """Processes of the cgroup in which this process is that the kernel killed for want of memory; None if unknown."""
    for words, root, controller in ((_V2, CGROUPS, ""), (_V1, CGROUPS / "memory", "memory")):
        own = _own(controller)
        file = root / (own or "/").lstrip("/") / words.events
        if own is not None and file.exists():
            return _entry(file, "oom_kill")
    return None


def _entry(path: Path, name: str) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return 0


def cgroup(size: int, name: str, roots: Sequence[Path] = (CGROUPS,)) -> Cgroup | None:
    """A cgroup with a limit; None where this machine lets us make none.

    Version 1 where its memory controller is mounted; version 2 where our own cgroup lets its children have memory limits
    (``systemd-run --user --scope -p Delegate=yes`` gives one that does, once nothing else is in it).
    """
    for root in roots:
        for words, base, own in ((_V1, root / "memory", _own("memory")), (_V2, root, _own(""))):
            if own is None or not (base / own.lstrip("/")).is_dir():
                continue
            parent = base / own.lstrip("/")
            if words is _V2:
                if not (parent / "cgroup.controllers").exists():
                    continue
                with contextlib.suppress(OSError):
                    (parent / "cgroup.subtree_control").write_text("+memory")
            folder = parent / name
            try:
                folder.mkdir()
                (folder / words.limit).write_text(str(size))
            except OSError:
                with contextlib.suppress(OSError):
                    folder.rmdir()
                continue
            with contextlib.suppress(OSError):  # nothing is to hide in swap
                (folder / words.swap[0]).write_text(words.swap[1] or str(size))
            return Cgroup(folder, words)
    return None


# --- killers --------------------------------------------------------------------------------------------------------------


def machine_kills() -> int | None:
    """How many processes the kernel has killed for want of memory since it started; None where it does not tell."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


_FIRST_NAMESPACE: Final = "pid:[4026531836]"
"""Of process numbers, the one that the kernel's log speaks of (``PROC_PID_INIT_INO``)."""


def named_by_kernel(pids: set[int], since: float) -> bool | None:
    """Whether the kernel's log says that it killed one of these for want of memory; None where the log cannot be read.

    Args:
        pids: of the processes.
        since: seconds of the monotonic clock; older lines are of others that had the same number.
    """
    try:
        if str(Path("/proc/self/ns/pid").readlink()) != _FIRST_NAMESPACE:  # the log has other numbers
            return None
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        while True:
            try:
                line = os.read(log, 8192).decode(errors="replace")
            except BlockingIOError:
                return False
            except OSError:  # a line was overwritten while it was read
                continue
            head, _, text = line.partition(";")
            fields = head.split(",")
            if "Killed process" not in text or len(fields) < 3 or int(fields[2]) / 1e6 < since - 1:
                continue
            words = text.split("Killed process", 1)[1].split()
            if words and words[0].isdigit() and int(words[0]) in pids:
                return True
    finally:
        os.close(log)
