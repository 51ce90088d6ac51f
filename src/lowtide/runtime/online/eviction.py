"""Holding a limit on line: what is let go when an operator would cross it, or fails for want of memory.

Values go in the order of the cost that Dynamic Tensor Rematerialization (Kirisame et al., ICLR 2021, arXiv 2006.09616) gives
them: seconds to bring a value back, over its bytes and the time since it was last used; here a value may be moved, too, where
that is quicker than making it again.
"""

from __future__ import annotations

import contextlib
import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, final

import torch
from lowtide.base.errors import ReplayError
from lowtide.base.trace import Site
from lowtide.planning.unit.problem import Bandwidth
from lowtide.probe.catalogue import out_of_memory
from lowtide.runtime.device.memory_meter import Meter
from lowtide.runtime.device.offload import FileTier, PinnedTier, Shared
from lowtide.runtime.replay.chain import remake
from lowtide.runtime.storage.arguments import PLAIN_TYPES, flatten, written_by
from lowtide.runtime.storage.checksum import checksum
from lowtide.runtime.storage.ledger import Ledger
from lowtide.runtime.storage.op_schema import OpInfo
from lowtide.runtime.storage.output_size import bytes_beside, fresh_bytes
from lowtide.runtime.storage.value import Anchor, Argument, Record, Value, generator_of, records_behind
from lowtide.runtime.storage.views import as_bytes, bytes_of, sole_owner
from lowtide.runtime.tensors import beneath_autograd, on_storage

SMALLEST_BYTES = 2048
"""Values below this size are never dropped: their book-keeping would cost more than they do."""

COPIED_BYTES = 64 << 10
"""Arguments written in place are copied up to this size, so that an operator that failed half-way can run again. An operator
that writes more in place is not capped: it hardly ever allocates, and could not be tried again."""


SLACK_BYTES = 16 << 10
"""Left free for what the interception itself takes from torch's allocator: a generator's state."""

LIBRARY_BYTES = 320 << 10
"""Memory that oneDNN may take inside an operator the first time, outside torch's allocator, where it cannot be refused."""

ASSUMED = Bandwidth(write=10e9, read=10e9, read_fresh=10e9)
"""Bytes per second between a device and pinned memory where there was no room to measure: PCIe 3.0 x16 gives some 12e9."""

LACKING_BYTES = 1 << 20
"""Twice as much is let go of first, where an allocator fails without saying for how many bytes, then twice that, and so on."""

LIBRARY_OPS = ("convolution", "mkldnn", "gelu", "linear", "mm")
"""Operators (parts of their names) that oneDNN may run."""


@final
@dataclass(slots=True)
class StepTally:
    """What a policy did in one step."""

    recomputed_ops: int = 0
    recompute_seconds: float = 0.0
    offloaded_bytes: int = 0
    offload_seconds: float = 0.0
    fetched_ahead: int = 0
    rescues: int = 0
    overrun: bool = False


@final
class KeptModules:
    """Modules whose values are never dropped, by their paths, with or without the model's class in front."""

    def __init__(self, names: tuple[str, ...]) -> None:
        """None was met."""
        self.names = names
        self._met: set[str] = set()
        self._known: dict[str, bool] = {}

    @property
    def unmet(self) -> tuple[str, ...]:
        """Names that no module had."""
        return tuple(name for name in self.names if name not in self._met)

    def covers(self, module: str) -> bool:
        """Whether a module is one of them, or within one."""
        found = self._known.get(module)
        if found is None:
            paths = (module, module.partition(".")[2])
            named = {n for n in self.names for path in paths if path == n or path.startswith(n + ".")}
            self._met |= named
            found = self._known[module] = bool(named)
        return found


