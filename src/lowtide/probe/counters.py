"""Reads a process's memory from inside it: malloc, Python's allocator, CUDA, the kernel's figures.

Linux; standard library only.
A counter that cannot be read here is ``ABSENT``. Each reading costs some microseconds; :class:`Gate` bounds the share of time
that readings take.
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
"""Share of the running time that each gated reading may take."""
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")

COLUMNS: Final = (
    "time_ns",
    "kind",
    "heap_bytes",  # malloc's blocks in use, from the preloaded counter
    "tensor_bytes",  # torch's among them
    "peak_bytes",  # peak of heap_bytes within the step
    "system_bytes",  # what malloc has taken from the system
    "used_bytes",  # the part of it that malloc says is in use
    "python_bytes",  # blocks in use in Python's small-object allocator
    "python_blocks",
    "arena_bytes",  # what that allocator has taken from the system
    "touched_bytes",  # the part of it that has been used so far
    "private_bytes",  # virtual: private writable mappings, including malloc's and Python's
    "virtual_bytes",  # virtual: all mappings
    "resident_bytes",
    "anonymous_bytes",  # the anonymous part of it
    "file_bytes",
    "shared_bytes",
    "segments_bytes",  # files in /dev/shm, of the whole machine
    "unique_bytes",
    "proportional_bytes",
    "cuda_allocated_bytes",
    "cuda_reserved_bytes",
    "children",  # number of the program's other processes
    "children_bytes",  # sum over them: unique bytes when first seen, plus what each has taken since
)
"""Columns of one row of samples."""
INDEX: Final = {name: i for i, name in enumerate(COLUMNS)}


@final
class Gate:
    """Says when a costly reading is due again."""

    __slots__ = ("_cost", "_count", "_every", "_next")

    def __init__(self, every: int = 0) -> None:
        """Start with the reading due.

        Args:
            every: calls of :meth:`due` after which the reading is due whatever it costs; 0 for no such limit.
        """
        self._cost, self._next = 0, 0
        self._every, self._count = every, 0

    def due(self, now_ns: int) -> bool:
        """Whether the reading is due; counts the call."""
        self._count += 1
        return now_ns >= self._next or self._count == self._every

    def took(self, began_ns: int) -> None:
        """Note that the reading was taken: it is due again once its average cost is at most `SHARE` of the elapsed time."""
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
    """Figures of malloc and of Python's small-object allocator."""

    def __init__(self) -> None:
        """Find the counters that this process has."""
        self._libc = ctypes.CDLL(None)
        self._mallinfo: Any = getattr(self._libc, "mallinfo2", None)
        if self._mallinfo is not None:
            self._mallinfo.restype = _Mallinfo
        self._heap, self._tensor, self._peak = self._counted()
        self._print = self._printer()

    def _counted(self) -> tuple[Any, Any, Any]:
        """The fields ``heap_live``, ``tensor_live`` and ``heap_peak`` of the preloaded counter (``probe/heap.c``)."""
        with contextlib.suppress(ValueError):
            base = ctypes.addressof((ctypes.c_int64 * 8).in_dll(self._libc, "lowtide_heap"))
            heap, tensor, peak = (ctypes.c_int64.from_address(base + 8 * i) for i in (6, 1, 7))
            return heap, tensor, peak
        return None, None, None

    def _printer(self) -> Callable[[], bytes] | None:
        """A function that returns CPython's report on its small-object allocator, as text."""
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
        """Bytes in use in malloc's heap, and in torch's tensors, from the preloaded counter."""
        return (ABSENT, ABSENT) if self._heap is None else (self._heap.value, self._tensor.value)

    def peak(self) -> int:
        """Peak of the bytes in use in malloc's heap since the last call."""
        if self._heap is None:
            return ABSENT
        peak = self._peak.value
        self._peak.value = self._heap.value
        return int(peak)

    def malloc(self) -> tuple[int, int]:
        """Bytes that glibc's malloc has taken from the system, and bytes of them in use (small cached blocks included)."""
        if self._mallinfo is None:
            return ABSENT, ABSENT
        info = self._mallinfo()
        return info.arena + info.hblkhd, info.uordblks + info.hblkhd

    def mapped(self) -> int:
        """Bytes of malloc's large blocks, each of which has a mapping of its own."""
        return ABSENT if self._mallinfo is None else int(self._mallinfo().hblkhd)

    def python(self) -> tuple[int, int, int, int]:
        """Python's small objects: bytes in blocks, number of blocks, bytes of arenas, and bytes of arenas used so far."""
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
        """Have malloc return free memory to the system."""
        with contextlib.suppress(AttributeError):
            self._libc.malloc_trim(0)


def _figure(text: bytes, name: bytes) -> int | None:
    at = text.find(name)
    if at < 0:
        return None
    return int(text[text.index(b"=", at) + 1 : text.index(b"\n", at)].replace(b",", b""))


