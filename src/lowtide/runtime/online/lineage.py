"""What saved values were made from, what holds them, and whether a recomputed value has its former bits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from lowtide.base.errors import ReplayError
from lowtide.runtime.storage.arguments import PLAIN_TYPES
from lowtide.runtime.storage.checksum import checksum
from lowtide.runtime.storage.value import Argument, Record, Value, records_behind
from lowtide.runtime.storage.views import as_bytes, sole_owner
from lowtide.runtime.tensors import on_storage


def by_storage(keeps: Iterable[Any]) -> dict[int, list[Any]]:
    """Holders (kept saved tensors, anchors, values; None if dead) by the address of the storage that they hold."""
    groups: dict[int, list[Any]] = {}
    for kept in keeps:
        held = None if kept is None else kept.held
        if held is not None and type(held) in PLAIN_TYPES and on_storage(held):  # others are more than bytes and metadata
            groups.setdefault(held.untyped_storage()._cdata, []).append(kept)
    return groups


def held_alone(keeps: Iterable[Any]) -> Iterator[tuple[torch.UntypedStorage, list[Any]]]:
    """Storages that only the given holders (kept saved tensors, anchors; None if dead) reference, each with its holders."""
    for group in by_storage(keeps).values():
        storage = group[0].held.untyped_storage()
        if sole_owner(storage, len({id(kept.held) for kept in group})):
            yield storage, group


def verify(value: Value, storage: torch.UntypedStorage) -> None:
    """Compare the checksum of a recomputed value with that of the dropped bytes.

    Raises:
        ReplayError: if they differ.
    """
    found = checksum(as_bytes(storage))
    if found != value.checksum:
        name = value.record.info.name if value.record is not None else "an operator"
        raise ReplayError(
            f"{name} gave other bits when it was recomputed ({value.bytes} bytes): something outside torch wrote "
            "to its output, or it is not deterministic; keep its module's values with --keep MODULE"
        )


def made_from(source: Value, values: Iterable[Value]) -> set[Value]:
    """Those of ``values`` that were made from ``source``, directly or through others."""
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


def anchors_behind(values: Iterable[Value]) -> set[int]:
    """Ids of the anchors that chains may read to recompute values."""

    def is_remade(argument: Argument) -> bool:
        return argument.anchor is None and argument.value is not None and argument.value.tensor is None

    return {id(a.anchor) for value in values for record in records_behind(value, is_remade) for a in record.inputs}


def made_from_anchors(
    anchors: AbstractSet[int], values: Iterable[Value]
) -> tuple[list[Value], dict[int, list[tuple[Value, Argument]]]]:
    """Search values, and everything they were made from, for direct readers of anchors.

    Args:
        anchors: ids of the anchors.
        values: where the search begins.

    Returns:
        The values whose own operator reads one of the anchors; and, by the id of each value that was read, its readers: pairs
        of the value made and the argument read.
    """
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


def depends(value: Value, on: Value) -> bool:
    """Whether recomputing ``value`` now would read ``on``."""
    behind = records_behind(value, lambda a: a.value is not None and a.value.tensor is None)
    return any(a.value is on for record in behind for a in record.inputs)
