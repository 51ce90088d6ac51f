"""Models torch's CUDA caching allocator without a device: how many bytes it reserves for a schedule.

Source: ``c10/cuda/CUDACachingAllocator.cpp`` of torch (its defaults, without ``expandable_segments``). Sizes are rounded up to
512 B. Blocks of up to 1 MiB are cut from segments of 2 MiB, those below 10 MiB from segments of 20 MiB; larger ones get their
own segment, a multiple of 2 MiB. A request gets the smallest free block that is large enough, which is split if enough
remains. Free neighbors within a segment are merged. Only if a new segment would not fit are wholly free segments returned to
the device.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Final, final

from lowtide.planning.graph import Graph
from lowtide.planning.schedule import Act, Schedule
from lowtide.planning.solver.solve import Answer
from lowtide.planning.status import Status

BLOCK_BYTES: Final = 512
"""Block sizes are multiples of this."""
SMALL_BYTES: Final = 1 << 20
"""The largest block of the small pool. A block of the large pool is split only if more than this remains."""
SMALL_SEGMENT_BYTES: Final = 2 << 20
LARGE_SEGMENT_BYTES: Final = 20 << 20
OWN_SEGMENT_BYTES: Final = 10 << 20
"""Blocks of at least this size get their own segment ..."""
STEP_BYTES: Final = 2 << 20
"""... whose size is a multiple of this."""
_LOWER: Final = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1)
"""Shares of the bytes between floor and budget by which the budget for allocated bytes is lowered, in turn, until the reserved
bytes fit."""
_FIRST: Final = 0.5
"""Share of the time for the first plan; the others share the rest."""
_PLACE: Final = itemgetter(0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """What the allocator reserved on the device for a schedule.

    Attributes:
        peak_bytes: peak of the reserved bytes.
        short_bytes: bytes by which the first denied request exceeded the limit; 0 if none was denied.
    """

    peak_bytes: int
    short_bytes: int = 0


@final
class _Block:
    """A part of a segment, with its neighbors in the segment and whether it is in use."""

    __slots__ = ("after", "before", "order", "size", "small", "used")

    def __init__(self, size: int, order: tuple[int, int], *, small: bool) -> None:
        self.size = size
        self.order = order
        self.small = small
        self.used = False
        self.before: _Block | None = None
        self.after: _Block | None = None


@final
class Allocator:
    """Torch's caching allocator on a device that has ``limit_bytes`` (None: unlimited)."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        """Start without any segments."""
        self.limit_bytes = limit_bytes
        self.reserved_bytes = 0
        self.peak_bytes = 0
        self._segments = 0
        self._free: dict[bool, list[tuple[int, tuple[int, int], _Block]]] = {True: [], False: []}

    def take(self, size: int) -> _Block | int:
        """Allocate a block of at least ``size`` bytes; if the device is out of memory, return the missing bytes instead."""
        size = max(BLOCK_BYTES, -(-size // BLOCK_BYTES) * BLOCK_BYTES)
        small = size <= SMALL_BYTES
        pool = self._free[small]
        at = bisect_left(pool, (size, (-1, -1)), key=_PLACE)
        if at < len(pool):
            block = pool.pop(at)[2]
        else:
            found = self._reserve(_segment_bytes(size), small=small)
            if isinstance(found, int):
                return found
            block = found
        self._split(block, size)
        block.used = True
        return block

    def give(self, block: _Block) -> None:
        """Free a block and merge it with its free neighbors."""
        block.used = False
        before, after = block.before, block.after
        if before is not None and not before.used:
            self._drop(before)
            before.size += block.size
            before.after = after
            if after is not None:
                after.before = before
            block = before
        if after is not None and not after.used:
            self._drop(after)
            block.size += after.size
            block.after = after.after
            if after.after is not None:
                after.after.before = block
        self._put(block)

    def _reserve(self, size: int, *, small: bool) -> _Block | int:
        if self.limit_bytes is not None and self.reserved_bytes + size > self.limit_bytes:
            self._give_back()
            if self.reserved_bytes + size > self.limit_bytes:
                return self.reserved_bytes + size - self.limit_bytes
        self._segments += 1
        self.reserved_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.reserved_bytes)
        return _Block(size, (self._segments, 0), small=small)

    def _split(self, block: _Block, size: int) -> None:
        left = block.size - size
        if left < BLOCK_BYTES if block.small else left <= SMALL_BYTES:
            return
        rest = _Block(left, (block.order[0], block.order[1] + size), small=block.small)
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        self._put(rest)

    def _put(self, block: _Block) -> None:
        insort(self._free[block.small], (block.size, block.order, block), key=_PLACE)

    def _drop(self, block: _Block) -> None:
        pool = self._free[block.small]
        del pool[bisect_left(pool, (block.size, block.order), key=_PLACE)]

    def _give_back(self) -> None:
        for small, pool in self._free.items():
            kept = [entry for entry in pool if entry[2].before is not None or entry[2].after is not None]
            self.reserved_bytes -= sum(entry[0] for entry in pool) - sum(entry[0] for entry in kept)
            self._free[small] = kept


def _segment_bytes(size: int) -> int:
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    return LARGE_SEGMENT_BYTES if size < OWN_SEGMENT_BYTES else -(-size // STEP_BYTES) * STEP_BYTES


def reserved(graph: Graph, schedule: Schedule, limit_bytes: int | None = None) -> Reserved:
    """What the allocator reserves while a schedule is played; it stops at the first request that the limit denies.

    Resident values are allocated first. A value that overwrites another in place keeps its block. An operator's workspace is
    allocated after its outputs and freed when the operator ends.
    """
    allocator = Allocator(limit_bytes)
    blocks: dict[int, _Block] = {}

    def short(by: int) -> Reserved:
        return Reserved(peak_bytes=allocator.peak_bytes, short_bytes=by)

    for v, node in enumerate(graph.nodes):
        if node.resident and node.bytes:
            found = allocator.take(node.bytes)
            if isinstance(found, int):
                return short(found)
            blocks[v] = found
    for act, v in schedule:
        if act is Act.FREE:
            if v in blocks:
                allocator.give(blocks.pop(v))
        elif act is not Act.OFFLOAD:
            made = (v,) if act is Act.FETCH else (v, *graph.members[v])
            denied = _make(graph, allocator, blocks, made, graph.olds[v] if act is Act.UPDATE else ())
            if not denied and act is not Act.FETCH and graph.nodes[v].workspace_bytes:
                room = allocator.take(graph.nodes[v].workspace_bytes)
                if isinstance(room, int):
                    denied = room
                else:
                    allocator.give(room)
            if denied:
                return short(denied)
    return Reserved(peak_bytes=allocator.peak_bytes)


def _make(
    graph: Graph, allocator: Allocator, blocks: dict[int, _Block], made: tuple[int, ...], olds: tuple[int, ...]
) -> int:
    """Allocate blocks for new values, reusing those of overwritten ones; returns the bytes missing for one, 0 if none are."""
    spare = {old: blocks.pop(old) for old in olds if old in blocks}
    for v in made:
        node = graph.nodes[v]
        if not node.bytes:
            continue
        old = node.overwrites
        if old in spare and graph.nodes[old].bytes == node.bytes:
            blocks[v] = spare.pop(old)
            continue
        found = allocator.take(node.bytes)
        if isinstance(found, int):
            return found
        blocks[v] = found
    for block in spare.values():
        allocator.give(block)
    return 0


def within(budget_bytes: int, ask: Callable[[int, float], Answer]) -> tuple[Answer, Reserved]:
    """A plan whose reserved bytes stay within the budget, and what the allocator reserves for it.

    How many reserved bytes lie idle follows from the plan and cannot be known in advance. So the budget for allocated bytes is
    lowered step by step until the segments fit. The bounds are those for allocated bytes, which hold for reserved bytes, too:
    no plan whose segments fit is faster or has a lower peak.

    Args:
        budget_bytes: limit for reserved bytes.
        ask: returns the plan for a budget of allocated bytes, found in a given share of the available time.

    Returns:
        The answer and what is reserved; the status is ``unknown`` if no plan's segments fit.
    """
    first = ask(budget_bytes, _FIRST)
    found = reserved(first.graph, first.schedule, budget_bytes)
    if not first.status.has_plan or not found.short_bytes:
        return first, found
    between = budget_bytes - first.peak_bound.bytes
    for share in _LOWER:
        answer = ask(budget_bytes - int(share * between), (1 - _FIRST) / len(_LOWER))
        if not answer.status.has_plan:
            break
        found = reserved(answer.graph, answer.schedule, budget_bytes)
        if not found.short_bytes:
            met = answer.extra_seconds <= first.time_bound.seconds
            status = Status.OPTIMAL if met else Status.FEASIBLE
            return replace(answer, status=status, budget_bytes=budget_bytes, time_bound=first.time_bound), found
    return replace(first, status=Status.UNKNOWN), reserved(first.graph, first.schedule)
