"""What a process holds, read from inside it: allocators, Python's own arenas, the kernel's account. Linux; standard
library only.

A counter that cannot be read here is ``ABSENT``. Reading costs some microseconds each; :class:`Gate` keeps the share of time
that goes into it bounded.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, final

ABSENT: Final = -1
SHARE: Final = 0.001
"""Of the running time, what each gated reading may take."""
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")

COLUMNS: Final = (
    "time_ns",
    "kind",
    "heap_bytes",  # blocks of malloc in use, as the preloaded counter has it
    "tensor_bytes",  # of these, torch's
    "peak_bytes",  # highest in the step of the first of these two
    "system_bytes",  # what malloc has from the system
    "used_bytes",  # of this, in use as malloc has it
    "python_bytes",  # blocks of Python's small-object allocator in use
    "python_blocks",
    "arena_bytes",  # what that allocator has from the system
    "touched_bytes",  # of this, what it has begun to use
    "private_bytes",  # virtual: private writable maps, those of malloc and Python among them
    "virtual_bytes",  # virtual: all maps
    "resident_bytes",
    "anonymous_bytes",  # of these, anonymous
    "file_bytes",
    "shared_bytes",
    "segments_bytes",  # files in /dev/shm, all of the machine's
    "unique_bytes",
    "proportional_bytes",
    "cuda_allocated_bytes",
    "cuda_reserved_bytes",
    "children",  # how many other processes the program has
    "children_bytes",  # unique to each of them when it was first seen, and what it took since, all together
)
"""One row of samples."""
INDEX: Final = {name: i for i, name in enumerate(COLUMNS)}


@final
class Gate:
    """Says when a reading that costs time is due again."""

    __slots__ = ("_cost", "_count", "_every", "_next")

    def __init__(self, every: int = 0) -> None:
        """Due now.

        Args:
            every: calls after which the reading is due whatever it costs; 0 for never.
        """
        self._cost, self._next = 0, 0
        self._every, self._count = every, 0

    def due(self, now_ns: int) -> bool:
        """Whether the reading may be taken."""
        self._count += 1
        return now_ns >= self._next or self._count == self._every

    def took(self, began_ns: int) -> None:
        """The reading was taken: wait until its cost is a small share of the time that went by."""
        now = time.perf_counter_ns()
        spent = now - began_ns
        self._cost = spent if not self._cost else min((3 * self._cost + spent) // 4, 2 * self._cost)
        self._next, self._count = began_ns + int(self._cost / SHARE), 0


class _Mallinfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    ]


@final
class Allocators:
    """Malloc, and Python's allocator of small objects."""

    def __init__(self) -> None:
        """Find what this process has."""
        self._libc = ctypes.CDLL(None)
        self._mallinfo: Any = getattr(self._libc, "mallinfo2", None)
        if self._mallinfo is not None:
            self._mallinfo.restype = _Mallinfo
        self._heap, self._tensor, self._peak = self._counted()
        self._print = self._printer()

    def _counted(self) -> tuple[Any, Any, Any]:
        """The preloaded counter's cells (``probe/heap.c``: ``heap_live``, ``tensor_live``, ``heap_peak``)."""
        with contextlib.suppress(ValueError):
            base = ctypes.addressof((ctypes.c_int64 * 8).in_dll(self._libc, "lowtide_heap"))
            heap, tensor, peak = (ctypes.c_int64.from_address(base + 8 * i) for i in (6, 1, 7))
            return heap, tensor, peak
        return None, None, None

    def _printer(self) -> Callable[[], bytes] | None:
        """CPython's own account of its small-object allocator, as it prints it."""
        if not hasattr(ctypes.pythonapi, "_PyObject_DebugMallocStats") or not hasattr(self._libc, "open_memstream"):
            return None
        opened, closed, freed = self._libc.open_memstream, self._libc.fclose, self._libc.free
        opened.restype, opened.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_void_p)
        closed.argtypes = freed.argtypes = (ctypes.c_void_p,)
        account = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(("_PyObject_DebugMallocStats", ctypes.pythonapi))

        def printed() -> bytes:
            text, length = ctypes.c_void_p(), ctypes.c_size_t()
            stream = opened(ctypes.byref(text), ctypes.byref(length))
            account(stream)
            closed(stream)
            found = ctypes.string_at(text, length.value) if text.value else b""
            freed(text)
            return found

        return printed

    def live(self) -> tuple[int, int]:
        """Bytes in use of malloc, and of torch's tensors, from the preloaded counter."""
        return (ABSENT, ABSENT) if self._heap is None else (self._heap.value, self._tensor.value)

    def peak(self) -> int:
        """Highest point of what malloc has in use since this was last asked."""
        if self._heap is None:
            return ABSENT
        peak = self._peak.value
        self._peak.value = self._heap.value
        return int(peak)

    def malloc(self) -> tuple[int, int]:
        """What malloc has from the system, and what of it is in use (glibc's; small cached blocks count as in use)."""
        if self._mallinfo is None:
            return ABSENT, ABSENT
        info = self._mallinfo()
        return info.arena + info.hblkhd, info.uordblks + info.hblkhd

    def mapped(self) -> int:
        """What of malloc's lies in maps of its own, one per large block."""
        return ABSENT if self._mallinfo is None else int(self._mallinfo().hblkhd)

    def python(self) -> tuple[int, int, int, int]:
        """Bytes in blocks, blocks, bytes of arenas, and of these as far as they have been used."""
        blocks = sys.getallocatedblocks()
        text = b"" if self._print is None else self._print()
        used = _figure(text, b"# bytes in allocated blocks ")
        if used is None:
            return (ABSENT, blocks, ABSENT, ABSENT) if blocks else (0, 0, 0, 0)
        untouched = re.search(rb"(\d+) unused pools \* (\d+) bytes", text)
        arenas = re.search(rb"(\d+) arenas \* (\d+) bytes/arena", text)
        total = int(arenas[1]) * int(arenas[2]) if arenas else 0
        return used, blocks, total, total - (int(untouched[1]) * int(untouched[2]) if untouched else 0)

    def trim(self) -> None:
        """Have malloc give back what it can."""
        with contextlib.suppress(AttributeError):
            self._libc.malloc_trim(0)


