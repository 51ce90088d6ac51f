"""Reads the memory that a process tree holds, on the host and on CUDA devices."""

from __future__ import annotations

import contextlib
import functools
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import psutil

from lowtide.guard.fence import Fence
from lowtide.probe.counters import Shares

SHARES_COST: Final = 100
"""Listing the processes and walking their pages may each take at most one hundredth of the time."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A tree's memory at one moment.

    Attributes:
        seconds: time on the machine's monotonic clock.
        bytes: memory that counts against the cap: with a cgroup, its usage minus file pages that can be dropped; with
            ``RLIMIT_DATA``, the data of the largest process; otherwise the sum of proportional set sizes.
        unique_bytes: sum of unique set sizes: pages that no other process shares.
        resident_bytes: sum of resident set sizes; shared pages count once for each process.
        device_bytes: memory used on CUDA devices, if NVML reports it.
        processes: number of processes.
        pressure: share of the last ten seconds in which some process waited for memory (PSI), in percent; 0 if unknown.
    """

    seconds: float
    bytes: int
    unique_bytes: int
    resident_bytes: int
    device_bytes: int
    processes: int
    pressure: float


@final
class Tree:
    """All descendants of this process but one; this process must therefore start nothing else."""

    def __init__(self, besides: int = 0) -> None:
        """Nothing is read yet.

        Args:
            besides: id of the one child that does not belong to the tree; 0 for none.
        """
        self._besides = besides
        self._own = psutil.Process()
        self._found: tuple[int, ...] = ()
        self._shares = Shares(SHARES_COST)
        self._next_list = 0.0

    def pids(self) -> tuple[int, ...]:
        """Ids of the descendants that are alive (no zombies)."""
        found = []
        for process in self._own.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.pid != self._besides and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
        return tuple(found)

    @property
    def found(self) -> tuple[int, ...]:
        """Ids of the descendants when they were last listed."""
        return self._found

    def read(self, fence: Fence, *, exactly: bool = False) -> Reading:
        """Read the memory that they hold now.

        Args:
            fence: the limit on them, which may have its own account.
            exactly: whether to list the processes and walk their pages whatever that costs.
        """
        spent = time.thread_time()  # CPU time: if waits for a core counted, new processes would stay unseen for long
        if exactly or time.monotonic() >= self._next_list:
            self._found = self.pids()
            self._next_list = time.monotonic() + SHARES_COST * (time.thread_time() - spent)
        unique, proportional, resident = self._shares.read(self._found, exactly=exactly)
        used = fence.used(self._found)
        return Reading(
            seconds=time.monotonic(),
            bytes=proportional if used is None else used,
            unique_bytes=unique,
            resident_bytes=resident,
            device_bytes=_device(set(self._found)),
            processes=len(self._found),
            pressure=pressure(),
        )


def pressure() -> float:
    """Share of the last ten seconds in which some process waited for memory, in percent; 0 if the kernel does not tell."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        return float(Path("/proc/pressure/memory").read_text().split("avg10=")[1].split()[0])
    return 0.0


@functools.cache
def _nvml() -> Any:
    """NVML, initialized; None if not available (``pip install nvidia-ml-py``). Cached: it is needed ten times a second."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _device(pids: set[int]) -> int:
    """Bytes that these processes use on CUDA devices; 0 if NVML does not tell."""
    nvml = _nvml()
    if nvml is None:
        return 0
    try:
        devices = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        found = [p for d in devices for p in nvml.nvmlDeviceGetComputeRunningProcesses(d)]
        return sum(p.usedGpuMemory or 0 for p in found if p.pid in pids)
    except nvml.NVMLError:
        return 0
