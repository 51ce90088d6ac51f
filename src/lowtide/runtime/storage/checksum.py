"""Checksums that detect changed bytes."""

from __future__ import annotations

import zlib

import torch
from lowtide.runtime.tensors import beneath_autograd, on_storage

_DIRECT_BYTES = 1 << 20
"""Up to this many bytes, the CRC covers every byte; above, it covers the sums of blocks."""
_BLOCK_WORDS = 4096
_MIXER = 0x1E3779B97F4A7C15
"""An odd number whose multiples differ in their upper bits too."""


def checksum(tensor: torch.Tensor | None) -> int:
    """A sum over all bytes of a value, on any device, to check that a replay gave the same bits.

    Blocks of `_BLOCK_WORDS` words are summed as 64-bit integers and weighted by their positions, so that the sum changes
    where two blocks change places; it ignores the order of words within a block. Bytes that fill no block are weighted one by
    one.

    Args:
        tensor: the bytes of one storage: one dimension, ``torch.uint8``.
    """
    assert tensor is not None
    with beneath_autograd():
        whole = tensor.numel() // (8 * _BLOCK_WORDS)
        end = whole * 8 * _BLOCK_WORDS
        found = _weighted(tensor[end:])
        if whole:
            found += _weighted(tensor[:end].view(torch.int64).view(whole, _BLOCK_WORDS).sum(1))
        return found


def _weighted(values: torch.Tensor) -> int:
    """The sum of integers, each times an odd number that its position gives; modulo 2 to the power of 64."""
    odd = 2 * torch.arange(values.numel(), device=values.device) + 1
    return int((values.to(torch.int64) * (odd * _MIXER)).sum())


def _as_stored(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the elements as they are stored, without lazy conjugation and negation."""
    tensor = tensor.conj() if tensor.is_conj() else tensor
    return torch._neg_view(tensor) if tensor.is_neg() else tensor


def digest(tensor: torch.Tensor) -> int | None:
    """A digest of a tensor's elements that detects changes; None if there can be none.

    It detects a changed order of bytes (up to `_DIRECT_BYTES`) or of blocks of `_BLOCK_WORDS` words (above). For a tensor that
    is not contiguous, or large and not aligned to 8 bytes, it is a plain sum, which detects no changed order. It runs at
    several GB/s and copies nothing but the blocks' sums. It serves the CPU only, where writers exist that torch does not see.
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
