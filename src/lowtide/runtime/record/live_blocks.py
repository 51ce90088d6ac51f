"""Tracks live storages in a recording: autograd's saved tensors of them, other references, nodes that use them.

Only counts and weak references are kept, apart from the saved tensors themselves, which autograd would keep alive anyway.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, final

import torch
from lowtide.recording.file_format import EntryKind, Role
from lowtide.runtime.record.saved_tensors import Kept
from lowtide.runtime.record.watched_items import OpenNeeds, Polled
from lowtide.runtime.storage.views import StorageRef, sole_owner
from lowtide.runtime.tensors import beneath_autograd

_HELD_FOR_GOOD: Final = frozenset({Role.PARAMETER, Role.BUFFER, Role.OPTIMIZER_STATE})


@final
class LiveBlock:
    """One live storage.

    Its many fields are everything that a recording says about one storage.

    Attributes:
        number: its id in the recording.
        bytes: size of the storage.
        counted: whether the meter counts its bytes.
        role: the role that was recognised; -1 for none so far.
        storage: weak reference to the storage; None once it has died.
        saves: number of saved tensors of it that autograd holds.
        aliases: how many of these are held by detached aliases that Lowtide made; ``leaves`` are the others, held as the
            script's own tensor objects (except parameters, which their modules keep alive).
        watched: whether it is, or was, polled for references other than autograd's.
        unheld: whether a poll has found that there are none.
        made, read, written: the step in which it appeared, and the last steps in which it was read and written in place.
        root: whether a backward started at a tensor on it.
        node: sequence number of the autograd node that ran when it appeared; -1 for none.
        looked: whether it was looked up among the script's variables at a model call.
        op, module, source, label, name: ids of names; ``op``, ``module`` and ``source`` are those of the operator that made
            it, ``label`` is its type and shape, ``name`` belongs to its role.
        phase: code of the phase in which it appeared.
    """

    __slots__ = (
        "aliases", "bytes", "counted", "label", "leaves", "looked", "made", "module", "name", "node", "number", "op", "phase",
        "read", "role", "root", "saves", "source", "storage", "unheld", "watched", "written",
    )

    def __init__(self, number: int, size: int, step: int, *, counted: bool) -> None:
        """Start with no role, no saved tensors and no known origin; ``step`` is the one in which the block appears."""
        self.number, self.bytes, self.counted = number, size, counted
        self.role, self.saves, self.node = -1, 0, -1
        self.made = self.read = self.written = step
        self.root = self.looked = self.watched = self.unheld = False
        self.aliases = 0
        self.leaves: list[weakref.ref[Kept]] = []
        self.storage: StorageRef | None = None
        self.name = self.op = self.module = self.source = self.label = self.phase = 0

    def is_held(self) -> bool:
        """Whether anything besides autograd's saved tensors refers to its storage."""
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
    """Bases of kept leaves that are views: per base (by ``id``) the number of such views, and the base itself."""
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
    """Python reference count of a base that only its view holds, as :func:`_is_shared_base` measures it."""
    view = torch.empty(2)[:1]
    assert view._base is not None
    bases = {0: view._base}
    return sys.getrefcount(bases[0])


_OF_A_BASE: Final = _base_references()


def _is_shared_base(bases: dict[int, torch.Tensor], key: int, views: int) -> bool:
    """Whether anything besides its kept views refers to a base; ``views`` is their number."""
    return sys.getrefcount(bases[key]) > _OF_A_BASE or bases[key]._use_count() > views + 1  # type: ignore[attr-defined]


def _is_shared(kept: Kept, own: int) -> bool:
    """Whether a leaf, kept as the script's own tensor object, has references besides Lowtide's ``own``."""
    assert kept.tensor is not None
    return kept.tensor.requires_grad or sys.getrefcount(kept.tensor) > own + 1 or kept.tensor._use_count() > 1  # type: ignore[attr-defined]


@final
class RecordedSave:
    """A saved tensor that is kept unchanged; records when it is saved, unpacked and released."""

    __slots__ = ("blocks", "kept", "watch")

    def __init__(self, watch: SavedWatch, blocks: list[LiveBlock], kept: Kept) -> None:
        """Record that autograd saved it."""
        self.watch, self.blocks, self.kept = watch, blocks, kept
        for block in blocks:
            watch.saved(block, kept)

    def unpack(self) -> torch.Tensor:
        """Record that backward asks for the tensor, and return it."""
        for block in self.blocks:
            self.watch.asked(block)
        return self.kept.unpack()

    def __del__(self) -> None:
        """Record that autograd released the tensor."""
        for block in self.blocks:
            self.watch.released(block, self.kept)


class SavedWatch:
    """Records when autograd saves, unpacks and releases tensors, and from when on nothing else holds them."""

    def __init__(self, write: Callable[..., Any]) -> None:
        """Send entries to ``write``, called with the entry's kind and ``a``, a block's number."""
        self._write = write
        self._pending: Polled[LiveBlock] = Polled()
        self._needs: OpenNeeds[LiveBlock] = OpenNeeds(_is_passed_on, self._unpinned)

    def saved(self, block: LiveBlock, kept: Kept) -> None:
        """Record that autograd saved a tensor of a block."""
        block.saves += 1
        if not kept.leaf:
            block.aliases += 1
        elif kept.held is not None:  # otherwise a parameter, which its module keeps alive
            block.leaves.append(weakref.ref(kept))
        if not block.watched and block.counted and kept.held is not None:
            block.watched = True
            self._pending.items.append(block)
        self._write(EntryKind.SAVED, a=block.number)

    def asked(self, block: LiveBlock) -> None:
        """Record that backward asks for a saved tensor of a block."""
        self.look()
        self._needs.add(block)
        self._write(EntryKind.NEED, a=block.number)

    def released(self, block: LiveBlock, kept: Kept) -> None:
        """Record that autograd released a saved tensor of a block."""
        block.saves -= 1
        block.aliases -= not kept.leaf
        if not block.saves:
            block.leaves = []
            self._needs.discard(lambda asked: asked is block)
        self._write(EntryKind.RELEASED, a=block.number)

    def look(self) -> None:
        """Before an operator: record blocks that only autograd holds now, and unpacked ones whose node has ended."""
        self._needs.look()
        self._pending.look(self._is_settled)

    def _is_settled(self, block: LiveBlock) -> bool:
        """Whether a block needs no more polling: autograd released it, its role keeps it alive, or only autograd holds it."""
        if not block.saves:
            block.watched = False
        elif block.role not in _HELD_FOR_GOOD:
            if block.is_held():
                return False
            block.unheld = True
            self._write(EntryKind.UNHELD, a=block.number)
        return True

    def _unpinned(self, block: LiveBlock) -> None:
        self._write(EntryKind.UNPINNED, a=block.number)


def _is_passed_on(block: LiveBlock) -> bool:
    """Whether a node has passed a block on that only autograd held before."""
    return block.unheld and block.is_held()
