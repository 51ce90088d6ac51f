"""Storages while they live in a recording: who saved them for backward, what else holds them, which node uses them.

Nothing but counts and weak references is kept, apart from the saved tensors themselves, which autograd would keep.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from lowtide.recording.file_format import EntryKind, Role
from lowtide.runtime.intercept.inplace_accumulation import graph_task, running
from lowtide.runtime.record.polled import Polled
from lowtide.runtime.record.saved_tensors import Kept
from lowtide.runtime.storage.views import StorageRef, sole_owner
from lowtide.runtime.tensors import beneath_autograd

_HELD_FOR_GOOD: Final = frozenset({Role.PARAMETER, Role.BUFFER, Role.OPTIMIZER_STATE})


@final
class LiveBlock:
    """One storage while it lives.

    Its many fields are what a recording says of one storage.

    Attributes:
        number: its id in the recording.
        role: what it was recognised as; -1 so far.
        storage: leads to the storage; None once it is gone.
        saves: saved tensors of it that autograd has.
        aliases: how many of them are aliases of our own; ``leaves``: the others, which are the script's very tensors.
        watched: whether references of others than autograd are polled for, or were.
        unheld: whether the last poll found none.
        made, read, written: the steps in which it appeared, was read and was written in place last.
        root: whether a backward began at it.
        node: the number of autograd's node that ran when it appeared; -1 for none.
        looked: whether it was looked up among the script's variables when a model was called.
        op, module, source, label, name: ids of names.
    """

    __slots__ = (
        "aliases", "bytes", "counted", "label", "leaves", "looked", "made", "module", "name", "node", "number", "op", "phase",
        "read", "role", "root", "saves", "source", "storage", "unheld", "watched", "written",
    )

    def __init__(self, number: int, size: int, step: int, *, counted: bool) -> None:
        """A block that nothing is known of."""
        self.number, self.bytes, self.counted = number, size, counted
        self.role, self.saves, self.node = -1, 0, -1
        self.made = self.read = self.written = step
        self.root = self.looked = self.watched = self.unheld = False
        self.aliases = 0
        self.leaves: list[weakref.ref[Kept]] = []
        self.storage: StorageRef | None = None
        self.name = self.op = self.module = self.source = self.label = self.phase = 0

    def is_held(self) -> bool:
        """Whether anything but autograd's saved tensors refers to its storage."""
        storage = None if self.storage is None else self.storage()
        if storage is None:
            return False
        if not self.leaves:
            return not sole_owner(storage, self.aliases)
        kept = [k for ref in self.leaves if (k := ref()) is not None and k.tensor is not None]
        tensors = Counter(id(k.tensor) for k in kept)
        views, bases = _bases_of(kept)
        if not sole_owner(storage, self.aliases + len(tensors) + sum(base not in tensors for base in views)):
            return True
        if any(_is_shared_base(bases, key, views[key]) for key in views if key not in tensors):
            return True
        return any(_is_shared(k, tensors[id(k.tensor)]) for k in kept)


def _bases_of(kept: list[Kept]) -> tuple[Counter[int], dict[int, torch.Tensor]]:
    """The tensors whose views are kept as the very views, by identity, and how many of their views are."""
    views: Counter[int] = Counter()
    bases: dict[int, torch.Tensor] = {}
    for tensor in {id(k.tensor): k.tensor for k in kept}.values():
        with beneath_autograd():
            base = None if tensor is None else tensor._base
        if base is not None:
            views[id(base)] += 1
            bases[id(base)] = base
    return views, bases


def _base_references() -> int:
    """Python's references to a base that only its view holds, as :func:`_is_shared_base` counts them."""
    view = torch.empty(2)[:1]
    assert view._base is not None
    bases = {0: view._base}
    return sys.getrefcount(bases[0])


_OF_A_BASE: Final = _base_references()


def _is_shared_base(bases: dict[int, torch.Tensor], key: int, views: int) -> bool:
    """Whether a base has other references than its views that are kept."""
    return sys.getrefcount(bases[key]) > _OF_A_BASE or bases[key]._use_count() > views + 1  # type: ignore[attr-defined]


