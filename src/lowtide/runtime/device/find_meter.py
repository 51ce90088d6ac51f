"""Chooses the meter that counts this process's tensors; nothing else decides this."""

from __future__ import annotations

from collections.abc import Callable

from lowtide.runtime.device import accelerator
from lowtide.runtime.device.accelerator_meter import AcceleratorMeter
from lowtide.runtime.device.heap_meter import HeapMeter, counters
from lowtide.runtime.device.ledger_meter import LedgerMeter
from lowtide.runtime.device.memory_meter import Meter


def find_meter(tracked: Callable[[], int]) -> Meter:
    """The accelerator's meter if the script uses one that counts peaks; else the heap's; else the ledger's.

    Args:
        tracked: returns the bytes of all live storages that were seen; read only by the ledger's meter.
    """
    found = accelerator.in_use()
    if found is not None and found.counts_peaks:
        return AcceleratorMeter(found.device)
    heap = counters()
    return LedgerMeter(tracked) if heap is None else HeapMeter(heap)
