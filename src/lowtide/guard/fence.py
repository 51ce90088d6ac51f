"""Memory limits of a process tree (cgroup, ``RLIMIT_DATA``, watching), and which processes the kernel killed."""

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
    """Path of this process's cgroup; ``controller`` is empty for version 2."""
    with contextlib.suppress(OSError):
        for line in os.fsdecode(Path("/proc/self/cgroup").read_bytes()).splitlines():
            _, names, path = line.split(":", 2)
            if (controller in names.split(",")) if controller else not names:
                return path
    return None


def room() -> int:
    """Memory limit of this process, bytes: the lowest of the machine's memory and the limits of its cgroup and its parents."""
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
        kind: name that is shown to users.
        alone: whether `kills` counts only processes of this tree.
    """

    kind: str
    alone: bool

    def enter(self) -> None:
        """Apply the limit; runs in the new process before its program begins."""

    def used(self, pids: Sequence[int]) -> int | None:
        """Bytes of these processes that count against the limit; None if the fence does not measure them."""

    def kills(self) -> int | None:
        """Number of processes that the kernel has killed for lack of memory so far; None if there is no counter."""

    def reached(self) -> bool:
        """Whether the kernel found the tree at the limit and could not make room."""

    def remove(self) -> None:
        """Remove the limit, once all its processes are gone."""


class Watching:
    """No limit in the kernel: the guard watches the tree, and kills it when it exceeds the cap."""

    kind = "watch"
    alone = False

    def enter(self) -> None:
        """Nothing to do."""

    def used(self, pids: Sequence[int]) -> int | None:  # noqa: ARG002 - the same for any processes
        """None: there is no account of the kernel's."""
        return None

    def kills(self) -> int | None:
        """Kills in the guard's own cgroup, which may also hold other processes."""
        return own_kills()

    def reached(self) -> bool:
        """False: the kernel does not know the limit."""
        return False

    def remove(self) -> None:
        """Nothing to do."""


@final
class DataLimit(Watching):
    """``RLIMIT_DATA``: limits the private writable memory of each process; allocations beyond fail, and nothing is killed."""

    kind = "rlimit"

    def __init__(self, size: int) -> None:
        """Allow each process ``size`` bytes."""
        self._size = size

    def enter(self) -> None:
        """Set the limit; it ends with the process."""
        resource.setrlimit(resource.RLIMIT_DATA, (self._size, self._size))

    def used(self, pids: Sequence[int]) -> int | None:
        """Bytes that the process nearest to the limit has requested, touched or not: `VmData` of ``/proc/PID/status``."""
        found = [size for pid in pids if (size := _data_bytes(pid)) is not None]
        return max(found, default=None)


def _data_bytes(pid: int) -> int | None:
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int(Path(f"/proc/{pid}/status").read_text(errors="replace").split("VmData:")[1].split()[0]) * KIB
    return None


@dataclass(frozen=True, slots=True)
class _Words:
    """Names of the files, and of entries of ``memory.stat``, in one version of cgroups."""

    limit: str
    swap: tuple[str, str]
    usage: str
    droppable: tuple[str, str]
    events: str
    highest: str


_CHARGED_BYTES: Final = 4 << 20
"""Bytes that one request may charge at once: a huge page, and what the kernel charges in advance on each core."""
_V1: Final = _Words("memory.limit_in_bytes", ("memory.memsw.limit_in_bytes", ""), "memory.usage_in_bytes",
                    ("total_inactive_file", "total_active_file"), "memory.oom_control",
                    "memory.max_usage_in_bytes")  # fmt: skip
_V2: Final = _Words("memory.max", ("memory.swap.max", "0"), "memory.current", ("inactive_file", "active_file"),
                    "memory.events", "memory.peak")  # fmt: skip


@final
@dataclass(slots=True)
class Cgroup:
    """A cgroup for the tree alone: the kernel enforces the limit, and counts the processes that it kills there."""

    folder: Path
    words: _Words
    kind: str = field(default="cgroup")
    alone: bool = field(default=True)

    def enter(self) -> None:
        """Move this process into the cgroup."""
        with open(self.folder / "cgroup.procs", "w") as file:  # noqa: PTH123 - between fork and exec
            file.write("0")

    def used(self, pids: Sequence[int]) -> int | None:  # noqa: ARG002 - the cgroup counts all its processes
        """Bytes charged to the cgroup, minus file pages that the kernel can drop."""
        usage = _number(self.folder / self.words.usage)
        if usage is None:
            return None
        return max(0, usage - sum(_entry(self.folder / "memory.stat", name) for name in self.words.droppable))

    def kills(self) -> int | None:
        """Number of processes that the kernel has killed in the cgroup for lack of memory."""
        return _entry(self.folder / self.words.events, "oom_kill")

    def reached(self) -> bool:
        """Whether its peak came within one request (`_CHARGED_BYTES`) of the limit."""
        highest, limit = _number(self.folder / self.words.highest), _number(self.folder / self.words.limit)
        if highest is None or limit is None:  # memory.peak came with Linux 5.19
            return _entry(self.folder / self.words.events, "oom") > 0
        return highest > limit - _CHARGED_BYTES

    def remove(self) -> None:
        """Remove the cgroup; retries for a second."""
        for _ in range(50):
            try:
                self.folder.rmdir()
            except FileNotFoundError:
                return
            except OSError:  # the last process is still exiting
                time.sleep(0.02)
            else:
                return


def own_kills() -> int | None:
    """Number of processes that the kernel has killed for lack of memory in this process's cgroup; None if unknown."""
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
    """Create a cgroup with a memory limit; None if this machine does not allow it.

    Uses version 1 if its memory controller is mounted, and version 2 if this process's cgroup lets its children have memory
    limits (``systemd-run --user --scope -p Delegate=yes`` creates one that does, once nothing else is in it).

    Args:
        size: the limit, bytes.
        name: name of the new cgroup, within this process's.
        roots: where cgroups may be mounted.
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
            with contextlib.suppress(OSError):  # memory must not move to swap instead
                (folder / words.swap[0]).write_text(words.swap[1] or str(size))
            return Cgroup(folder, words)
    return None


# --- killers --------------------------------------------------------------------------------------------------------------


def machine_kills() -> int | None:
    """Number of processes that the kernel has killed for lack of memory since boot; None if it does not tell."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


_FIRST_NAMESPACE: Final = "pid:[4026531836]"
"""The initial PID namespace (``PROC_PID_INIT_INO``), whose process ids the kernel's log uses."""


def named_by_kernel(pids: set[int], since: float) -> bool | None:
    """Whether the kernel's log says that it killed one of these processes for lack of memory; None if it cannot be read.

    Args:
        pids: ids of the processes.
        since: seconds of the monotonic clock; older lines are about other processes that had the same id.
    """
    try:
        if str(Path("/proc/self/ns/pid").readlink()) != _FIRST_NAMESPACE:  # the log uses other process ids
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
