"""The online evictor: drops or offloads values when an operator would cross the limit or runs out of memory.

Values are evicted in the order of the cost from Dynamic Tensor Rematerialization (Kirisame et al., ICLR 2021,
arXiv 2006.09616): the seconds to bring a value back, divided by its bytes and by the time since its last use. Here a value may
also be offloaded, where that is faster than recomputing it.

One module: the rules for what may leave, in what order, and how it comes back all work on the same bookkeeping (what is kept,
what is away, what only records hold), which must be consistent after each of them.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, final

import torch
from lowtide.base.errors import ReplayError
from lowtide.base.trace import Site
from lowtide.planning.unit.problem import Bandwidth
from lowtide.runtime.budget import SLACK_BYTES, Budget
from lowtide.runtime.device.file_tier import FileTier
from lowtide.runtime.device.memory_meter import Meter
from lowtide.runtime.device.offload import Shared
from lowtide.runtime.device.pinned_tier import PinnedTier
from lowtide.runtime.online.holders import Holder, LeftPlan
from lowtide.runtime.online.kept_modules import KeptModules
from lowtide.runtime.online.lineage import (
    anchors_behind,
    by_storage,
    depends,
    held_alone,
    made_from,
    made_from_anchors,
    verify,
)
from lowtide.runtime.online.retry import OperatorRetry
from lowtide.runtime.online.saved_queue import SavedTensorQueue
from lowtide.runtime.replay.chain import remake
from lowtide.runtime.run_figures import StepTally
from lowtide.runtime.storage.checksum import checksum
from lowtide.runtime.storage.ledger import Ledger
from lowtide.runtime.storage.value import Anchor, Record, Value
from lowtide.runtime.storage.views import UNHELD, as_bytes, python_references, sole_owner
from lowtide.runtime.tensors import beneath_autograd

if TYPE_CHECKING:
    from lowtide.runtime.record.trace_recorder import TraceRecorder

SMALLEST_BYTES = 2048
"""Values below this size are never evicted: the bookkeeping would cost more than it frees."""

ASSUMED = Bandwidth(write=10e9, read=10e9, read_fresh=10e9)
"""Bytes per second assumed between a device and pinned memory, without room to measure: PCIe 3.0 x16 reaches about 12e9."""
INTERCEPTED_SECONDS = 50e-6
"""What the interception is assumed to add to each operator that is run again, and to each value that is moved, until the first
planned unit has shown it: recording and serving are some hundred lines of Python."""


@final
class Evictor:
    """Drops and offloads saved values so that operators fit.

    Its many fields are the bookkeeping of values (kept, away, dropped by plan, held only by records) and the parts that it
    works with.

    Attributes:
        budget: the budget to hold; its ``limit_bytes`` is read at every operator.
        exempt: modules whose values are not evicted.
        moves: whether values may be offloaded; False once the offload tier has no room.
        planned: tells, for an operator's site and the slot of its output, whether the plan drops that value; None without a
            plan.
        replay_seconds, fetch_seconds: what the interception of planned units adds to an operator that is run again, and to a
            value that is moved, as last measured.
        times: number of evictions so far.
        operators: runs operators, and retries those that do not fit.
        queue: saved tensors of units whose operators are not recorded.
        last_resort: called if an operator does not fit and nothing is left to evict; returns whether it freed anything.
        recorder: the running unit's recorder. It is notified of what operators, autograd and this evictor do to values.
    """

    def __init__(
        self, meter: Meter, ledger: Ledger, tier: FileTier | PinnedTier, budget: Budget, recorder: TraceRecorder
    ) -> None:
        """Begin with nothing saved, and with the ``recorder`` for operators outside any unit."""
        self.meter = meter
        self.ledger = ledger
        self.tier = tier
        self.budget = budget
        self.exempt = KeptModules(())
        self.barred: weakref.WeakSet[Value] = weakref.WeakSet()
        self.moves = True
        self.planned: Callable[[Site, int], bool] | None = None
        self.kept: dict[Value, None] = {}
        self.away: weakref.WeakSet[Value] = weakref.WeakSet()
        self.weakly: weakref.WeakSet[Value] = weakref.WeakSet()
        self.anchors: weakref.WeakSet[Anchor] = weakref.WeakSet()
        self.tally = StepTally()
        self.times = 0
        self.recorder = recorder
        self.clock = 0
        self.left_plan: LeftPlan | None = None
        self.queue = SavedTensorQueue(self.move_together)
        self.operators = OperatorRetry(self)
        self.last_resort: Callable[[], bool] = lambda: False
        self._replayer = _Replayer(self)
        self._regions: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._bandwidth: Bandwidth | None = None
        self.replay_seconds = self.fetch_seconds = INTERCEPTED_SECONDS

    def use(self, meter: Meter, tier: FileTier | PinnedTier) -> None:
        """Watch another device from now on, with its meter and its offload tier."""
        self.meter, self.tier = meter, tier
        self._bandwidth = None
        self.operators.forget_sizes()

    # --- what autograd saves -----------------------------------------------------------------------------------------

    def away_bytes(self) -> int:
        """Bytes of values that autograd has saved and that are not resident."""
        return sum(v.bytes for v in {*self.away, *self.weakly} if v.saves and v.storage() is None)

    def has_dropped(self) -> bool:
        """Whether any saved value is dropped, not offloaded."""
        return any(v.storage() is None for v in self._dropped())

    def made(self, site: Site, fresh: Iterable[Value], overwritten: Iterable[Value]) -> None:
        """Note the values that an operator made: bar those of exempt modules from eviction, mark those that the plan drops."""
        self.clock += 1
        barred = self.exempt.covers(site.module)
        for slot, value in enumerate([*fresh, *overwritten]):
            value.touched = self.clock
            if barred:
                self.barred.add(value)
            elif self.planned is None or value.record is None or value.is_doubtful():
                continue
            elif self.planned(site, slot):
                self.weakly.add(value)

    def saved(self, value: Value, storage: torch.UntypedStorage) -> None:
        """Autograd saves a tensor of a value: hold it, unless the plan drops it."""
        value.saves += 1
        if value.record is None:  # the plan drops it, but its inputs have been written since
            self.weakly.discard(value)
        if value.tensor is None and value not in self.weakly:
            value.tensor = as_bytes(storage)
            self.kept[value] = None

    def inherited(self, old: Value, new: Value) -> None:
        """A value was overwritten in place: the new version takes over its saved tensors."""
        if old in self.barred:
            self.barred.add(new)
        self.kept.pop(old, None)
        if new.saves:
            if new.tensor is None and new.weak is not None:
                storage = new.weak()
                assert storage is not None
                new.tensor = as_bytes(storage)
            self.kept[new] = None

    def released(self, value: Value) -> None:
        """Autograd released one saved tensor of a value."""
        value.saves -= 1
        if value.saves == 0:
            value.tensor = None
            self.kept.pop(value, None)
            value.ticket = None
            value.disown()

    # --- room --------------------------------------------------------------------------------------------------------

    def room_for(self, size: int) -> bool:
        """Make room for ``size`` bytes below the limit; return whether they fit, or something was evicted for them."""
        over = self.meter.live() + size + SLACK_BYTES - self.budget.limit_bytes
        return not self.budget.limit_bytes or over <= 0 or bool(self.make_room(over))

    @contextlib.contextmanager
    def around_unseen(self, region: Any, given_bytes: int) -> Iterator[None]:
        """Make room for code whose operators are not intercepted.

        The room is what the code took before; on its first run, everything that can be evicted makes way.

        Args:
            region: identifies the code from one run to the next; referenced weakly.
            given_bytes: bytes of its arguments; with more bytes than before, the room grows in proportion.
        """
        known = self._regions.get(region)
        if known is None:
            self.make_room(self.budget.limit_bytes)
        else:
            self.room_for(int(known[1] * max(1.0, given_bytes / max(1, known[0]))))
        self.meter.reset_op_peak()
        before = self.meter.live()
        try:
            yield
        finally:
            rise = self.meter.op_peak() - before
            if known is None or rise > known[1]:
                self._regions[region] = (given_bytes, rise)

    @contextlib.contextmanager
    def leaving(self, size: int) -> Iterator[None]:
        """Reserve ``size`` bytes of the limit for code that is not intercepted; values brought back meanwhile respect that."""
        limit = self.budget.limit_bytes
        self.room_for(size)
        self.budget.limit_bytes = max(1, limit - size)
        try:
            yield
        finally:
            self.budget.limit_bytes = limit

    def make_room(self, needed: int) -> int:
        """Evict ``needed`` bytes if possible, the cheapest per byte and time since last use first; return the bytes freed."""
        alone = self._alone()
        left = {} if self.left_plan is None else self.left_plan.holders()
        wanted: set[int] = set()
        offers = []
        for value in self.kept:
            if value.bytes < SMALLEST_BYTES or value.tensor is None or value.busy or value in self.barred:
                continue
            storage = value.tensor.untyped_storage()
            aliases = value.own_aliases() + len({id(holder.held) for holder in left.get(storage._cdata, ())})
            if not sole_owner(storage, aliases):
                continue
            del storage
            drop = self._chain_seconds(value) if aliases == 1 and self._can_drop(value) else math.inf
            if alone and drop < math.inf:
                behind = anchors_behind((value,)) & alone.keys()
                if sum(alone[key] for key in behind) >= value.bytes:
                    drop = math.inf  # the anchors for its recompute would have to stay, and are no smaller
                else:
                    wanted |= behind
            move = self._move_seconds(value)
            if min(drop, move) == math.inf:
                continue
            idle = self.clock - value.touched + 1
            offers.append((min(drop, move) / (value.bytes * idle), drop <= move, value))
        offers.sort(key=lambda o: o[0])
        target = needed + (self.budget.limit_bytes >> 6)
        freed = self._forget(alone.keys() - wanted)
        for _, dropped, value in offers:
            if freed >= target:
                break
            if self._let_go(value, left, dropped=dropped):
                freed += value.bytes
        if freed < needed:
            freed += self._forget(alone.keys() & wanted)
        if freed < needed:
            freed += self._move_left(left, target - freed)
        if freed < needed and self.moves:
            freed += self.queue.move(target - freed)
        return freed

    def _move_seconds(self, value: Value) -> float:
        speed = self.bandwidth
        if speed is None:
            return math.inf
        return speed.read_seconds(value.bytes) + (0.0 if value.ticket is not None else value.bytes / speed.write)

    def _alone(self) -> dict[int, int]:
        """Bytes, by id, of the anchors that only records hold and that no dropped value needs to come back."""
        found = {
            id(anchor): storage.nbytes()
            for storage, group in held_alone(self.anchors) if storage.nbytes() >= SMALLEST_BYTES
            for anchor in group
        }
        for key in anchors_behind((*self._dropped(), *self.weakly)) if found else ():
            found.pop(key, None)
        return found

    def _forget(self, anchors: AbstractSet[int]) -> int:
        """Release anchors, given by id; return the bytes freed.

        Values made from them cannot be recomputed any more. If such a value is resident, it becomes an anchor for everything
        made from it; if it is not, the values made from it cannot be recomputed either.
        """
        before = self.meter.live()
        if anchors:
            self.times += 1
            self._cut(anchors)  # in a frame of its own, whose locals hold what is to be freed
        return before - self.meter.live()

    def _cut(self, anchors: AbstractSet[int]) -> None:
        needed = anchors_behind((*self._dropped(), *self.weakly))  # values may have been dropped since _alone()
        first, readers = made_from_anchors(
            anchors - needed, (*self.ledger.values(), *self.kept, *self.away, *self.weakly)
        )
        cut: set[int] = set()
        while first:
            value = first.pop()
            if id(value) in cut:
                continue
            cut.add(id(value))
            value.record = None
            stands = value.storage()
            for reader, argument in readers.pop(id(value), ()):
                if stands is None:
                    first.append(reader)
                elif argument.anchor is None:
                    self.anchors.add(argument.hold())
                    self.recorder.anchored(value)

    def _move_left(self, left: Mapping[int, list[Holder]], needed: int) -> int:
        """Offload what a unit that left its plan holds (saved tensors, inputs of replays); return the bytes freed."""
        if not self.moves or not left:
            return 0
        freed = 0
        beside = by_storage(self.anchors)
        for address, holders in left.items():
            if freed >= needed:
                break
            still = [holder for holder in holders if holder.held is not None]
            size = self.move_together([*still, *beside.get(address, ())]) if still else 0
            if size < 0:
                break
            freed += size
        return freed

    def move_together(self, group: list[Holder]) -> int:
        """Offload a storage if only these hold it; return the bytes freed, 0 if it stays, -1 if the tier has no room."""
        assert group[0].held is not None
        storage = group[0].held.untyped_storage()
        size = storage.nbytes()
        if size < SMALLEST_BYTES or python_references(storage) > UNHELD:
            return 0
        if not sole_owner(storage, len({id(holder.held) for holder in group})):
            return 0
        start = time.perf_counter()
        try:
            with beneath_autograd():
                ticket = Shared(self.tier.put(storage), functools.partial(self.room_for, size))
        except OSError:
            return -1
        for holder in group:
            holder.leave(ticket)
        self.tally.offloaded_bytes += size
        self.tally.offload_seconds += time.perf_counter() - start
        self.times += 1
        return size

    def _let_go(self, value: Value, left: Mapping[int, list[Holder]], *, dropped: bool) -> bool:
        assert value.tensor is not None
        if dropped:
            if value.checksum is None and not value.scratch:
                value.checksum = checksum(value.tensor)
            value.tensor = None
        else:
            start = time.perf_counter()
            storage = value.tensor.untyped_storage()
            beside = left.get(storage._cdata, ())
            try:
                shared = bool(beside) and value.ticket is None
                if shared:
                    with beneath_autograd():
                        value.ticket = Shared(self.tier.put(storage))
                del storage
                wrote = value.move(self.tier) or shared
            except OSError:
                self.moves, self._bandwidth = False, None
                return False
            for holder in beside:
                assert value.ticket is not None
                holder.leave(value.ticket)
            self.tally.offload_seconds += time.perf_counter() - start
            self.tally.offloaded_bytes += value.bytes if wrote else 0
        self.recorder.unheld(value)
        self.kept.pop(value, None)
        self.away.add(value)
        self.times += 1
        return True

    @property
    def bandwidth(self) -> Bandwidth | None:
        """Speed of the offload tier, measured at first use; None if nothing may be offloaded."""
        if self._bandwidth is None and self.moves:
            try:
                self._bandwidth = self.tier.measure()
            except OSError:
                self.moves = False
            except torch.OutOfMemoryError:  # first asked for when no memory is left to measure it
                return ASSUMED
        return self._bandwidth

    @property
    def known_bandwidth(self) -> Bandwidth | None:
        """Speed of the offload tier if it has been measured, and something may be offloaded."""
        return self._bandwidth if self.moves else None

    def learn(self, bandwidth: Bandwidth | None) -> None:
        """Use the offload tier's speed that the transfers of a planned unit measured."""
        self._bandwidth = bandwidth

    def _can_drop(self, value: Value) -> bool:
        """Whether every operator needed to recompute a value can still run on the bits that it read before."""
        seen: set[int] = set()
        stack = [value]
        while stack:
            v = stack.pop()
            if v.record is None or v.tainted:
                return False
            if id(v.record) in seen:
                continue
            seen.add(id(v.record))
            for argument in v.record.inputs:
                if argument.value is not None and argument.value.tainted:
                    return False
                if argument.anchor is not None:
                    if argument.value is not None and argument.value.superseded:
                        return False
                elif argument.value is not None and argument.value.tensor is None and argument.value.ticket is None:
                    stack.extend(s for s in v.record.sources() if s is argument.value)
        return True

    def _chain_seconds(self, value: Value) -> float:
        """Seconds to recompute a value now; the chain ends at resident values."""
        total, seen, stack = 0.0, {id(value.record)}, [value]
        while stack:
            v = stack.pop()
            assert v.record is not None
            total += v.record.seconds
            for source in v.record.sources():
                if source.storage() is None and source.record is not None and id(source.record) not in seen:
                    seen.add(id(source.record))
                    stack.append(source)
        return total

    # --- coming back -------------------------------------------------------------------------------------------------

    def resident(self, value: Value) -> torch.UntypedStorage:
        """A value's storage, recomputed or fetched if it is away; a saved value is then held until it is evicted again."""
        storage = value.storage()
        if storage is None:
            storage = remake(value, self._replayer)
            self.away.discard(value)
            if value.checksum is not None:
                verify(value, storage)
        if value.tensor is None and value.saves:
            value.tensor = as_bytes(storage)
            self.kept[value] = None
        self.clock += 1
        value.touched = self.clock
        return storage

    # --- writes in place ---------------------------------------------------------------------------------------------

    def before_write(self, value: Value) -> None:
        """A value is about to be overwritten: bring back the dropped values that depend on it.

        If the value itself cannot be recomputed, nothing made from it can be, once the values in between are gone; so none of
        it is recomputed any more.
        """
        if not value.is_read:
            return
        if value.record is not None:
            for v in self._dropped():
                if v is not value and depends(v, value):
                    self._bring_back(v)
            return
        dropped = self._dropped()
        if not dropped and not self.kept and value.anchored() is None:  # then no record of anything reads it
            return
        last = made_from(value, dict.fromkeys((*dropped, *self.kept, *self.ledger.values())))
        for v in last.difference(dropped):
            v.record = None
        for v in dropped:
            if v in last:
                self._bring_back(v)
                if v.storage() is not None:  # else it could be dropped again for the next one
                    v.record = None

    def exposed(self, value: Value) -> None:
        """A value may be overwritten at any time from now on: nothing that depends on it is recomputed any more.

        Dropped values that depend on it are brought back now.
        """
        for v in (*self._dropped(), *self.kept, *self.weakly):
            if v is not value and v.record is not None and depends(v, value):
                if v.tensor is None and v.ticket is None:
                    self._bring_back(v)
                if v.tensor is not None:  # else its checksum reveals a write
                    v.record = None

    def before_unseen_writes(self) -> None:
        """Writes are not intercepted from now on: bring back everything that was dropped."""
        for v in self._dropped():
            self._bring_back(v)

    def _dropped(self) -> list[Value]:
        return [v for v in dict.fromkeys((*self.away, *self.weakly)) if v.saves and v.tensor is None and v.ticket is None]

    def _bring_back(self, value: Value) -> None:
        self.weakly.discard(value)
        with beneath_autograd(), contextlib.suppress(ReplayError):  # its graph may be of no use any more; unpacking raises
            self.resident(value)


@final
class _Replayer:
    """How the online policy brings values back: under the limit, and so that all of them can be evicted again."""

    def __init__(self, evictor: Evictor) -> None:
        self._evictor = evictor

    def attach(self, value: Value, storage: torch.UntypedStorage) -> None:
        evictor = self._evictor
        evictor.ledger.attach(value, storage)
        evictor.recorder.back(value)

    def hold(self, value: Value) -> bool:
        evictor = self._evictor
        if not value.saves:
            return False
        evictor.kept[value] = None
        evictor.away.discard(value)
        value.touched = evictor.clock
        return True

    def call(self, record: Record, args: Any, kwargs: Any) -> Any:
        return self._evictor.operators.call(record.func, record.info, args, kwargs)

    def room(self, size: int) -> None:
        self._evictor.room_for(size)

    def ran(self, record: Record, seconds: float) -> None:  # noqa: ARG002 - the plan's replayer uses it
        self._evictor.tally.recomputed_ops += 1
        self._evictor.tally.recompute_seconds += seconds

    def fetched(self, value: Value, seconds: float) -> None:  # noqa: ARG002
        self._evictor.tally.offload_seconds += seconds

    def taken(self, value: Value) -> None:
        self._evictor.ledger.taken(value)
