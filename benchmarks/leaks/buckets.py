"""Programs whose growth lies in one known bucket: ``python buckets.py BUCKET SEED`` runs one for 400 steps of about 32
KiB each.
"""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing.shared_memory
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from programs import KIB, steps, work

PIECE = 32 * KIB
_KEPT: list[Any] = []


def python(r: random.Random) -> None:
    """Small objects."""
    for step in steps():
        _KEPT.append([(step, i, str(i)) for i in range(PIECE // 150)])
        work(r)


def heap_in_use(r: random.Random) -> None:
    """Arrays."""
    for _ in steps():
        _KEPT.append(np.ones(PIECE // 8 + r.randint(0, 64)))
        work(r)


def heap_free(r: random.Random) -> None:
    """Blocks shrunk to stubs in place: what lies between the stubs is free, and too small for the blocks that come next."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = libc.realloc.restype = ctypes.c_void_p
    libc.realloc.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    last = None
    for step in steps():
        blocks = [libc.malloc(PIECE // 8 + 16 * step) for _ in range(8)]
        for block in blocks:
            ctypes.memset(ctypes.c_void_p(block), 1, PIECE // 8)
        for block in [last, *blocks[:-1]]:
            if block is not None:
                _KEPT.append(libc.realloc(block, 64))
        last = blocks[-1]
        work(r)


def anonymous_maps(r: random.Random) -> None:
    """Pages mapped beside malloc."""
    for _ in steps():
        pages = mmap.mmap(-1, PIECE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.write(b"x" * PIECE)
        _KEPT.append(pages)
        work(r)


def files(r: random.Random) -> None:
    """Files mapped and read."""
    with tempfile.TemporaryDirectory() as folder:
        for step in steps():
            path = Path(folder, str(step))
            path.write_bytes(b"x" * PIECE)
            with path.open("rb") as file:
                _KEPT.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            _KEPT[-1].read()
            work(r)


def shared(r: random.Random) -> None:
    """Shared memory."""
    try:
        for _ in steps():
            segment = multiprocessing.shared_memory.SharedMemory(create=True, size=PIECE)
            segment.buf[:] = b"x" * PIECE
            _KEPT.append(segment)
            work(r)
    finally:
        for segment in _KEPT:
            segment.close()
            segment.unlink()


BUCKETS: dict[str, Callable[[random.Random], None]] = {
    f.__name__: f for f in (python, heap_in_use, heap_free, anonymous_maps, files, shared)
}

if __name__ == "__main__":
    BUCKETS[sys.argv[1]](random.Random(int(sys.argv[2])))
