"""Finds the strided tensors that hold a tensor's bytes: a sparse tensor has several, a wrapper none."""

from __future__ import annotations

from typing import Final

from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

import torch
from lowtide.runtime.storage.arguments import NO_DISPATCH
from lowtide.runtime.tensors import beneath_autograd

_ROWS, _COLUMNS = ("crow_indices", "col_indices", "values"), ("ccol_indices", "row_indices", "values")
_SPARSE: Final = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _ROWS, torch.sparse_bsr: _ROWS, torch.sparse_csc: _COLUMNS, torch.sparse_bsc: _COLUMNS,
}
"""Names of the parts of sparse tensors, by layout."""


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Strided tensors that hold a tensor's bytes: itself, the parts of a sparse tensor, or the values of a nested one.

    Returns:
        No tensors for one without a storage of its own: a subclass with its own ``__torch_dispatch__``, an uninitialized
        parameter, a tensor on the meta device, a wrapper of a function transform, a lazy zero.
    """
    if type(tensor).__torch_dispatch__ is not NO_DISPATCH or isinstance(tensor, UninitializedTensorMixin):
        return []
    if tensor.device.type == "meta":
        return []
    if is_functorch_wrapped_tensor(tensor) or is_legacy_batchedtensor(tensor) or tensor._is_zerotensor():
        return []
    if tensor.layout is torch.strided and not tensor.is_nested:
        return [tensor]
    names = ("values",) if tensor.is_nested else _SPARSE.get(tensor.layout, ())
    with beneath_autograd():
        return [getattr(tensor, name)() for name in names]