@final
class Kernel:
    """The kernel's figures for this process."""

    _LINES: Final = (b"RssAnon:", b"RssFile:", b"RssShmem:")

    def __init__(self) -> None:
        """Open the files of ``/proc`` that are read repeatedly."""
        self._pid = 0
        self._open()

    def _open(self) -> None:
        self._pid = os.getpid()
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._status = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)

    def maps(self) -> tuple[int, int, int]:
        """Bytes of private writable mappings, of all mappings, and resident."""
        if os.getpid() != self._pid:
            self._open()
        fields = os.pread(self._statm, 128, 0).split()
        return int(fields[5]) * _PAGE, int(fields[0]) * _PAGE, int(fields[1]) * _PAGE

    def resident(self) -> tuple[int, int, int]:
        """Resident bytes: anonymous, file-backed, and shared memory."""
        text = os.pread(self._status, 4096, 0)
        found = []
        for name in self._LINES:
            at = text.find(name)
            found.append(int(text[at + len(name) : text.index(b"kB", at)]) * 1024 if at >= 0 else ABSENT)
        return found[0], found[1], found[2]

    @staticmethod
    def segments() -> int:
        """Bytes in use in ``/dev/shm``."""
        try:
            found = os.statvfs("/dev/shm")  # noqa: S108 - this is the folder to measure
        except OSError:
            return ABSENT
        return (found.f_blocks - found.f_bfree) * found.f_frsize

    @staticmethod
    def shares() -> tuple[int, int]:
        """Unique and proportional set size, bytes."""
        return set_sizes(os.getpid())


def set_sizes(pid: int) -> tuple[int, int]:
    """Unique and proportional set size of a process, in bytes; the kernel walks its pages for them."""
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
    """Resident bytes of a process, and the anonymous bytes among them (neither file-backed nor shared memory)."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            fields = file.read().split()
    except OSError:
        return 0, 0
    return (int(fields[1]) * _PAGE, (int(fields[1]) - int(fields[2])) * _PAGE) if len(fields) > 2 else (0, 0)


@final
class Shares:
    """Unique and proportional set sizes of several processes together.

    The kernel walks their pages from time to time; in between, the growth of their anonymous resident bytes is added.
    """

    def __init__(self, cost: int) -> None:
        """Read nothing yet.

        Args:
            cost: page walks take at most one part in `cost` of the time, but a new process is walked at once.
        """
        self._cost = cost
        self._unique = self._proportional = 0
        self._walked: dict[int, int] = {}
        self._next = 0.0

    def read(self, pids: Sequence[int], *, exactly: bool = False) -> tuple[int, int, int]:
        """Unique, proportional and resident bytes of all processes together; ``exactly`` walks their pages at any cost."""
        found = {pid: pages(pid) for pid in pids}
        spent = time.thread_time()
        if exactly or time.monotonic() >= self._next or not self._walked.keys() >= found.keys():
            sizes = [set_sizes(pid) for pid in pids]
            self._unique, self._proportional = (sum(max(0, s[i]) for s in sizes) for i in (0, 1))
            self._walked = {pid: private for pid, (_, private) in found.items()}
            self._next = time.monotonic() + self._cost * (time.thread_time() - spent)
        # what an ended process had at the last walk stays counted until the next one
        grown = sum(found[pid][1] - then for pid, then in self._walked.items() if pid in found)
        resident = sum(size for size, _ in found.values())
        return max(0, self._unique + grown), max(0, self._proportional + grown), resident


def cuda() -> tuple[int, int]:
    """Bytes that torch has allocated and reserved, on all CUDA devices together."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda") or not torch.cuda.is_initialized():
        return ABSENT, ABSENT
    devices = range(torch.cuda.device_count())
    return sum(torch.cuda.memory_allocated(d) for d in devices), sum(torch.cuda.memory_reserved(d) for d in devices)


_MAPPED: Final = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ (\d+) *(.*)$")
_THREAD_HEAP: Final = 64 * 1024**2
"""Heaps of malloc's thread arenas begin at multiples of this many bytes and reserve as many (glibc's ``HEAP_MAX_SIZE`` on
64-bit systems)."""
_MEMORY: Final = ("/dev/shm", "/memfd:", "/dev/zero", "/SYSV")  # noqa: S108 - how names of shared memory begin
_PATHS: Final = 40
"""Most files listed, the largest first."""


def books() -> dict[str, Any]:
    """Resident bytes by kind of mapping: ``heap`` (malloc's arenas), ``anonymous``, ``stack``, ``files``, ``shared``.

    ``paths`` lists the largest mapped files. Read from ``/proc/self/smaps``, which takes about ten milliseconds: fit for a few
    audits, not for every step.
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
        elif inode or mode.endswith(b"s"):  # a file's private pages become anonymous once written
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
