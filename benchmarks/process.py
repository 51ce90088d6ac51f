"""What benchmarks share: a process with the heap counter, and the machine's name beside figures."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable, Iterator

import torch
from lowtide.runtime.device.heap_counters import library_path
from lowtide.runtime.device.heap_meter import counters


def with_counter() -> None:
    """Start the script again with the heap counter preloaded, where it is not."""
    if counters() is None:
        os.environ["LD_PRELOAD"] = str(library_path())
        os.execv(sys.executable, [sys.executable, *sys.argv])  # noqa: S606


def in_turns(variants: Iterable[str], turns: int) -> Iterator[str]:
    """All variants in each turn, which begins with another one each time."""
    order = list(variants)
    for turn in range(turns):
        first = turn % len(order)
        yield from (*order[first:], *order[:first])


def machine() -> dict[str, str | int | None]:
    """What figures were measured on."""
    return {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__}
