"""The strided tensors that hold a tensor's bytes: a sparse or nested tensor has several, a wrapper none."""

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
"""What the parts of sparse tensors are called, by layout."""


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Strided tensors that hold a tensor's bytes; none for what has no storage of its own."""
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
