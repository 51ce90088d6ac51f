"""Reads and sets a parameter's gradient past the property in its place, and tells who besides the parameter holds it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any, Final, NamedTuple, final

import torch
from lowtide.runtime.storage.views import sole_owner
from lowtide.runtime.tensors import GRAD, beneath_autograd

MOST_ADDRESSES: Final = 1024
"""Known addresses are first looked through for those of dead storages once there are so many."""

_DATA: Any = torch._C.TensorBase.data


@final
class KnownAddresses:
    """Storages whose addresses code outside torch may have; dead ones are forgotten now and then."""

    def __init__(self) -> None:
        """Know none."""
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._most = MOST_ADDRESSES

    def add(self, storage: torch.UntypedStorage) -> None:
        """The address of a storage is known from now on."""
        if len(self._known) >= self._most:
            self._known = {at: ref for at, ref in self._known.items() if ref() is not None}
            self._most = max(MOST_ADDRESSES, 2 * len(self._known))
        self._known[storage._cdata] = weakref.ref(storage)

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        """Whether the address of a storage is known."""
        ref = self._known.get(storage._cdata)
        return ref is not None and ref() is storage


def is_held_here(lock: Any) -> bool:
    """Whether this thread holds a reentrant lock: a signal's handler has interrupted what the lock protects."""
    return bool(lock._is_owned())


def put_gradient(parameter: torch.Tensor, grad: torch.Tensor) -> None:
    """Set a parameter's gradient, even if its ``.data`` has another type or size by now, which torch checks only here."""
    try:
        GRAD.__set__(parameter, grad)
    except RuntimeError:
        data = parameter.data
        _DATA.__set__(parameter, torch.empty_like(grad))
        GRAD.__set__(parameter, grad)
        _DATA.__set__(parameter, data)


def is_alone(grad: torch.Tensor) -> bool:
    """Whether nothing refers to a gradient weakly or to its storage, and the script keeps nothing on this very object."""
    return not weakref.getweakrefcount(grad) and not grad.__dict__ and sole_owner(grad.untyped_storage(), 1)


class Counts(NamedTuple):
    """Reference counts of a gradient: of its Python object, of the tensor in C++, and of its storage's Python object.

    The caller's own references are included, so counts are comparable only between callers that hold the same.
    """

    object: int
    tensor: int
    storage: int


def references(grad: torch.Tensor) -> Counts:
    """The reference counts of a gradient that one variable of the caller refers to."""
    held: Callable[[], int] | None = getattr(grad, "_use_count", None)
    stored = sys.getrefcount(grad.untyped_storage()) if grad.layout is torch.strided else 0
    return Counts(sys.getrefcount(grad), 0 if held is None else held(), stored)


def references_of_unheld() -> Counts:
    """What :func:`references` returns for a gradient held only by its parameter and by one variable of the caller."""
    with beneath_autograd():
        parameter = torch.nn.Parameter(torch.empty(1))
        GRAD.__set__(parameter, torch.empty(1))
    grad = GRAD.__get__(parameter)
    return references(grad)
