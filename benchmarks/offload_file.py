"""What moving a value to and from the offload file takes: by ``pwrite`` and ``pread``, as Lowtide does, or through a mapping.

A mapping whose pages shall not stay resident in the process must be unmapped after each transfer (``MADV_DONTNEED``).
Each way has a file of its own, whose pages are in the page cache: the kernel makes them as large as what is first written to
them at once, which is one small page where that is done through a mapping. One thread; each figure is the best of some runs,
which take turns.

Prints a table and, with ``--json FILE``, writes every figure with the machine's name.
"""

from __future__ import annotations

import argparse
import json
import mmap
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

import torch
from lowtide.base.files import read_memory, reserve, write_memory
from lowtide.base.units import format_bytes
from process import machine

SIZES = [4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20]
RUNS = 15


def ways(file: int, mapped: mmap.mmap, size: int) -> dict[str, Callable[[], object]]:
    """The four transfers of ``size`` bytes, with one file for calls and a mapping of another one."""
    place = torch.frombuffer(mapped, dtype=torch.uint8)[:size]
    value, back = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)

    def unmap() -> None:
        mapped.madvise(mmap.MADV_DONTNEED, 0, size)

    return {
        "pwrite": lambda: write_memory(file, value.data_ptr(), size, 0),
        "written through a mapping": lambda: (place.copy_(value), unmap()),
        "pread": lambda: read_memory(file, back.data_ptr(), size, 0),
        "read through a mapping": lambda: (back.copy_(place), unmap()),
    }


def measure(size: int) -> dict[str, float]:
    """Seconds of each transfer."""
    with tempfile.TemporaryFile() as file, tempfile.TemporaryFile() as other:
        reserve(file.fileno(), size)
        reserve(other.fileno(), size)
        transfers = ways(file.fileno(), mmap.mmap(other.fileno(), size), size)
        best = dict.fromkeys(transfers, float("inf"))
        for run in range(RUNS + 1):
            for name, transfer in transfers.items():
                start = time.perf_counter()
                transfer()
                best[name] = min(best[name], time.perf_counter() - start) if run else best[name]
        return best


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {size: measure(size) for size in SIZES}
    table = Table("bytes", *next(iter(found.values())), title="microseconds")
    for size, seconds in found.items():
        table.add_row(format_bytes(size), *(f"{1e6 * s:.1f}" for s in seconds.values()))
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "seconds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
