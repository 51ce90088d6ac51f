"""Checksums over bytes, by which changes are detected."""

from __future__ import annotations

import zlib

import torch
from lowtide.runtime.tensors import beneath_autograd, on_storage

_DIRECT_BYTES = 1 << 20
"""So many bytes are read one by one; of more, blocks are summed up first."""
_BLOCK_WORDS = 4096


def checksum(tensor: torch.Tensor | None) -> int:
    """A sum over all bytes of a value, to check that a replay gave the same bits."""
    assert tensor is not None
    with beneath_autograd():
        words = tensor[: tensor.numel() // 8 * 8].view(torch.int64)
        return int(words.sum()) if words.numel() else 0


def _as_stored(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the same elements as they lie in memory."""
    tensor = tensor.conj() if tensor.is_conj() else tensor
    return torch._neg_view(tensor) if tensor.is_neg() else tensor


def digest(tensor: torch.Tensor) -> int | None:
    """What tells a tensor's elements from others, their order included as far as blocks go; None where it cannot be told.

    At some GB/s, without a copy of more than a few KiB; on the CPU alone, where there are writers that torch does not see.
    """
    if tensor.device.type != "cpu" or not on_storage(tensor) or tensor.numel() == 0:
        return None
    with beneath_autograd():
        tensor = _as_stored(tensor)
        if not tensor.is_contiguous():
            kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(tensor.element_size())
            return None if kind is None else int(tensor.view(kind).sum())
        data = tensor.reshape(-1).view(torch.uint8)
        if data.numel() <= _DIRECT_BYTES:
            return zlib.crc32(torch._C.TensorBase.numpy(data).data)
        blocks = data.numel() // (8 * _BLOCK_WORDS)
        if data.data_ptr() % 8 or data.storage_offset() % 8:
            return int(data.sum())
        summed = data[: blocks * 8 * _BLOCK_WORDS].view(torch.int64).view(blocks, _BLOCK_WORDS).sum(1)
        rest = zlib.crc32(torch._C.TensorBase.numpy(data[blocks * 8 * _BLOCK_WORDS :]).data)
        return zlib.crc32(torch._C.TensorBase.numpy(summed).data, rest)
