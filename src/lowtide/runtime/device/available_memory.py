"""Bytes that a process may still allocate within the limits of machine, control groups, ulimits and device."""

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
"""Share of the available bytes that is left to caches, fragmentation and other programs."""
CRAMPED: Final = 3
"""If a process's own limits leave less than this multiple of its budget, malloc has no room to keep freed tensors."""
RETURNED_BYTES: Final = 1 << 20
"""Freed blocks of at least this size go back to the kernel, after :func:`return_freed_memory` has configured malloc."""
_KEPT_BYTES: Final = 32 << 20
"""glibc raises the threshold for separate maps up to this size, and that for returning the heap's end to twice as much."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_CGROUPS: Final = Path("/sys/fs/cgroup")
_NO_LIMIT: Final = 1 << 60
_FILES: Final = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
"""Files with a group's limit and usage, for both versions of control groups (docs.kernel.org/admin-guide/cgroup-v2.html)."""


def available_bytes(device: torch.device) -> int:
    """Bytes that tensors on a device may still allocate, less the share `SPARED`.

    Args:
        device: the CPU, or an accelerator.
    """
    if is_accelerator(device):
        found = Accelerator(device)
        return int((found.free_bytes() + found.idle_bytes()) * (1 - SPARED))
    return int(max(0, min(psutil.virtual_memory().available, _left_of_limits())) * (1 - SPARED))


def return_freed_memory(budget_bytes: int) -> bool:
    """Make malloc return freed tensors to the kernel at once if the process's own limits leave little more than the budget.

    glibc maps large blocks separately. As such blocks are freed, it raises the threshold for this to as much as 32 MiB; after
    that, tensors share a heap whose holes stay resident. Under a budget of 151 MiB, examples/small_gpt.py reaches 760 MiB by
    default, and 630 MiB if freed blocks are returned. Returning them costs page faults, 30 % of that step, so this is done
    only if a limit (a control group's, ``ulimit -d``, ``ulimit -v``) is near. It is never done on a machine with an
    accelerator: there the budget may be the device's, and the host's limits say nothing about it. See ``M_MMAP_THRESHOLD`` in
    ``man 3 mallopt``.

    Args:
        budget_bytes: budget of the tensors.

    Returns:
        Whether malloc was configured so.
    """
    if accelerator.is_there() or _left_of_limits() >= CRAMPED * budget_bytes:
        return False
    return _configure_malloc(RETURNED_BYTES, RETURNED_BYTES)


def return_freed_memory_for_now(*, returned: bool) -> None:
    """Make malloc return freed tensors to the kernel, its holes included; or if not ``returned``, let it keep them again.

    It then keeps what glibc itself comes to keep after a large tensor was freed: see :func:`return_freed_memory`.
    """
    if _configure_malloc(*((RETURNED_BYTES, RETURNED_BYTES) if returned else (_KEPT_BYTES, 2 * _KEPT_BYTES))) and returned:
        ctypes.CDLL(None).malloc_trim(0)


def _configure_malloc(mapped_bytes: int, trimmed_bytes: int) -> bool:
    """Map blocks from this size on separately, and return so large an end of the heap; returns whether malloc did so."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not in musl or on macOS
    return bool(mallopt and mallopt(_M_MMAP_THRESHOLD, mapped_bytes) and mallopt(_M_TRIM_THRESHOLD, trimmed_bytes))


def groups() -> Iterator[tuple[int, int]]:
    """(limit, usage without idle page cache) in bytes of each control group that limits the process, innermost first."""
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
            yield int(most), max(0, used - _idle_cache_of(folder))


def _idle_cache_of(folder: Path) -> int:
    """Bytes of a group's page cache that was not used lately: they count as its usage, but the kernel gives them up."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
        found = dict(line.split() for line in lines)
        return int(found.get("total_inactive_file", found.get("inactive_file", 0)))
    except (OSError, ValueError):
        return 0


def _left_of_limits() -> float:
    """Bytes left below the process's own limits, including its control groups'; infinite if it has no limit."""
    return min([math.inf, *_left_of_ulimits(), *(limit - used for limit, used in groups())])


def _left_of_ulimits() -> Iterator[int]:
    """Bytes left below ``ulimit -d`` and ``ulimit -v``."""
    try:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    except OSError:
        return
    for kind, name in ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize")):
        most, _ = resource.getrlimit(kind)
        if most != resource.RLIM_INFINITY and name in status:
            yield most - (int(status[name].split()[0]) << 10)


def is_in_memory(folder: str | os.PathLike[str]) -> bool:
    """Whether files in a folder are in memory (tmpfs, ramfs), so that moving bytes there frees nothing.

    Found from the folder's mount: the longest match in ``/proc/self/mountinfo`` (``man 5 proc_pid_mountinfo``).
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
