"""Makes a value resident again: which operators run, in which order, and which of their outputs stay.

It follows the rules of ``planning/unit/simulate.py``, so that a plan's predicted peak is the measured one.
"""

from __future__ import annotations

import time
from typing import final

import torch
from lowtide.base.errors import ReplayError
from lowtide.runtime.storage.value import Record, Replayer, Value
from lowtide.runtime.storage.views import as_bytes
from lowtide.runtime.tensors import beneath_autograd


def chain_of(value: Value) -> tuple[list[Record], list[Value]]:
    """The records to run again, in recorded order, and the values to fetch, that make a value resident.

    Raises:
        ReplayError: if the value cannot be rematerialized.
    """
    records: dict[int, Record] = {}
    fetched: list[Value] = []
    seen = {id(value)}
    stack = [value]
    while stack:
        v = stack.pop()
        if v.ticket is not None:
            fetched.append(v)
            continue
        record = v.record
        if record is None:
            raise ReplayError(
                "a dropped activation cannot be recomputed: the operator that made it was not recorded "
                "(please report this; --keep '' runs without dropping)"
            )
        if id(record) in records:
            continue
        records[id(record)] = record
        for source in record.sources():
            if id(source) not in seen and source.storage() is None:
                seen.add(id(source))
                stack.append(source)
    return sorted(records.values(), key=lambda r: r.order), fetched


def remake(value: Value, how: Replayer) -> torch.UntypedStorage:
    """Bring back a value that is not resident, by the rules of ``planning/unit/simulate.py``.

    Raises:
        ReplayError: if the value cannot be rematerialized.
    """
    chain = _Chain(value, how)
    try:
        with beneath_autograd():
            return chain.run()
    finally:
        chain.release()


@final
class _Chain:
    """A chain: the operators that run again, one after the other, and the storages that are resident because of them."""

    def __init__(self, target: Value, how: Replayer) -> None:
        self.target = target
        self.how = how
        self.records, self.fetched = chain_of(target)
        self.fresh: dict[Value, torch.UntypedStorage] = {}
        self.readers: dict[Value, int] = {}
        for record in self.records:
            for source in record.sources():
                self.readers[source] = record.order
        self.busy = set(self.readers)
        for v in self.busy:
            v.busy += 1

    def run(self) -> torch.UntypedStorage:
        for v in self.fetched:
            assert v.ticket is not None
            self.how.room(v.bytes)
            start = time.perf_counter()
            self._keep(v, v.ticket.fetch(), -1)
            self.how.fetched(v, time.perf_counter() - start)
        for record in self.records:
            start = time.perf_counter()
            self._replay(record)
            self.how.ran(record, time.perf_counter() - start)
            for v in [v for v in self.busy if self.readers[v] <= record.order]:
                v.busy -= 1
                self.busy.discard(v)
            for v in [v for v in self.fresh if v is not self.target and self.readers.get(v, -1) <= record.order]:
                del self.fresh[v]
        return self.fresh[self.target]

    def release(self) -> None:
        for v in self.busy:
            v.busy -= 1

    def _replay(self, record: Record) -> None:
        """Run one operator again; only the outputs that :meth:`_keep` keeps outlive this frame."""

        def steal(old: Value) -> bool:
            return old in self.fresh and old.tensor is None and old is not self.target and self.readers[old] <= record.order

        stolen = [a.value for a, _, matters in record.overs if matters and a.value is not None and steal(a.value)]
        outs, written = record.run(steal, self.how)
        for old in stolen:
            del self.fresh[old]
            self.how.taken(old)
        made = [(ref(), outs[i]) for i, ref in record.outs]
        made += [(ref(), written[i]) for i, (_, ref, _) in enumerate(record.overs)]
        for v, tensor in made:
            if v is not None:
                self._keep(v, tensor.untyped_storage(), record.order)

    def _keep(self, v: Value, storage: torch.UntypedStorage, order: int) -> None:
        if v in self.fresh or v.storage() is not None:
            return
        held = v is not self.target and self.how.hold(v)
        if v is self.target or held or self.readers.get(v, -1) > order:
            self.fresh[v] = storage
            self.how.attach(v, storage)
            if held:
                v.tensor = as_bytes(storage)