def _figure(text: bytes, name: bytes) -> int | None:
    at = text.find(name)
    if at < 0:
        return None
    return int(text[text.index(b"=", at) + 1 : text.index(b"\n", at)].replace(b",", b""))


@final
class Kernel:
    """The kernel's account of this process."""

    _LINES: Final = (b"RssAnon:", b"RssFile:", b"RssShmem:")

    def __init__(self) -> None:
        """Open what is read again and again."""
        self._pid = 0
        self._open()

    def _open(self) -> None:
        self._pid = os.getpid()
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._status = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)

    def maps(self) -> tuple[int, int, int]:
        """Bytes of private writable maps, of all maps, and resident."""
        if os.getpid() != self._pid:
            self._open()
        fields = os.pread(self._statm, 128, 0).split()
        return int(fields[5]) * _PAGE, int(fields[0]) * _PAGE, int(fields[1]) * _PAGE

    def resident(self) -> tuple[int, int, int]:
        """Resident bytes: anonymous, of files, shared."""
        text = os.pread(self._status, 4096, 0)
        found = []
        for name in self._LINES:
            at = text.find(name)
            found.append(int(text[at + len(name) : text.index(b"kB", at)]) * 1024 if at >= 0 else ABSENT)
        return found[0], found[1], found[2]

    @staticmethod
    def segments() -> int:
        """Bytes taken in ``/dev/shm``."""
        try:
            found = os.statvfs("/dev/shm")  # noqa: S108 - it is what is measured
        except OSError:
            return ABSENT
        return (found.f_blocks - found.f_bfree) * found.f_frsize

    @staticmethod
    def shares() -> tuple[int, int]:
        """Unique and proportional set size, bytes."""
        return set_sizes(os.getpid())


def set_sizes(pid: int) -> tuple[int, int]:
    """Unique and proportional set size of a process, bytes; the kernel walks its pages for it."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            text = file.read()
    except OSError:
        return ABSENT, ABSENT
    sizes = {}
    for line in text.splitlines()[1:]:
        name, _, rest = line.partition(b":")
        sizes[name] = int(rest.split()[0]) * 1024
    return sizes.get(b"Private_Clean", 0) + sizes.get(b"Private_Dirty", 0), sizes.get(b"Pss", ABSENT)


def pages(pid: int) -> tuple[int, int]:
    """Resident bytes of a process, and of these what is mapped from no file and is no shared memory."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            fields = file.read().split()
    except OSError:
        return 0, 0
    return (int(fields[1]) * _PAGE, (int(fields[1]) - int(fields[2])) * _PAGE) if len(fields) > 2 else (0, 0)


