"""What a tree of processes holds."""

from __future__ import annotations

import contextlib
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

import psutil

from lowtide.guard.fence import Fence
from lowtide.probe.counters import set_sizes

_PAGE: Final = resource.getpagesize()
SHARES_COST: Final = 100
"""Processes are listed, and their pages walked, no more often than costs a hundredth of the time each."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A tree's memory at one moment.

    Attributes:
        seconds: of the machine's monotonic clock.
        bytes: what counts against the cap: the cgroup's usage without pages that can be dropped, where one was made; the sum
            of proportional set sizes otherwise.
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
    """All processes that descend from this one, which therefore starts nothing else."""

    def __init__(self) -> None:
        """Nothing is read yet."""
        self._own = psutil.Process()
        self._found: tuple[int, ...] = ()
        self._shares = (0, 0)
        self._walked: dict[int, int] = {}
        self._next_list = self._next_shares = 0.0

    def pids(self) -> tuple[int, ...]:
        """The descendants that live, those that only wait to be reaped left out."""
        found = []
        for process in self._own.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
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
        now = time.monotonic()
        if exactly or now >= self._next_list:
            self._found = self.pids()
            self._next_list = time.monotonic() + SHARES_COST * (time.monotonic() - now)
        pages = {pid: _pages(pid) for pid in self._found}
        resident = sum(p[0] for p in pages.values())
        now = time.monotonic()
        if exactly or now >= self._next_shares or not self._walked.keys() >= pages.keys():
            sizes = [set_sizes(pid) for pid in self._found]
            unique, proportional = (sum(max(0, s[i]) for s in sizes) for i in (0, 1))
            self._shares, self._walked = (unique, proportional), {pid: p[1] for pid, p in pages.items()}
            self._next_shares = time.monotonic() + SHARES_COST * (time.monotonic() - now)
        unique, proportional = self._shares
        # between two walks, what each process's pages of no file have grown by; those that have gone gave theirs back
        grown = sum(pages[pid][1] - then if pid in pages else 0 for pid, then in self._walked.items())
        size = max(0, proportional + grown)
        used = fence.used()
        return Reading(
            seconds=time.monotonic(),
            bytes=size if used is None else used,
            unique_bytes=max(0, unique + grown),
            resident_bytes=resident,
            device_bytes=_device(set(self._found)),
            processes=len(self._found),
            pressure=pressure(),
        )


def _pages(pid: int) -> tuple[int, int]:
    """Resident bytes of a process, and of these what is mapped from no file and shared with none but forks."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:  # noqa: PTH123 - many times a second
            fields = file.read().split()
    except OSError:
        return 0, 0
    return (int(fields[1]) * _PAGE, (int(fields[1]) - int(fields[2])) * _PAGE) if len(fields) > 2 else (0, 0)


def pressure() -> float:
    """Share of the last ten seconds in which some process waited for memory, percent; 0 where the kernel does not tell."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        return float(Path("/proc/pressure/memory").read_text().split("avg10=")[1].split()[0])
    return 0.0


def _device(pids: set[int]) -> int:
    """Bytes that these processes take on CUDA devices; 0 where NVML is not there (``pip install nvidia-ml-py``)."""
    try:
        import pynvml
    except ImportError:
        return 0
    try:
        pynvml.nvmlInit()
        devices = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        found = [p for d in devices for p in pynvml.nvmlDeviceGetComputeRunningProcesses(d)]
        return sum(p.usedGpuMemory or 0 for p in found if p.pid in pids)
    except pynvml.NVMLError:
        return 0
