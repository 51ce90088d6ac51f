"""The script's peak statistics of a device stay correct, whatever windows Lowtide opens (the allocator is a fake)."""

from __future__ import annotations

import copy
from types import SimpleNamespace

from lowtide.runtime.device.peak_statistics import PeakStatistics


class Allocator(SimpleNamespace):
    """The functions of ``torch._C`` for one device."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._cuda_memoryStats = lambda index: copy.deepcopy(self.stats()) if index == 0 else {}
        self._cuda_resetPeakMemoryStats = lambda index: setattr(self, "peak", self.now)

    def stats(self):
        return {"allocated_bytes": {"all": {"current": self.now, "peak": self.peak}}, "num_ooms": 0}

    def take(self, size):
        self.now += size
        self.peak = max(self.peak, self.now)

    def script_peak(self):
        return self._cuda_memoryStats(0)["allocated_bytes"]["all"]["peak"]


def test_lowtides_resets_leave_the_scripts_peak():
    """After Lowtide's own reset, its window starts at the current bytes, while the script still reads the highest peak of all
    windows.
    """
    allocator = Allocator()
    ours = PeakStatistics(0, lambda: None, allocator)
    ours.install()
    allocator.take(100)
    allocator.take(-60)
    ours.reset()
    assert ours.allocated() == (40, 40)
    assert allocator.script_peak() == 100
    allocator.take(30)
    assert ours.allocated() == (70, 70)
    assert allocator.script_peak() == 100
    allocator.take(90)
    assert allocator.script_peak() == 160


def test_a_reset_by_the_script_is_announced_first_and_restarts_its_peak():
    """Lowtide reads its own peak before the script's reset takes effect; the script's peak then starts at the current bytes.
    """
    allocator, told = Allocator(), []
    ours = PeakStatistics(0, lambda: told.append(ours.allocated()[1]), allocator)
    ours.install()
    allocator.take(100)
    allocator.take(-90)
    ours.reset()
    allocator.take(20)
    allocator.take(-20)
    allocator._cuda_resetPeakMemoryStats(0)
    assert told == [30]
    assert allocator.script_peak() == 10


def test_removing_the_statistics_restores_torchs_functions():
    allocator = Allocator()
    before = allocator._cuda_memoryStats, allocator._cuda_resetPeakMemoryStats
    ours = PeakStatistics(0, lambda: None, allocator)
    ours.install()
    ours.remove()
    assert (allocator._cuda_memoryStats, allocator._cuda_resetPeakMemoryStats) == before


def test_other_devices_are_left_alone():
    allocator = Allocator()
    ours = PeakStatistics(0, lambda: None, allocator)
    ours.install()
    allocator.take(50)
    ours.reset()
    assert allocator._cuda_memoryStats(1) == {}
