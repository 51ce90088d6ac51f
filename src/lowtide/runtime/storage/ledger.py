"""The ledger: which value each live storage holds now."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from lowtide.runtime.storage.value import Record, Value
from lowtide.runtime.storage.views import StorageRef


@final
class Ledger:
    """The storages that the dispatch mode has seen, by address, each with its current value."""

    def __init__(self, counts: Callable[[torch.UntypedStorage], bool]) -> None:
        """Create an empty ledger; ``counts`` says whether torch's allocator handed out a storage's bytes."""
        self._counts = counts
        self._current: dict[int, StorageRef] = {}
        self.live_bytes = 0
        self.on_death: Callable[[Value], None] | None = None

    def find(self, storage: torch.UntypedStorage) -> Value | None:
        """The value that a storage holds; None if the storage was never seen."""
        ref = self._current.get(storage._cdata)
        return None if ref is None or ref() is None else ref.value

    def values(self) -> list[Value]:
        """The values of all live storages."""
        return [ref.value for ref in list(self._current.values()) if ref() is not None and ref.value is not None]

    def enter(self, storage: torch.UntypedStorage, record: Record | None) -> Value:
        """Create and return the value of a storage that was never seen."""
        value = Value(storage.nbytes(), record)
        value.tainted = record is None and self._is_foreign(storage)
        self.attach(value, storage)
        return value

    def _is_foreign(self, storage: torch.UntypedStorage) -> bool:
        """Whether torch did not allocate the storage's memory (it is numpy's or a file's): its owner may write it unseen."""
        return storage.nbytes() > 0 and not self._counts(storage) and not storage.is_shared()

    def attach(self, value: Value, storage: torch.UntypedStorage) -> None:
        """Note that a storage holds a value's bytes from now on."""
        ref = StorageRef(storage, self._died)
        ref.cdata = storage._cdata
        ref.value = value
        value.weak = ref
        self._current[ref.cdata] = ref
        self.live_bytes += value.bytes

    def succeed(self, old: Value, new: Value) -> None:
        """Replace a storage's value by its next version, after a write in place; the new one takes over saved tensors."""
        ref = old.weak
        assert ref is not None
        old.superseded = True
        old.weak = None
        if old.saves:
            new.inherit(old)
            new.tensor, old.tensor = old.tensor, None
        ref.value = new
        new.weak = ref

    def taken(self, value: Value) -> None:
        """Detach a remade value whose storage an in-place replay consumed; another value is about to be attached to it."""
        ref, value.weak = value.weak, None
        if ref is not None:
            self._died(ref)

    def saved_bytes(self) -> int:
        """Bytes of resident values that autograd has saved."""
        values = (ref.value for ref in self._current.values() if ref() is not None)
        return sum(value.bytes for value in values if value is not None and value.saves)

    def forget(self) -> None:
        """Forget all values: every live storage gets a new one, without a record."""
        former = []
        for ref in list(self._current.values()):
            storage = ref()
            if storage is None or ref.value is None:
                continue
            former.append(ref.value)  # freed only after the loop: its records may hold other storages of the ledger
            fresh = Value(ref.value.bytes, None)
            fresh.weak = ref
            fresh.tainted = self._is_foreign(storage)
            ref.value = fresh

    def _died(self, ref: StorageRef) -> None:
        if self._current.get(ref.cdata) is ref:
            del self._current[ref.cdata]
        value, ref.value = ref.value, None  # the value refers to this reference: break the cycle
        self.live_bytes -= value.bytes
        if self.on_death is not None:
            self.on_death(value)