def _is_shared(kept: Kept, own: int) -> bool:
    """Whether a leaf, which is kept as the very tensor, has other references than ``own`` of ours."""
    assert kept.tensor is not None
    return kept.tensor.requires_grad or sys.getrefcount(kept.tensor) > own + 1 or kept.tensor._use_count() > 1  # type: ignore[attr-defined]


@final
class RecordedSave:
    """A saved tensor, kept as it is."""

    __slots__ = ("blocks", "kept", "watch")

    def __init__(self, watch: SavedWatch, blocks: list[LiveBlock], kept: Kept) -> None:
        """Note that autograd saved it."""
        self.watch, self.blocks, self.kept = watch, blocks, kept
        for block in blocks:
            watch.saved(block, kept)

    def unpack(self) -> torch.Tensor:
        """The tensor."""
        for block in self.blocks:
            self.watch.asked(block)
        return self.kept.unpack()

    def __del__(self) -> None:
        """Autograd let go."""
        for block in self.blocks:
            self.watch.released(block, self.kept)


@dataclass(slots=True, eq=False)
class _OpenNeed:
    """A saved tensor that a node of autograd has asked for; the node's number, and the graph task in which it runs."""

    block: LiveBlock
    node: int
    task: int

    def is_over(self, node: int, task: int) -> bool:
        """Whether its node has ended, now that ``node`` runs, and has not passed the tensor on."""
        ended = self.task >= task and (self.node, self.task) != (node, task)
        return ended and not (self.block.unheld and self.block.is_held())


class SavedWatch:
    """Saved tensors of a recording: when autograd saves them, asks for them and lets go, and when nothing else holds them."""

    def __init__(self, write: Callable[..., Any]) -> None:
        """Entries go to ``write``: a kind, and ``a``, a block's number."""
        self._write = write
        self._pending: Polled[LiveBlock] = Polled()
        self._needs: list[_OpenNeed] = []

    def saved(self, block: LiveBlock, kept: Kept) -> None:
        """Autograd saved a tensor of a block."""
        block.saves += 1
        if not kept.leaf:
            block.aliases += 1
        elif kept.held is not None:  # else a parameter, which its module holds
            block.leaves.append(weakref.ref(kept))
        if not block.watched and block.counted and kept.held is not None:
            block.watched = True
            self._pending.items.append(block)
        self._write(EntryKind.SAVED, a=block.number)

    def asked(self, block: LiveBlock) -> None:
        """Backward asks for a saved tensor of a block."""
        self.look()
        self._needs.append(_OpenNeed(block, running(), graph_task()))
        self._write(EntryKind.NEED, a=block.number)

    def released(self, block: LiveBlock, kept: Kept) -> None:
        """Autograd let go of a saved tensor of a block."""
        block.saves -= 1
        block.aliases -= not kept.leaf
        if not block.saves:
            block.leaves = []
            self._needs = [need for need in self._needs if need.block is not block]
        self._write(EntryKind.RELEASED, a=block.number)

    def look(self) -> None:
        """An operator is about to run: note what only autograd holds now, and what the node that asked for it has left."""
        if self._needs:
            self._look_at_needs()
        self._pending.look(self._is_settled)

    def _is_settled(self, block: LiveBlock) -> bool:
        """Whether a saved block need not be looked at any more: it was released, is held for good, or by autograd alone."""
        if not block.saves:
            block.watched = False
        elif block.role not in _HELD_FOR_GOOD:
            if block.is_held():
                return False
            block.unheld = True
            self._write(EntryKind.UNHELD, a=block.number)
        return True

    def _look_at_needs(self) -> None:
        node, task = running(), graph_task()
        still = []
        for need in self._needs:
            if need.is_over(node, task):
                self._write(EntryKind.UNPINNED, a=need.block.number)
            else:
                still.append(need)
        self._needs = still
