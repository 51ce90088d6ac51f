"""Tensors whose data is exchanged (``y.data = other``) after autograd saved them.

Of what an operator reads, autograd keeps the tensor itself: backward reads what it shows by then. Of what an operator makes it
keeps another one on the same bytes, which no exchange reaches (``torch/csrc/autograd/saved_variable.cpp``). What is kept in
place of either does as they do.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol, final

import torch
from lowtide.live.tensors import node_of
from lowtide.live.wraps import Wraps


class Keeper(Protocol):
    """What autograd has in place of a tensor."""

    def exchanged(self, tensor: torch.Tensor) -> None:
        """The tensor shows other data from now on."""


@final
class Origin(weakref.ref):  # type: ignore[type-arg]
    """Leads from a tensor (by ``weakref.getweakrefs``) to what autograd has in its place."""

    __slots__ = ("_keeper", "_nodes")

    _keeper: weakref.ref[Keeper]
    _nodes: int

    @classmethod
    def of(cls, tensor: torch.Tensor, keeper: Keeper) -> Origin:
        """Of a tensor that is being saved."""
        origin = cls(tensor)
        origin._keeper = weakref.ref(keeper)
        origin._nodes = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        return origin

    def exchanged(self, tensor: torch.Tensor) -> None:
        """The tensor shows other data: tell, unless it was saved as what an operator made, by the node that was the newest."""
        keeper, node = self._keeper(), node_of(tensor)
        if keeper is not None and (node is None or node._sequence_nr() + 1 != self._nodes):
            keeper.exchanged(tensor)


def watch_exchanges(wraps: Wraps) -> None:
    """Have those told whose tensor's data is exchanged."""
    wraps.put(torch.Tensor, "data", _telling)


def _telling(original: Any) -> Any:
    def data(tensor: torch.Tensor) -> Any:
        return original.__get__(tensor)

    def exchange(tensor: torch.Tensor, other: torch.Tensor) -> None:
        original.__set__(tensor, other)
        for ref in weakref.getweakrefs(tensor):
            if type(ref) is Origin:
                ref.exchanged(tensor)

    return property(data, exchange, doc=original.__doc__)
