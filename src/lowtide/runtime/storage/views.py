"""Storages and the views on them: who owns a storage, what a tensor is on it, and whether it was written."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from lowtide.runtime.device.offload import flat
from lowtide.runtime.tensors import beneath_autograd


def _references_beside_tensors() -> int:
    """References to a storage that are not tensors while it is counted (its Python object, the count's own)."""
    storage = torch.empty(1).untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata))  # type: ignore[attr-defined]


_BESIDE = _references_beside_tensors()
_NO_GUARDS: Final = nullcontext()


def sole_owner(storage: torch.UntypedStorage, own: int) -> bool:
    """Whether no tensor but ``own`` aliases of ours refers to a storage."""
    return int(torch._C._storage_Use_Count(storage._cdata)) <= own + _BESIDE  # type: ignore[attr-defined]


def _beneath() -> AbstractContextManager[None]:
    """For a new view: it wants no gradient, and autocast has no rule for it, so only modes are to be kept out, if any."""
    return beneath_autograd() if torch._C._len_torch_dispatch_stack() else _NO_GUARDS  # type: ignore[attr-defined]


def view_on(storage: torch.UntypedStorage, meta: Meta) -> torch.Tensor:
    """A tensor on a storage."""
    size, stride, offset, dtype, conjugated, negated = meta
    with _beneath():
        view = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)  # type: ignore[call-overload]
    if conjugated:
        torch._C._set_conj(view, True)
    if negated:
        torch._C._set_neg(view, True)
    return view  # type: ignore[no-any-return]


Meta = tuple[torch.Size, tuple[int, ...], int, torch.dtype, bool, bool]
"""Size, stride, offset (in elements) and type of a view on a storage; whether it is conjugated or negated when it is read."""


def meta_of(tensor: torch.Tensor) -> Meta:
    """View metadata of a strided tensor."""
    return tensor.size(), tensor.stride(), int(tensor.storage_offset()), tensor.dtype, tensor.is_conj(), tensor.is_neg()


_NOTHING: dict[torch.device, torch.Tensor] = {}
_DATA: Any = torch._C.TensorBase.data


def version_probe(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without bytes that shares another's version counter."""
    with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
        alias = tensor.detach()
        nothing = _NOTHING.get(tensor.device)
        if nothing is None:
            nothing = _NOTHING[tensor.device] = torch.empty(0, device=tensor.device)
        _DATA.__set__(alias, nothing)
        return alias


def bytes_of(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements; of a sparse one, of the tensors that it is made of."""
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
    """A weak reference to a storage that knows its value and address."""

    __slots__ = ("cdata", "value")

    value: Any
    cdata: int


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """A tensor over all bytes of a storage: our way to hold it."""
    with _beneath():
        return flat(storage)
