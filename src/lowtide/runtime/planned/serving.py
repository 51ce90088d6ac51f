"""Serves the needs of a unit that follows a plan: fetches or recomputes the values that are away."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

import torch
from lowtide.runtime.device.file_tier import FileTier
from lowtide.runtime.device.pinned_tier import PinnedTier
from lowtide.runtime.planned.compiled_plan import CompiledPlan
from lowtide.runtime.planned.timing import Stopwatch
from lowtide.runtime.replay.chain import remake
from lowtide.runtime.run_figures import StepTally
from lowtide.runtime.storage.value import Record, Value
from lowtide.runtime.storage.views import as_bytes
from lowtide.runtime.tensors import beneath_autograd

if TYPE_CHECKING:
    from lowtide.runtime.online.eviction import Evictor


@final
class PlannedRun:
    """Serves the needs of one planned unit as the plan says, for as long as its handles live.

    Attributes:
        evictor: makes room for replays once the unit has left its plan; None before: the plan has left room for them.
    """

    def __init__(
        self, script: CompiledPlan, tally: StepTally, tier: FileTier | PinnedTier, stopwatch: Stopwatch | None = None
    ) -> None:
        """Start with no value saved; ``stopwatch`` times the unit, if given."""
        self.script = script
        self.tally = tally
        self.tier = tier
        self.stopwatch = stopwatch
        self.values: Mapping[int, Value] = {}
        self.evictor: Evictor | None = None
        self._served: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def serve(self, value: Value) -> torch.UntypedStorage:
        """The storage of a value at its next need, fetched or recomputed if the value is away.

        Raises:
            ReplayError: if the value cannot be recomputed.
        """
        key = (value.number, value.touched)
        value.touched += 1
        storage = value.storage()
        if storage is None and self.stopwatch is not None:
            storage = self._timed(value, key, self.stopwatch)
        elif storage is None:
            storage = remake(value, _Replayer(self.script.holds.get(key, frozenset()), self))
        self._served[storage._cdata] = weakref.ref(storage)
        if key not in self.script.stays and (value.record is not None or value.ticket is not None):
            value.tensor = None
        elif value.tensor is None:
            value.tensor = as_bytes(storage)
        for number in self.script.ahead.get(key, ()):
            self._begin_fetch(number)
        return storage

    def _timed(self, value: Value, key: tuple[int, int], stopwatch: Stopwatch) -> torch.UntypedStorage:
        """Bring a value back, and note what that takes besides the operators and transfers themselves."""
        tally = self.tally
        before, count, start = tally.recompute_seconds + tally.offload_seconds, tally.recomputed_ops, time.perf_counter()
        storage = remake(value, _Replayer(self.script.holds.get(key, frozenset()), self))
        besides = time.perf_counter() - start - (tally.recompute_seconds + tally.offload_seconds - before)
        stopwatch.serving.append((tally.recomputed_ops - count, besides))
        return storage

    def has_served(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage was served for a saved tensor, and may be asked for again: without Lowtide, autograd holds it."""
        found = self._served.get(storage._cdata)
        return found is not None and found() is storage

    def make_again(self, value: Value) -> torch.UntypedStorage:
        """The storage of a value that is away, before backward asks for it; holds no intermediate values.

        Raises:
            ReplayError: if the value cannot be recomputed.
        """
        return remake(value, _Replayer(frozenset(), self))

    def _begin_fetch(self, number: int) -> None:
        value = self.values.get(number)
        if value is not None and value.ticket is not None and value.storage() is None:
            with beneath_autograd():
                value.ticket.begin()
            self.tally.fetched_ahead += 1


@final
class _Replayer:
    """Brings values back as planned: the plan has decided which intermediates to hold, and has left room for them.

    A unit that has left its plan makes room as online.
    """

    def __init__(self, holds: frozenset[int], run: PlannedRun) -> None:
        self._holds = holds
        self._tally = run.tally
        self._stopwatch = run.stopwatch
        self._evictor = run.evictor

    def attach(self, value: Value, storage: torch.UntypedStorage) -> None:
        value.weak = weakref.ref(storage)  # type: ignore[assignment]

    def hold(self, value: Value) -> bool:
        return value.number in self._holds

    def call(self, record: Record, args: Any, kwargs: Any) -> Any:
        if self._evictor is not None:
            return self._evictor.operators.call(record.func, record.info, args, kwargs)
        return record.func(*args, **kwargs)

    def room(self, size: int) -> None:
        if self._evictor is not None:
            self._evictor.room_for(size)

    def ran(self, record: Record, seconds: float) -> None:
        self._tally.recomputed_ops += 1
        self._tally.recompute_seconds += seconds
        if self._stopwatch is not None:
            self._stopwatch.again.setdefault(record.order - 1, []).append(seconds)

    def fetched(self, value: Value, seconds: float) -> None:
        self._tally.offload_seconds += seconds
        if self._stopwatch is not None:
            self._stopwatch.read.append((value.bytes, seconds))

    def taken(self, value: Value) -> None:
        value.weak = None
