"""Law: the value evicted first costs least to bring back, per byte and per operator since its last use.

The device is a fake: its bytes are those of the values in memory, and the speed of its offload tier is set by the test.
"""

from __future__ import annotations

import pytest
import torch
from lowtide.planning.unit.problem import Bandwidth
from lowtide.runtime.budget import Budget
from lowtide.runtime.device.accelerator import HOST
from lowtide.runtime.device.memory_meter import Meter
from lowtide.runtime.online.eviction import Evictor
from lowtide.runtime.record.quiet_recorders import NO_UNIT
from lowtide.runtime.storage.ledger import Ledger
from lowtide.runtime.storage.op_schema import info_of
from lowtide.runtime.storage.value import Record, Value

KIB = 1 << 10
ZEROS = torch.ops.aten.zeros.default


class FakeMeter(Meter):
    """A device whose bytes are the ledger's; it refuses nothing."""

    exact = True
    capped = False
    device = HOST

    def __init__(self) -> None:
        self.ledger: Ledger | None = None

    def live(self) -> int:
        assert self.ledger is not None
        return sum(value.bytes for value in self.ledger.values())

    def op_peak(self) -> int:
        return self.live()

    def reset_op_peak(self) -> None:
        """There are no windows."""

    def span_peak(self) -> int:
        return self.live()

    def begin_span(self) -> None:
        """There are no windows."""

    def begin_operator(self) -> None:
        """There are no windows."""

    def counts(self, storage: torch.UntypedStorage) -> bool:
        return True


class FakeTicket:
    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._copy = storage.clone()

    def begin(self) -> None:
        """Nothing overlaps."""

    def fetch(self) -> torch.UntypedStorage:
        return self._copy.clone()


class FakeTier:
    """An offload tier of any speed, which can be set to be full."""

    overlaps = False

    def __init__(self, speed: float) -> None:
        self.speed, self.full = speed, False

    def measure(self) -> Bandwidth:
        return Bandwidth(write=self.speed, read=self.speed, read_fresh=self.speed)

    def put(self, storage: torch.UntypedStorage) -> FakeTicket:
        if self.full:
            raise OSError
        return FakeTicket(storage)


class SavedValues:
    """An evictor and the saved values that it may evict; each was made by one operator of its own."""

    def __init__(self, speed: float = 1.0) -> None:
        meter = FakeMeter()
        self.tier = FakeTier(speed)
        self.ledger = meter.ledger = Ledger(meter.counts)
        self.evictor = Evictor(meter, self.ledger, self.tier, Budget(), NO_UNIT)  # type: ignore[arg-type]
        self.values: dict[str, Value] = {}
        self.others: list[torch.Tensor] = []

    def save(self, name: str, size: int, *, seconds: float | None, held: bool = False) -> Value:
        """Let autograd save a value; with `seconds` None it cannot be recomputed."""
        made = ZEROS([size], dtype=torch.uint8)
        record = None
        if seconds is not None:
            record = Record(ZEROS, info_of(ZEROS), ([size],), {"dtype": torch.uint8}, [], len(self.values) + 1)
            record.seconds = seconds
        storage = made.untyped_storage()
        value = self.values[name] = self.ledger.enter(storage, record)
        self.evictor.made(_SITE, [value], [])
        self.evictor.saved(value, storage)
        if held:
            self.others.append(made)
        return value

    def there(self) -> set[str]:
        return {name for name, value in self.values.items() if value.storage() is not None}


class _Site:
    module = ""


_SITE = _Site()


def test_the_value_cheapest_per_byte_is_evicted_first() -> None:
    saved = SavedValues()
    saved.save("dear", 64 * KIB, seconds=1.0)
    saved.save("cheap", 64 * KIB, seconds=1e-6)
    saved.save("large", 256 * KIB, seconds=2e-6)
    for value in saved.values.values():
        value.touched = saved.evictor.clock
    assert saved.evictor.make_room(1) >= 1
    assert saved.there() == {"dear", "cheap"}, "a byte of the large one costs half as much"
    saved.evictor.make_room(1)
    assert saved.there() == {"dear"}


def test_the_value_unused_for_longest_is_evicted_first() -> None:
    saved = SavedValues()
    for name in "abc":
        saved.save(name, 64 * KIB, seconds=1e-3)
    saved.values["a"].touched = saved.evictor.clock
    saved.evictor.make_room(1)
    assert saved.there() == {"a", "c"}


def test_a_value_is_offloaded_where_that_is_faster_than_recomputing() -> None:
    saved = SavedValues(speed=1e9)
    moved, dropped = saved.save("moved", 64 * KIB, seconds=10.0), saved.save("dropped", 64 * KIB, seconds=1e-9)
    saved.evictor.make_room(128 * KIB)
    assert saved.there() == set()
    assert moved.ticket is not None
    assert dropped.ticket is None


@pytest.mark.parametrize("why", ["held", "busy", "small"])
def test_a_value_that_is_held_busy_or_small_is_not_evicted(why: str) -> None:
    saved = SavedValues(speed=1e9)
    value = saved.save("value", 1 * KIB if why == "small" else 64 * KIB, seconds=1e-9, held=why == "held")
    value.busy = int(why == "busy")
    assert saved.evictor.make_room(1) == 0
    assert saved.there() == {"value"}


def test_a_value_that_cannot_be_recomputed_stays_if_the_tier_is_full() -> None:
    """A full tier is not asked again."""
    saved = SavedValues(speed=1e9)
    saved.save("value", 64 * KIB, seconds=None)
    saved.tier.full = True
    assert saved.evictor.make_room(1) == 0
    assert not saved.evictor.moves, "a full saved is not asked again"
    assert saved.there() == {"value"}


def test_no_more_values_are_evicted_than_needed() -> None:
    saved = SavedValues()
    for i in range(8):
        saved.save(str(i), 64 * KIB, seconds=1e-3)
    freed = saved.evictor.make_room(3 * 64 * KIB)
    assert freed == 3 * 64 * KIB
    assert len(saved.there()) == 5