@final
class Shares:
    """Unique and proportional set size of some processes: walked now and then, and in between by what their pages of no file
    have grown by.
    """

    def __init__(self, cost: int) -> None:
        """Nothing is read yet.

        Args:
            cost: pages are walked no more often than takes one part in so many of the time, but at once for a new process.
        """
        self._cost = cost
        self._unique = self._proportional = 0
        self._walked: dict[int, int] = {}
        self._next = 0.0

    def read(self, pids: Sequence[int], *, exactly: bool = False) -> tuple[int, int, int]:
        """Unique, proportional and resident bytes of all together; ``exactly`` walks whatever that costs."""
        found = {pid: pages(pid) for pid in pids}
        spent = time.thread_time()
        if exactly or time.monotonic() >= self._next or not self._walked.keys() >= found.keys():
            sizes = [set_sizes(pid) for pid in pids]
            self._unique, self._proportional = (sum(max(0, s[i]) for s in sizes) for i in (0, 1))
            self._walked = {pid: private for pid, (_, private) in found.items()}
            self._next = time.monotonic() + self._cost * (time.thread_time() - spent)
        # a process that has gone gave back what it had since: that is seen at the next walk
        grown = sum(found[pid][1] - then for pid, then in self._walked.items() if pid in found)
        resident = sum(size for size, _ in found.values())
        return max(0, self._unique + grown), max(0, self._proportional + grown), resident


def cuda() -> tuple[int, int]:
    """Bytes allocated and reserved by torch on all CUDA devices in use."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda") or not torch.cuda.is_initialized():
        return ABSENT, ABSENT
    devices = range(torch.cuda.device_count())
    return sum(torch.cuda.memory_allocated(d) for d in devices), sum(torch.cuda.memory_reserved(d) for d in devices)


_MAPPED: Final = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ (\d+) *(.*)$")
_THREAD_HEAP: Final = 64 * 1024**2
"""Heaps of malloc's further arenas begin at multiples of this and reserve as much (``HEAP_MAX_SIZE`` of glibc, 64 bits)."""
_MEMORY: Final = ("/dev/shm", "/memfd:", "/dev/zero", "/SYSV")  # noqa: S108 - the names of shared memory
_PATHS: Final = 40
"""Files named; the largest."""


def books() -> dict[str, Any]:
    """Resident bytes by what they are mapped from: ``heap`` (malloc's own), ``anonymous``, ``stack``, ``files``, ``shared``.

    Read from ``/proc/self/smaps``; takes some ten milliseconds, so it is for a few audits, not for every step.
    """
    maps: list[tuple[int, int, bytes, int, str]] = []
    held: list[list[int]] = []
    with open("/proc/self/smaps", "rb") as file:
        for line in file:
            header = _MAPPED.match(line)
            if header is not None:
                path = header[5].decode(errors="replace")
                maps.append((int(header[1], 16), int(header[2], 16), header[3], int(header[4]), path))
                held.append([0, 0])
            elif line.startswith(b"Rss:"):
                held[-1][0] = int(line.split()[1]) * 1024
            elif line.startswith(b"Anonymous:"):
                held[-1][1] = int(line.split()[1]) * 1024
    sizes = dict.fromkeys(("heap", "anonymous", "stack", "files", "shared"), 0)
    paths: dict[str, int] = {}
    for i, (start, end, mode, inode, path) in enumerate(maps):
        resident, own = held[i]
        if path == "[heap]":
            sizes["heap"] += resident
        elif path.startswith("[stack"):
            sizes["stack"] += resident
        elif inode or mode.endswith(b"s"):  # private pages of a file that were written are anonymous
            sizes["shared" if mode.endswith(b"s") and path.startswith(_MEMORY) else "files"] += resident - own
            sizes["anonymous"] += own
            paths[path] = paths.get(path, 0) + resident - own
        else:
            rest = maps[i + 1] if i + 1 < len(maps) else None
            reserved = rest is not None and rest[0] == end and rest[2].startswith(b"---") and not rest[1] % _THREAD_HEAP
            thread = not start % _THREAD_HEAP and (reserved or end - start == _THREAD_HEAP)
            sizes["heap" if thread else "anonymous"] += resident
    top = sorted(((size, path) for path, size in paths.items() if size), reverse=True)[:_PATHS]
    return {**sizes, "paths": {path: size for size, path in top}}