@final
class Refusals:
    """Tells of requests for memory that were refused inside an operator which returned all the same.

    torch catches what oneDNN's products of bfloat16 and float16 raise, computes them by another kernel, which has other bits,
    and leaves oneDNN off from there on (``bmm_out_or_baddbmm_`` in ``aten/src/ATen/native/LinearAlgebra.cpp`` and
    ``CPUBlas.cpp``). Such an operator has failed.
    """

    def __init__(self, meter: Meter) -> None:
        """Of the requests that a meter refuses."""
        self._meter = meter
        self._denied, self._onednn = 0, False

    def begin(self) -> None:
        """An operator begins under a cap."""
        if self._meter.capped:
            self._denied, self._onednn = self._meter.denied(), torch._C._get_mkldnn_enabled()

    def check(self) -> None:
        """It has returned.

        Raises:
            OutOfMemoryError: if a request was refused since it began; oneDNN is on again then.
        """
        if not self._meter.capped or self._meter.denied() == self._denied:
            return
        if self._onednn and not torch._C._get_mkldnn_enabled():
            torch._C._set_mkldnn_enabled(True)
        raise torch.OutOfMemoryError("a library had no room, and torch went on without it")


@final
class Evictor:
    """Drops and moves saved values so that operators fit.

    Attributes:
        limit_bytes: the budget; 0 for none.
        exempt: modules whose values stay.
        moves: whether values may go to the second board, which has room.
        planned: tells, for an operator's site and the slot of its output, whether the plan drops that value.
        times: how often it let go of something.
    """

    def __init__(self, meter: Meter, ledger: Ledger, board: FileTier | PinnedTier) -> None:
        """Nothing is limited yet."""
        self.meter = meter
        self.ledger = ledger
        self.board = board
        self.limit_bytes = 0
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
        self.on_unheld: Callable[[Value], None] | None = None
        self.on_back: Callable[[Value], None] | None = None
        self.on_anchored: Callable[[Value], None] | None = None
        self.clock = 0
        self.attempt_live_bytes = 0
        self.keeps: Iterable[weakref.ref[Any]] = ()
        self._replayer = _Replayer(self)
        self._library: dict[str, int] = {}
        self._inside: dict[str, float] = {}
        self._made: dict[Any, int] = {}
        self._regions: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._bandwidth: Bandwidth | None = None

    def use(self, meter: Meter, board: FileTier | PinnedTier) -> None:
        """Watch another device from now on."""
        self.meter, self.board = meter, board
        self._bandwidth = None
        self._made = {}

    # --- what autograd saves -----------------------------------------------------------------------------------------

    def away_bytes(self) -> int:
        """Bytes of values that autograd has and that are not there."""
        return sum(v.bytes for v in {*self.away, *self.weakly} if v.saves and v.storage() is None)

    def has_dropped(self) -> bool:
        """Whether any of those was dropped, not moved."""
        return any(v.storage() is None for v in self._dropped())

    def made(self, site: Site, fresh: Iterable[Value], overwritten: Iterable[Value]) -> None:
        """An operator made values; those that the plan drops are marked."""
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
        if value.record is None:  # the plan drops it, but what it was made from has been written since
            self.weakly.discard(value)
        if value.tensor is None and value not in self.weakly:
            value.tensor = as_bytes(storage)
            self.kept[value] = None

    def inherited(self, old: Value, new: Value) -> None:
        """A saved value was overwritten: the new version keeps its saved tensors."""
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
        """Autograd lets go of one saved tensor of a value."""
        value.saves -= 1
        if value.saves == 0:
            value.tensor = None
            self.kept.pop(value, None)
            value.ticket = None
            value.disown()

    # --- operators ---------------------------------------------------------------------------------------------------

    def call(self, func: Any, info: OpInfo, args: Any, kwargs: Any) -> Any:
        """Call an operator; where it does not fit, make room and try again."""
        limit, meter = self.limit_bytes, self.meter
        if info.collective:
            if limit:
                self._headroom(func, info, args, kwargs)
            self.attempt_live_bytes = meter.live()
            return func(*args, **kwargs)
        kind = self._headroom(func, info, args, kwargs) if limit and not meter.capped else None
        copies = self._copies(info, args) if info.mutates else None
        generator = _generator_of(info, args, kwargs)
        final = (info.mutates and copies is None) or (info.seeded and generator is None)  # cannot be tried again
        read = self._room_inside(info, args, kwargs) if final and limit and meter.capped else 0
        limit = 0 if final else limit
        reserve = self._reserve(info.name) if limit else 0
        state = _generator_state(info, generator)
        lacking = LACKING_BYTES
        refusals = Refusals(meter)
        meter.begin_library_window()
        while True:
            denied = meter.denied()
            refusals.begin()
            self.attempt_live_bytes = meter.live()
            meter.begin_operator()
            meter.cap(max(limit - reserve - SLACK_BYTES, 1) if limit else 0)
            try:
                out = func(*args, **kwargs)
                if limit:
                    refusals.check()
            except (RuntimeError, MemoryError) as error:
                out = None  # what it returned although a request was refused
                if not self.is_out_of_memory(error, denied) or (final and not info.mutates):
                    raise
                last = error.with_traceback(None)
            else:
                self._note_inside(info.name, read)
                if kind is not None:
                    self._made[kind] = max(self._made[kind], bytes_beside(out, args, kwargs))
                return out
            finally:
                meter.cap(0)
                meter.end_operator()
            # Out of the except block: no frame of the failed call holds its tensors any more.
            if state is not None:
                state[0].set_state(state[1])
            if info.mutates and not _restore(copies):
                raise last
            lacking *= 2
            if not self.make_room(self._shortage(limit, reserve, lacking)):
                if reserve:
                    reserve = 0
                    continue
                if not limit:
                    raise last
                limit = 0
                self.tally.overrun = True
            self.tally.rescues += 1

    def _shortage(self, limit: int, reserve: int, lacking: int) -> int:
        """Bytes to let go of after an operator failed; ``lacking`` at least, where the device does not say how many."""
        denied = self.meter.denied_bytes()
        short = denied if not limit else self.meter.live() + denied + reserve + SLACK_BYTES - limit
        return max(short, 1 if denied else lacking)

    def _copies(self, info: OpInfo, args: Any) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        """Copies of the arguments that an operator writes; None if they are too large to be copied, or have no room."""
        tensors = [t for t, _ in written_by(info, args, {})]
        size = sum(bytes_of(t) for t in tensors)
        if size > COPIED_BYTES:
            return None
        if not self.room_for(size):
            return None
        return [(t, t.clone()) for t in tensors]

    def _room_inside(self, info: OpInfo, args: Any, kwargs: Any) -> int:
        """Make room for what an operator takes inside that could not be tried again; bytes that it reads, of the widest type.

        It is what such operators took before as a share of what they read; all of that, until one was seen.
        """
        written = {id(t) for t, _ in written_by(info, args, kwargs)}
        tensors = [t for t in (*flatten(args), *kwargs.values()) if isinstance(t, torch.Tensor)]
        widest = max((t.element_size() for t in tensors), default=0)
        read = widest * sum(t.numel() for t in tensors if id(t) not in written)
        if read:
            self.room_for(int(self._inside.get(info.name, 1.0) * read))
        return read

    def _reserve(self, name: str) -> int:
        """Bytes to leave free for what a library takes inside an operator."""
        seen = self._library.get(name)
        if seen is None:
            return LIBRARY_BYTES if any(part in name for part in LIBRARY_OPS) else 0
        return seen

    def _note_inside(self, name: str, read: int) -> None:
        """What an operator took that cannot be refused: as a library's workspace; and, where it ran uncapped, at all."""
        self._library[name] = max(self.meter.library_rise(), self._library.get(name, 0))
        if read:
            share = (self.meter.op_peak() - self.attempt_live_bytes) / read
            self._inside[name] = max(share, self._inside.get(name, 0.0))

    def is_out_of_memory(self, error: BaseException, denied: int) -> bool:
        """Whether an error means that memory ran out, given how many requests had been refused before."""
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        return self.meter.denied() > denied or out_of_memory(error) is not None  # the system may refuse before our cap does

    def _headroom(self, func: Any, info: OpInfo, args: Any, kwargs: Any) -> Any:
        """Where the operator cannot be capped: room is made for what it will make; its key in what is known."""
        tensors = [t for t in (*flatten(args), *kwargs.values()) if isinstance(t, torch.Tensor)]
        key = (func, *((t.size(), t.dtype) for t in tensors))
        expected = self._made.get(key)
        if expected is None:
            opaque = info.seeded or info.collective or info.opaque
            fresh = None if opaque else fresh_bytes(func, args, kwargs)
            expected = self._made[key] = sum(bytes_of(t) for t in tensors) if fresh is None else fresh
        self.room_for(expected)
        return key

    # --- room --------------------------------------------------------------------------------------------------------

    def room_for(self, size: int) -> bool:
        """Make room for so many bytes below the limit; whether they fit, or something left for them."""
        over = self.meter.live() + size + SLACK_BYTES - self.limit_bytes
        return not self.limit_bytes or over <= 0 or bool(self.make_room(over))

    @contextlib.contextmanager
    def around_unseen(self, region: Any, given_bytes: int) -> Iterator[None]:
        """Make room for code whose operators are not seen: for what it took before, at its first sight all that there is.

        Args:
            region: what is known to run again.
            given_bytes: of its arguments; more of them are taken to need more in proportion.
        """
        known = self._regions.get(region)
        if known is None:
            self.make_room(self.limit_bytes)
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
        """Leave so many bytes of the limit to what is not seen: whatever is brought back meanwhile stays below."""
        limit = self.limit_bytes
        self.room_for(size)
        self.limit_bytes = max(1, limit - size)
        try:
            yield
        finally:
            self.limit_bytes = limit

    def make_room(self, needed: int) -> int:
        """Evict at least so many bytes, the cheapest per byte and time since last use first; return the bytes freed."""
        alone = self._alone()
        wanted: set[int] = set()
        offers = []
        for value in self.kept:
            if value.bytes < SMALLEST_BYTES or value.tensor is None or value.busy or value in self.barred:
                continue
            aliases = value.own_aliases()
            if not sole_owner(value.tensor.untyped_storage(), aliases):
                continue
            drop = self._chain_seconds(value) if aliases == 1 and self._can_drop(value) else math.inf
            if alone and drop < math.inf:
                behind = _anchors_behind((value,)) & alone.keys()
                if sum(alone[key] for key in behind) >= value.bytes:
                    drop = math.inf  # what it is made from would have to stay, and is larger
                else:
                    wanted |= behind
            move = self._move_seconds(value)
            if min(drop, move) == math.inf:
                continue
            idle = self.clock - value.touched + 1
            offers.append((min(drop, move) / (value.bytes * idle), drop <= move, value))
        offers.sort(key=lambda o: o[0])
        target = needed + (self.limit_bytes >> 6)
        freed = self._forget(alone.keys() - wanted)
        for _, dropped, value in offers:
            if freed >= target:
                break
            if self._let_go(value, dropped=dropped):
                freed += value.bytes
        if freed < needed:
            freed += self._forget(alone.keys() & wanted)
        return freed if freed >= needed else freed + self._move_kept(target - freed)

    def _move_seconds(self, value: Value) -> float:
        speed = self.bandwidth
        if speed is None:
            return math.inf
        return speed.read_seconds(value.bytes) + (0.0 if value.ticket is not None else value.bytes / speed.write)

    def _alone(self) -> dict[int, int]:
        """Anchors (their ids) that nothing but records hold, and that no value needs to come back; their bytes."""
        found = {
            id(anchor): storage.nbytes()
            for storage, group in held_alone(self.anchors) if storage.nbytes() >= SMALLEST_BYTES
            for anchor in group
        }
        for key in _anchors_behind((*self._dropped(), *self.weakly)) if found else ():
            found.pop(key, None)
        return found

    def _forget(self, anchors: AbstractSet[int]) -> int:
        """Let go of anchors; the bytes freed.

        What is made from them is not made again any more. What of it is there is an anchor of its own from here on, for all
        that was made from it; what is not takes along what was made from it.
        """
        before = self.meter.live()
        if anchors:
            self.times += 1
            self._cut(anchors)  # whose frame holds what goes
        return before - self.meter.live()

    def _cut(self, anchors: AbstractSet[int]) -> None:
        needed = _anchors_behind((*self._dropped(), *self.weakly))  # more was dropped since they were alone
        first, readers = _made_from_anchors(
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
                    if self.on_anchored is not None:
                        self.on_anchored(value)

    def _move_kept(self, needed: int) -> int:
        """Move what a planned forward holds that left its plan: saved tensors and inputs of replays; the bytes freed."""
        if not self.moves:
            return 0
        freed = 0
        for storage, group in held_alone(ref() for ref in self.keeps):
            size = storage.nbytes()
            if freed >= needed:
                break
            if size >= SMALLEST_BYTES:
                try:
                    with beneath_autograd():
                        ticket = Shared(self.board.put(storage))
                except OSError:
                    break
                for kept in group:
                    kept.leave(ticket)
                self.tally.offloaded_bytes += size
                self.times += 1
                freed += size
        return freed

    def _let_go(self, value: Value, *, dropped: bool) -> bool:
        if dropped:
            if value.checksum is None and not value.scratch:
                value.checksum = checksum(value.tensor)
            value.tensor = None
        else:
            start = time.perf_counter()
            try:
                wrote = value.move(self.board)
            except OSError:
                self.moves, self._bandwidth = False, None
                return False
            self.tally.offload_seconds += time.perf_counter() - start
            self.tally.offloaded_bytes += value.bytes if wrote else 0
        if self.on_unheld is not None:
            self.on_unheld(value)
        self.kept.pop(value, None)
        self.away.add(value)
        self.times += 1
        return True

    @property
    def bandwidth(self) -> Bandwidth | None:
        """Speed of the second board, measured at first use; None where nothing may go there."""
        if self._bandwidth is None and self.moves:
            try:
                self._bandwidth = self.board.measure()
            except OSError:
                self.moves = False
            except torch.OutOfMemoryError:  # asked for the first time when there is no room left to try it
                return ASSUMED
        return self._bandwidth

    def learn(self, bandwidth: Bandwidth | None) -> None:
        """Take the second board's speed as transfers of a planned unit met it."""
        self._bandwidth = bandwidth

    def _can_drop(self, value: Value) -> bool:
        """Whether every operator needed to make a value again can still run on the bits it saw."""
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
        """Seconds to make a value again as things stand, capped in depth by what is resident."""
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
        """A value's storage, made or fetched again if it was let go; held until it is let go again."""
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
        """A value is about to be overwritten: what was dropped and depends on it comes back.

        If it cannot be made again itself, nothing that was made from it can, once what is held in between has gone.
        """
        if value.record is not None:
            for v in self._dropped():
                if v is not value and _depends(v, value):
                    self._bring_back(v)
            return
        dropped = self._dropped()
        if not dropped and not self.kept:
            return
        last = _made_from(value, dict.fromkeys((*dropped, *self.kept, *self.ledger.values())))
        for v in last.difference(dropped):
            v.record = None
        for v in dropped:
            if v in last:
                self._bring_back(v)
                if v.storage() is not None:  # or it would be let go for the next one
                    v.record = None

    def exposed(self, value: Value) -> None:
        """A value may be overwritten at any time from here on: nothing that depends on it is made again any more."""
        for v in (*self._dropped(), *self.kept, *self.weakly):
            if v is not value and v.record is not None and _depends(v, value):
                if v.tensor is None and v.ticket is None:
                    self._bring_back(v)
                if v.tensor is not None:  # else the checksum will tell
                    v.record = None

    def before_unseen_writes(self) -> None:
        """From here on nothing is told of writes: whatever was dropped comes back."""
        for v in self._dropped():
            self._bring_back(v)

    def _dropped(self) -> list[Value]:
        return [v for v in dict.fromkeys((*self.away, *self.weakly)) if v.saves and v.tensor is None and v.ticket is None]

    def _bring_back(self, value: Value) -> None:
        self.weakly.discard(value)
        with beneath_autograd(), contextlib.suppress(ReplayError):  # of a graph that is of no use any more: who asks is told
            self.resident(value)


@final
class _Replayer:
    """The online policy's way of bringing values back: under the limit, all of it evictable again."""

    def __init__(self, evictor: Evictor) -> None:
        self._evictor = evictor

    def attach(self, value: Value, storage: torch.UntypedStorage) -> None:
        evictor = self._evictor
        evictor.ledger.attach(value, storage)
        if evictor.on_back is not None:
            evictor.on_back(value)

    def hold(self, value: Value) -> bool:
        evictor = self._evictor
        if not value.saves:
            return False
        evictor.kept[value] = None
        evictor.away.discard(value)
        value.touched = evictor.clock
        return True

    def call(self, record: Record, args: Any, kwargs: Any) -> Any:
        return self._evictor.call(record.func, record.info, args, kwargs)

    def room(self, size: int) -> None:
        self._evictor.room_for(size)

    def ran(self, record: Record, seconds: float) -> None:  # noqa: ARG002 - the plan's way asks which
        self._evictor.tally.recomputed_ops += 1
        self._evictor.tally.recompute_seconds += seconds

    def fetched(self, value: Value, seconds: float) -> None:  # noqa: ARG002
        self._evictor.tally.offload_seconds += seconds

    def taken(self, value: Value) -> None:
        self._evictor.ledger.taken(value)


def held_alone(keeps: Iterable[Any]) -> Iterator[tuple[torch.UntypedStorage, list[Any]]]:
    """Storages that nothing but some of these (saved tensors that are kept, anchors; None for those that are gone) hold."""
    groups: dict[int, list[Any]] = {}
    for kept in keeps:
        held = None if kept is None else kept.held
        if held is not None and type(held) in PLAIN_TYPES and on_storage(held):  # of others bytes and metadata are not all
            groups.setdefault(held.untyped_storage()._cdata, []).append(kept)
    for group in groups.values():
        storage = group[0].held.untyped_storage()
        if sole_owner(storage, len({id(kept.held) for kept in group})):
            yield storage, group


def verify(value: Value, storage: torch.UntypedStorage) -> None:
    """Compare a remade value's bytes with what was dropped.

    Raises:
        ReplayError: if they differ.
    """
    found = checksum(as_bytes(storage))
    if found != value.checksum:
        name = value.record.info.name if value.record is not None else "an operator"
        raise ReplayError(
            f"{name} did not give the same bits when it was run again ({value.bytes} bytes): something outside torch wrote "
            "to its output, or it is not deterministic; keep its module's values with --keep MODULE"
        )


def _made_from(source: Value, values: Iterable[Value]) -> set[Value]:
    """Those of some values that were made from another, over whatever is in between."""
    known: dict[int, bool] = {}

    def settled(record: Record | None) -> bool | None:
        return False if record is None else known.get(id(record))

    for value in values:
        stack = [value.record]
        while stack:
            record = stack[-1]
            if record is None or id(record) in known:
                stack.pop()
                continue
            read = [a.value for a in record.inputs if a.value is not None]
            open_ = [v.record for v in read if v is not source and settled(v.record) is None and v.record is not record]
            if open_ and not any(v is source for v in read):
                stack += open_
                continue
            known[id(record)] = any(v is source or bool(settled(v.record)) for v in read)
            stack.pop()
    return {v for v in values if v is not source and settled(v.record)}


def _anchors_behind(values: Iterable[Value]) -> set[int]:
    """The anchors (their ids) that chains may read which make values again."""

    def is_remade(argument: Argument) -> bool:
        return argument.anchor is None and argument.value is not None and argument.value.tensor is None

    return {id(a.anchor) for value in values for record in records_behind(value, is_remade) for a in record.inputs}


def _made_from_anchors(
    anchors: AbstractSet[int], values: Iterable[Value]
) -> tuple[list[Value], dict[int, list[tuple[Value, Argument]]]]:
    """Among values and all that they were made from: what is made from anchors (their ids) at once; who reads which value."""
    found: list[Value] = []
    readers: dict[int, list[tuple[Value, Argument]]] = {}
    seen: set[int] = set()
    stack = list(values)
    while stack:
        value = stack.pop()
        if id(value) in seen or value.record is None:
            continue
        seen.add(id(value))
        for argument in value.record.inputs:
            if argument.value is not None:
                stack.append(argument.value)
                readers.setdefault(id(argument.value), []).append((value, argument))
        if any(id(a.anchor) in anchors for a in value.record.inputs):
            found.append(value)
    return found, readers


def _depends(value: Value, on: Value) -> bool:
    """Whether making a value again, as things stand, reads another."""
    behind = records_behind(value, lambda a: a.value is not None and a.value.tensor is None)
    return any(a.value is on for record in behind for a in record.inputs)


def _restore(copies: list[tuple[torch.Tensor, torch.Tensor]] | None) -> bool:
    if copies is None:
        return False
    for tensor, copy in copies:
        tensor.copy_(copy)
    return True


def _generator_of(info: OpInfo, args: Any, kwargs: Any) -> Any:
    if not info.seeded:
        return None
    return generator_of(args, kwargs, (t.device for t in flatten(args) if isinstance(t, torch.Tensor)))


def _generator_state(info: OpInfo, generator: Any) -> tuple[Any, torch.Tensor] | None:
    return (generator, generator.get_state()) if info.seeded and generator is not None else None
