"""Laws: the checksum of a replay detects a change in any byte, the last ones included, and blocks that change places."""

from __future__ import annotations

import pytest
import torch
from harness import heap
from lowtide.runtime.storage.checksum import checksum, digest

BLOCK = 8 * 4096


@pytest.mark.parametrize("size", [0, 1, 7, 8, 1001, BLOCK, BLOCK + 3, 3 * BLOCK + 777])
def test_a_changed_byte_changes_the_checksum(size: int) -> None:
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    before = checksum(data)
    assert checksum(data.clone()) == before
    for at in {0, size // 2, size - 8, size - 1} & set(range(size)):
        changed = data.clone()
        changed[at] ^= 1
        assert checksum(changed) != before, at


def test_blocks_that_change_places_change_the_checksum() -> None:
    """A plain sum of words would be the same for two blocks concatenated the other way round."""
    first, second = torch.randint(0, 256, (2, BLOCK), dtype=torch.uint8)
    assert checksum(torch.cat([first, second])) != checksum(torch.cat([second, first]))
    assert checksum(torch.tensor([1, 2], dtype=torch.uint8)) != checksum(torch.tensor([2, 1], dtype=torch.uint8))


def test_a_checksum_takes_no_memory() -> None:
    """It is computed before a value is dropped, when an operator lacks memory: bytes that it took used to cross budgets."""
    data = torch.zeros(10 << 20, dtype=torch.uint8)
    checksum(data)
    counter = heap()
    counter.tensor_peak = before = counter.tensor_live
    checksum(data)
    assert counter.tensor_peak - before <= 2048


def test_a_digest_of_a_transposed_tensor_covers_every_byte_and_takes_no_memory() -> None:
    """Only where elements have gaps between them is it a plain sum, which copies them and detects no changed order."""
    data = torch.arange(512 * 384, dtype=torch.int32).reshape(512, 384).T
    before = digest(data)
    changed = data.clone(memory_format=torch.preserve_format)
    assert digest(changed) == before
    changed[3, 5], changed[5, 3] = data[5, 3].item(), data[3, 5].item()
    assert digest(changed) != before
    counter = heap()
    counter.tensor_peak = live = counter.tensor_live
    digest(data)
    assert counter.tensor_peak - live <= 2048
