"""Runs one operator under the limit; if it does not fit, makes room and runs it again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, final

import torch
from lowtide.probe.catalogue import out_of_memory
from lowtide.runtime.budget import SLACK_BYTES
from lowtide.runtime.device.memory_meter import Meter
from lowtide.runtime.storage.arguments import flatten, written_by
from lowtide.runtime.storage.op_schema import OpInfo
from lowtide.runtime.storage.output_size import bytes_beside, fresh_bytes
from lowtide.runtime.storage.value import generator_of
from lowtide.runtime.storage.views import bytes_of

if TYPE_CHECKING:
    from lowtide.runtime.online.eviction import Evictor

COPIED_BYTES: Final = 64 << 10
"""Arguments written in place are copied up to this size, so that an operator that failed half-way can run again. An operator
that writes more in place is not capped: it hardly ever allocates, and could not be retried."""
LIBRARY_BYTES: Final = 320 << 10
"""Bytes reserved for oneDNN inside an operator's first run: outside torch's allocator, they cannot be refused."""
LACKING_BYTES: Final = 1 << 20
"""If an allocator fails without giving the size of the request, twice this is evicted first, then twice that, and so on."""

LIBRARY_OPS: Final = ("convolution", "mkldnn", "gelu", "linear", "mm")
"""Operators (parts of their names) that oneDNN may run."""


@final
class Refusals:
    """Detects memory requests that were refused inside an operator that nevertheless returned.

    If a bfloat16 or float16 matrix product raises in oneDNN, torch catches the error, computes the product by another kernel,
    which gives other bits, and leaves oneDNN disabled from then on (``bmm_out_or_baddbmm_`` in
    ``aten/src/ATen/native/LinearAlgebra.cpp`` and ``CPUBlas.cpp``). Such an operator counts as failed.
    """

    def __init__(self, meter: Meter) -> None:
        """Watch the requests that a meter refuses."""
        self._meter = meter
        self._denied, self._onednn = 0, False

    def begin(self) -> None:
        """An operator begins under a cap."""
        if self._meter.capped:
            self._denied, self._onednn = self._meter.denied(), torch._C._get_mkldnn_enabled()

    def check(self) -> None:
        """The operator has returned.

        Raises:
            OutOfMemoryError: if a request was refused since it began; oneDNN is enabled again first.
        """
        if not self._meter.capped or self._meter.denied() == self._denied:
            return
        if self._onednn and not torch._C._get_mkldnn_enabled():
            torch._C._set_mkldnn_enabled(True)
        raise torch.OutOfMemoryError("a library ran out of memory, and torch continued without it")


@final
class OperatorRetry:
    """Runs operators for an evictor, and retries those that do not fit.

    Attributes:
        attempt_live_bytes: live bytes before the latest attempt at an operator.
    """

    def __init__(self, evictor: Evictor) -> None:
        """Begin without knowledge of any operator."""
        self._evictor = evictor
        self.attempt_live_bytes = 0
        self._library: dict[str, int] = {}
        self._inside: dict[str, float] = {}
        self._made: dict[Any, int] = {}

    def forget_sizes(self) -> None:
        """Forget the sizes of operators' results: another device is watched from now on."""
        self._made = {}

    def call(self, func: Any, info: OpInfo, args: Any, kwargs: Any) -> Any:
        """Call an operator; if it does not fit, make room and retry.

        A collective is neither capped nor retried: room is made for it beforehand.
        """
        limit, meter = self._evictor.budget.limit_bytes, self._evictor.meter
        if info.collective:
            if limit:
                self._headroom(func, info, args, kwargs)
            self.attempt_live_bytes = meter.live()
            return func(*args, **kwargs)
        kind = self._headroom(func, info, args, kwargs) if limit and not meter.capped else None
        copies = self._copies(info, args) if info.mutates else None
        generator = _generator_of(info, args, kwargs)
        final = (info.mutates and copies is None) or (info.seeded and generator is None)  # cannot be retried
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
                out = None  # it may have returned although a request was refused
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
            if not self._evictor.make_room(self._shortage(limit, reserve, lacking)):
                if reserve:
                    reserve = 0
                    continue
                if not limit:
                    raise last
                if not self._evictor.last_resort():
                    limit = 0
                    self._evictor.tally.overrun = True
            self._evictor.tally.rescues += 1

    def may_pass(self, func: Any, info: OpInfo) -> bool:
        """Whether an operator that has run may run under a bare cap from now on, and comes here only if it is refused memory.

        It must be one that can be run again as it is, and in which no library allocates.
        """
        again = not (info.mutates or info.seeded or info.collective or info.opaque)
        return again and isinstance(func, torch._ops.OpOverload) and not self._reserve(info.name)

    def _shortage(self, limit: int, reserve: int, lacking: int) -> int:
        """Bytes to evict after an operator failed; at least ``lacking`` if the device does not report the refused size."""
        denied = self._evictor.meter.denied_bytes()
        short = denied if not limit else self._evictor.meter.live() + denied + reserve + SLACK_BYTES - limit
        return max(short, 1 if denied else lacking)

    def _copies(self, info: OpInfo, args: Any) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        """Copies of the arguments that an operator writes; None if they are too large, or there is no room for the copies."""
        tensors = [t for t, _ in written_by(info, args, {})]
        size = sum(bytes_of(t) for t in tensors)
        if size > COPIED_BYTES:
            return None
        if not self._evictor.room_for(size):
            return None
        return [(t, t.clone()) for t in tensors]

    def _room_inside(self, info: OpInfo, args: Any, kwargs: Any) -> int:
        """Make room for the temporaries of an operator that cannot be retried; return the bytes that it reads.

        Every element read counts as one of the widest type. The room is the largest share of these bytes that the operator
        took in earlier runs; before its first run, all of them.
        """
        written = {id(t) for t, _ in written_by(info, args, kwargs)}
        tensors = [t for t in (*flatten(args), *kwargs.values()) if isinstance(t, torch.Tensor)]
        widest = max((t.element_size() for t in tensors), default=0)
        read = widest * sum(t.numel() for t in tensors if id(t) not in written)
        if read:
            self._evictor.room_for(int(self._inside.get(info.name, 1.0) * read))
        return read

    def _reserve(self, name: str) -> int:
        """Bytes to leave free for what a library takes inside an operator, outside torch's allocator."""
        seen = self._library.get(name)
        if seen is None:
            return LIBRARY_BYTES if any(part in name for part in LIBRARY_OPS) else 0
        return seen

    def _note_inside(self, name: str, read: int) -> None:
        """Note what an operator took that could not be refused: a library's workspace; if it ran uncapped, everything."""
        self._library[name] = max(self._evictor.meter.library_rise(), self._library.get(name, 0))
        if read:
            share = (self._evictor.meter.op_peak() - self.attempt_live_bytes) / read
            self._inside[name] = max(share, self._inside.get(name, 0.0))

    def is_out_of_memory(self, error: BaseException, denied: int) -> bool:
        """Whether an error means that memory ran out; ``denied`` is the number of requests refused before it."""
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        refused = self._evictor.meter.denied() > denied
        return refused or out_of_memory(error) is not None  # the system may refuse before our cap does

    def _headroom(self, func: Any, info: OpInfo, args: Any, kwargs: Any) -> Any:
        """Make room for the results of an operator that cannot be capped; return its key in the known sizes."""
        tensors = [t for t in (*flatten(args), *kwargs.values()) if isinstance(t, torch.Tensor)]
        key = (func, *((t.size(), t.dtype) for t in tensors))
        expected = self._made.get(key)
        if expected is None:
            opaque = info.seeded or info.collective or info.opaque
            fresh = None if opaque else fresh_bytes(func, args, kwargs)
            expected = self._made[key] = sum(bytes_of(t) for t in tensors) if fresh is None else fresh
        self._evictor.room_for(expected)
        return key


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
