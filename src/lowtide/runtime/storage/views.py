"""Tensors as views of storages: their metadata, how to rebuild them, who owns the storage, and version counters."""

from __future__ import annotations

import sys
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from lowtide.runtime.device.offload import flat
from lowtide.runtime.gate import detached
from lowtide.runtime.tensors import beneath_autograd


def _references_beside_tensors() -> int:
    """References to a storage, during a count, that are not tensors: its Python object's and the count's own."""
    storage = torch.empty(1).untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata))  # type: ignore[attr-defined]


_BESIDE = _references_beside_tensors()
_NO_GUARDS: Final = nullcontext()


def sole_owner(storage: torch.UntypedStorage, own: int) -> bool:
    """Whether no tensors refer to a storage except ``own`` aliases that Lowtide holds."""
    return int(torch._C._storage_Use_Count(storage._cdata)) <= own + _BESIDE  # type: ignore[attr-defined]


def python_references(storage: torch.UntypedStorage) -> int:
    """References to a storage's Python object; to be compared with :data:`UNHELD`."""
    return sys.getrefcount(storage)


def _unheld() -> int:
    tensor = torch.empty(1)
    storage = tensor.untyped_storage()
    return python_references(storage)


UNHELD: Final = _unheld()
"""What :func:`python_references` finds if the caller's local variable is all that holds a storage's Python object."""


def _beneath() -> AbstractContextManager[None]:
    """Context for creating a view: it needs no gradient and autocast has no rule for it, so only modes must be kept out."""
    return beneath_autograd() if torch._C._len_torch_dispatch_stack() else _NO_GUARDS  # type: ignore[attr-defined]


def view_on(storage: torch.UntypedStorage, meta: Meta) -> torch.Tensor:
    """A tensor with the given view metadata on a storage."""
    size, stride, offset, dtype, conjugated, negated = meta
    with _beneath():
        view = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)  # type: ignore[call-overload]
    if conjugated:
        torch._C._set_conj(view, True)
    if negated:
        torch._C._set_neg(view, True)
    return view  # type: ignore[no-any-return]


Meta = tuple[torch.Size, tuple[int, ...], int, torch.dtype, bool, bool]
"""Size, stride, offset (in elements) and dtype of a view of a storage; whether it is lazily conjugated, lazily negated."""


def meta_of(tensor: torch.Tensor) -> Meta:
    """View metadata of a strided tensor."""
    return tensor.size(), tensor.stride(), int(tensor.storage_offset()), tensor.dtype, tensor.is_conj(), tensor.is_neg()


_NOTHING: dict[torch.device, torch.Tensor] = {}
_DATA: Any = torch._C.TensorBase.data


def version_probe(tensor: torch.Tensor) -> torch.Tensor:
    """An empty tensor that shares another tensor's version counter."""
    nothing = _NOTHING.get(tensor.device)
    if nothing is None:
        with beneath_autograd():
            nothing = _NOTHING[tensor.device] = torch.empty(0, device=tensor.device)
    return _alias_with(tensor, nothing)


def view_watched(probe: torch.Tensor, storage: torch.UntypedStorage, meta: Meta) -> torch.Tensor:
    """A tensor with the given view metadata on a storage, which shares a probe's version counter."""
    return _alias_with(probe, view_on(storage, meta))


def _alias_with(tensor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """A detached alias of a tensor, which shares its version counter, with other data."""
    alias = detached(tensor)
    _DATA.__set__(alias, data)
    return alias


def bytes_of(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements; for a sparse tensor, of its indices and values."""
    if tensor.layout is torch.strided:
        return tensor.nbytes
    with beneath_autograd():
        if tensor.layout is torch.sparse_coo:
            return tensor._indices().nbytes + tensor._values().nbytes
        if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            return tensor.crow_indices().nbytes + tensor.col_indices().nbytes + tensor.values().nbytes
        if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
            return tensor.ccol_indices().nbytes + tensor.row_indices().nbytes + tensor.values().nbytes
    return tensor.numel() * tensor.element_size()


class StorageRef(weakref.ref):  # type: ignore[type-arg]
    """A weak reference to a storage that also knows the storage's value and address."""

    __slots__ = ("cdata", "value")

    value: Any
    cdata: int


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """A tensor over all bytes of a storage, which keeps it alive."""
    with _beneath():
        return flat(storage)
