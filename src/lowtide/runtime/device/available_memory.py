"""How many more bytes a process may take: of the machine, of its control group, of its own limits, of a device."""

from __future__ import annotations

import ctypes
import math
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil

import torch
from lowtide.runtime.device import accelerator
from lowtide.runtime.device.accelerator import Accelerator, is_accelerator

SPARED: Final = 0.05
"""Share of what is there that is left to the rest: caches, fragmentation, other programs."""
CRAMPED: Final = 3
"""Where a process's own limits leave less than this multiple of its budget, what malloc keeps of freed tensors has no room."""
RETURNED_BYTES: Final = 1 << 20
"""Blocks from this size on are given back to the kernel when they are freed, once malloc is told so."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_CGROUPS: Final = Path("/sys/fs/cgroup")
_NO_LIMIT: Final = 1 << 60
_FILES: Final = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
"""Limit and usage of a group, in both versions of control groups (docs.kernel.org/admin-guide/cgroup-v2.html)."""


def available_bytes(device: torch.device) -> int:
    """Bytes that tensors of a device may still take.

    Args:
        device: the CPU, or an accelerator.
    """
    if is_accelerator(device):
        found = Accelerator(device)
        return int((found.free_bytes() + found.idle_bytes()) * (1 - SPARED))
    return int(max(0, min(psutil.virtual_memory().available, _left_of_limits())) * (1 - SPARED))


def return_freed_memory(budget_bytes: int) -> bool:
    """Where the process's own limits leave little more than a budget, have malloc give freed tensors back at once.

    glibc raises the size from which a block is mapped by itself to as much as 32 MiB as such blocks are freed, after which
    tensors share a heap whose holes stay resident: under a budget of 151 MiB, examples/small_gpt.py reaches 760 MiB as it is
    and 630 MiB when freed blocks are returned. It costs page faults, 30 % of that step, so it is done only where a limit (a
    control group's, ``ulimit -d``, ``ulimit -v``) is near. Where there is an accelerator the budget may be a device's, beside
    which limits of the host say nothing. See ``M_MMAP_THRESHOLD`` in ``man 3 mallopt``.

    Args:
        budget_bytes: of tensors.

    Returns:
        Whether malloc was told so.
    """
    if accelerator.is_there() or _left_of_limits() >= CRAMPED * budget_bytes:
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not in musl or on macOS
    if mallopt is None:
        return False
    return all(mallopt(kind, RETURNED_BYTES) for kind in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD))


def groups() -> Iterator[tuple[int, int]]:
    """(limit, usage) in bytes of the control groups that the process is in and that have a limit, innermost first."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = _CGROUPS / "memory" if controllers else _CGROUPS
        at = root / path.lstrip("/")
        for folder in (at, *at.parents):
            if not folder.is_relative_to(root):
                break
            yield from _limit_of(folder)


def _limit_of(folder: Path) -> Iterator[tuple[int, int]]:
    for limit, usage in _FILES:
        try:
            most, used = (folder / limit).read_text().strip(), int((folder / usage).read_text())
        except (OSError, ValueError):
            continue
        if most != "max" and int(most) < _NO_LIMIT:
            yield int(most), used


def _left_of_limits() -> float:
    """Bytes that the process's own limits leave, those of its control groups among them; infinite where it has none."""
    return min([math.inf, *_left_of_ulimits(), *(limit - used for limit, used in groups())])


def _left_of_ulimits() -> Iterator[int]:
    """What ``ulimit -d`` and ``ulimit -v`` leave."""
    try:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    except OSError:
        return
    for kind, name in ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize")):
        most, _ = resource.getrlimit(kind)
        if most != resource.RLIM_INFINITY and name in status:
            yield most - (int(status[name].split()[0]) << 10)


def is_in_memory(folder: str | os.PathLike[str]) -> bool:
    """Whether files in a folder are memory themselves (tmpfs, ramfs): what is moved there is not freed.

    From the mount that holds the folder, by the longest match in ``/proc/self/mountinfo`` (``man 5 proc_pid_mountinfo``).
    """
    real = os.path.realpath(folder)
    best, kind = "", ""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    for line in lines:
        before, _, after = line.partition(" - ")
        mount = before.split()[4].encode().decode("unicode_escape")
        if len(mount) >= len(best) and (real == mount or real.startswith(mount.rstrip("/") + "/")):
            best, kind = mount, after.split()[0]
    return kind in ("tmpfs", "ramfs")
