"""Handles ``.data`` assignments (``y.data = other``) to tensors that autograd has already saved.

Autograd saves an operator's input as the tensor itself, so that backward reads its current data. It saves an output as another
tensor on the same bytes, which assigning ``.data`` does not reach (``torch/csrc/autograd/saved_variable.cpp``). Lowtide's
handles behave as autograd does in both cases.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any, Protocol, final

from torch.utils import checkpoint

import torch
from lowtide.runtime.monkeypatch import Wraps
from lowtide.runtime.tensors import node_of


class SavedDataKeeper(Protocol):
    """What the saved-tensor hooks gave autograd in place of a tensor."""

    def exchanged(self, tensor: torch.Tensor) -> None:
        """The tensor's ``.data`` was assigned: it shows other data from now on."""


_nodes = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
_functions: list[int] = []
"""Sequence number of the node of each custom function that is being applied, innermost last."""
_as_inputs = 0
"""Number of running calls that save a tensor as an input, without a node."""


@contextlib.contextmanager
def applying() -> Iterator[None]:
    """Surround the application of a custom function: autograd makes its node first, then the nodes of its forward."""
    _functions.append(_nodes())
    try:
        yield
    finally:
        _functions.pop()


def is_applying() -> bool:
    """Whether a custom function's forward is running; a backward within it runs over a separate graph."""
    return bool(_functions)


def _is_result(tensor: torch.Tensor) -> bool:
    """Whether a tensor is being saved by the node that made it: the newest node, or that of a custom function."""
    node = node_of(tensor)
    if node is None or _as_inputs:
        return False
    number = node._sequence_nr()
    return bool(number + 1 == _nodes() or (_functions and number == _functions[-1]))


@final
class Origin(weakref.ref):  # type: ignore[type-arg]
    """A weak reference that leads from a tensor (by ``weakref.getweakrefs``) to what autograd holds in its place."""

    __slots__ = ("_keeper",)

    _keeper: weakref.ref[SavedDataKeeper]

    @classmethod
    def of(cls, tensor: torch.Tensor, keeper: SavedDataKeeper) -> Origin | None:
        """The origin for a tensor that is being saved; None if assigning its ``.data`` would not reach what is saved."""
        if _is_result(tensor):
            return None
        origin = cls(tensor)
        origin._keeper = weakref.ref(keeper)
        return origin

    def exchanged(self, tensor: torch.Tensor) -> None:
        """Tell the keeper, if it is alive, that the tensor shows other data."""
        keeper = self._keeper()
        if keeper is not None:
            keeper.exchanged(tensor)


def watch_exchanges(wraps: Wraps) -> None:
    """Notify the handles of a saved tensor when its ``.data`` is assigned."""
    wraps.put(torch.Tensor, "data", _telling)
    if hasattr(checkpoint, "_make_saved_tensor"):
        wraps.put(checkpoint, "_make_saved_tensor", _saving)


def _telling(original: Any) -> Any:
    def data(tensor: torch.Tensor) -> Any:
        return original.__get__(tensor)

    def exchange(tensor: torch.Tensor, other: torch.Tensor) -> None:
        original.__set__(tensor, other)
        for ref in weakref.getweakrefs(tensor):
            if type(ref) is Origin:
                ref.exchanged(tensor)

    return property(data, exchange, doc=original.__doc__)


def _saving(original: Any) -> Any:
    @functools.wraps(original)
    def save(tensor: torch.Tensor, is_output: bool) -> Any:
        global _as_inputs  # noqa: PLW0603 - torch passes its hooks nothing but the tensor
        _as_inputs += not is_output
        try:
            return original(tensor, is_output)
        finally:
            _as_inputs -= not is_output

    return save
