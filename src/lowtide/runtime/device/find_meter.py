"""Which meter counts this process's tensors: the one place where that is decided."""

from __future__ import annotations

from collections.abc import Callable

from lowtide.runtime.device import accelerator
from lowtide.runtime.device.accelerator_meter import AcceleratorMeter
from lowtide.runtime.device.heap_meter import HeapMeter, counters
from lowtide.runtime.device.ledger_meter import LedgerMeter
from lowtide.runtime.device.memory_meter import Meter


def find_meter(tracked: Callable[[], int]) -> Meter:
    """The accelerator's, if the script uses one; else the heap's; else one that sums what was seen.

    Args:
        tracked: tells the bytes that were seen, where nothing counts them.
    """
    found = accelerator.in_use()
    if found is not None and found.counts_peaks:
        return AcceleratorMeter(found.device)
    heap = counters()
    return LedgerMeter(tracked) if heap is None else HeapMeter(heap)
