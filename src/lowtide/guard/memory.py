"""What a tree of processes holds."""

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
"""Processes are listed, and their pages walked, no more often than costs a hundredth of the time each."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A tree's memory at one moment.

    Attributes:
        seconds: of the machine's monotonic clock.
        bytes: what counts against the cap: the cgroup's usage without pages that can be dropped, where one was made; the
            largest process's data, where that is limited; the sum of proportional set sizes otherwise.
        unique_bytes: pages that no other process has.
        resident_bytes: sum of resident set sizes; pages that several share are counted several times.
        device_bytes: taken on CUDA devices, where NVML tells.
        processes: how many there are.
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
    """All processes that descend from this one, which therefore starts nothing else, but for one."""

    def __init__(self, besides: int = 0) -> None:
        """Nothing is read yet.

        Args:
            besides: a child that is none of them.
        """
        self._besides = besides
        self._own = psutil.Process()
        self._found: tuple[int, ...] = ()
        self._shares = Shares(SHARES_COST)
        self._next_list = 0.0

    def pids(self) -> tuple[int, ...]:
        """The descendants that live, those that only wait to be reaped left out."""
        found = []
        for process in self._own.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.pid != self._besides and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
        return tuple(found)

    @property
    def found(self) -> tuple[int, ...]:
        """The descendants that were listed last."""
        return self._found

    def read(self, fence: Fence, *, exactly: bool = False) -> Reading:
        """What they hold now.

        Args:
            fence: what limits them.
            exactly: whether processes are listed, and their pages walked, whatever that costs.
        """
        spent = time.thread_time()  # a wait for a core is no cost: it would leave new processes unseen for long
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
    """Share of the last ten seconds in which some process waited for memory, percent; 0 where the kernel does not tell."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        return float(Path("/proc/pressure/memory").read_text().split("avg10=")[1].split()[0])
    return 0.0


@functools.cache
def _nvml() -> Any:
    """NVML, ready; None where it is not there (``pip install nvidia-ml-py``). Looked for once, not ten times a second."""
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
    """Bytes that these processes take on CUDA devices; 0 where NVML does not tell."""
    nvml = _nvml()
    if nvml is None:
        return 0
    try:
        devices = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        found = [p for d in devices for p in nvml.nvmlDeviceGetComputeRunningProcesses(d)]
        return sum(p.usedGpuMemory or 0 for p in found if p.pid in pids)
    except nvml.NVMLError:
        return 0
