"""Checksums that detect changed bytes."""

from __future__ import annotations

import zlib

import torch
from lowtide.runtime.tensors import beneath_autograd, on_storage

_DIRECT_BYTES = 1 << 20
"""Up to this many bytes, the CRC covers every byte; above, it covers the sums of blocks."""
_BLOCK_WORDS = 4096
_PARTS = 64
_MIXER = 0x9E3779B97F4A7C15
"""An odd number whose multiples differ in their upper bits, too."""


def checksum(tensor: torch.Tensor | None) -> int:
    """A sum over all bytes of a value, on any device, to check that a replay gave the same bits.

    The bytes are summed as 64-bit words in `_PARTS` consecutive parts, and the sums are weighted by their positions: the
    result changes where two parts change places, but ignores the order of words within a part. Memory is short when it is
    computed, so it takes no more than one word a part.

    Args:
        tensor: the bytes of one storage: one dimension, ``torch.uint8``.
    """
    assert tensor is not None
    with beneath_autograd():
        words = tensor[: tensor.numel() // 8 * 8].view(torch.int64)
        width = words.numel() // _PARTS
        sums = words[: _PARTS * width].view(_PARTS, width).sum(1).tolist() if width else []
        rest = words[_PARTS * width :].tolist() + tensor[words.numel() * 8 :].tolist()
    found = 0
    for position, value in enumerate((*sums, *rest)):
        found += (2 * position + 1) * _MIXER * value
    return found % (1 << 64)


def _as_stored(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the elements as they are stored, without lazy conjugation and negation."""
    tensor = tensor.conj() if tensor.is_conj() else tensor
    return torch._neg_view(tensor) if tensor.is_neg() else tensor


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a tensor whose dimensions are in the order of its strides: contiguous if the tensor is dense."""
    if tensor.is_contiguous():
        return tensor
    strides = tensor.stride()
    return tensor.permute(sorted(range(tensor.dim()), key=lambda d: -strides[d]))


def digest(tensor: torch.Tensor) -> int | None:
    """A digest of a tensor's elements that detects changes; None if there can be none.

    It detects a changed order of bytes (up to `_DIRECT_BYTES`) or of blocks of `_BLOCK_WORDS` words (above). For a tensor that
    is not dense, or large and not aligned to 8 bytes, it is a plain sum, which detects no changed order. It runs at several
    GB/s and copies nothing but the blocks' sums. It serves the CPU only, where writers exist that torch does not see.
    """
    if tensor.device.type != "cpu" or not on_storage(tensor) or tensor.numel() == 0:
        return None
    with beneath_autograd():
        tensor = in_memory_order(_as_stored(tensor))
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
