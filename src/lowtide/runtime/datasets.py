"""Sources and blocks of ``lowtide.data`` as PyTorch datasets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, final

import torch
from lowtide.base.errors import ReaderError
from lowtide.data.blocks import Blocks
from lowtide.data.isolate import Isolated
from lowtide.data.source import Source


def dataset(source: Source | Isolated) -> SourceDataset:
    """Wrap a source as a map-style dataset of tensors; neighbouring indices of a batch are read as one slice."""
    return SourceDataset(source)


def stream(blocks: Blocks | Isolated) -> BlocksDataset:
    """Wrap blocks as an iterable dataset of whole batches: give the loader ``batch_size=None``.

    A loader's n workers split the batches: each yields every n-th. Workers may only read blocks that are not shuffled, because
    a worker does not know the epoch, on which a shuffled order depends.
    """
    return BlocksDataset(blocks)


def _tensors(found: Any) -> Any:
    if isinstance(found, tuple):
        return tuple(_tensors(part) for part in found)
    return torch.from_numpy(found)


@final
class SourceDataset(torch.utils.data.Dataset[Any]):
    """Map-style dataset over a source, sample by sample."""

    def __init__(self, source: Source | Isolated) -> None:
        """Read from a source."""
        self._source = source

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._source)

    def __getitem__(self, index: int) -> Any:
        """One sample.

        Raises:
            IndexError: if there is no sample of that index; negative ones are not allowed.
        """
        if not 0 <= index < len(self):
            raise IndexError(index)
        found = _tensors(self._source.read(index, index + 1))
        return tuple(part[0] for part in found) if isinstance(found, tuple) else found[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """Several samples, in the order of ``indices``; each run of consecutive indices is one read.

        Raises:
            IndexError: if there is no sample of an index; negative ones are not allowed.
        """
        for index in indices:
            if not 0 <= index < len(self):
                raise IndexError(index)
        made: dict[int, Any] = {}
        ordered = sorted(set(indices))
        start = 0
        for i in range(1, len(ordered) + 1):
            if i == len(ordered) or ordered[i] != ordered[i - 1] + 1:
                found = _tensors(self._source.read(ordered[start], ordered[i - 1] + 1))
                for k in range(start, i):
                    at = k - start
                    made[ordered[k]] = tuple(part[at] for part in found) if isinstance(found, tuple) else found[at]
                start = i
        return [made[i] for i in indices]


@final
class BlocksDataset(torch.utils.data.IterableDataset[Any]):
    """Iterable dataset over blocks, batch by batch; its position can be saved if the loader has no workers."""

    def __init__(self, blocks: Blocks | Isolated) -> None:
        """Read from blocks."""
        self._blocks = blocks

    def __len__(self) -> int:
        """Batches per epoch."""
        return len(self._blocks)

    def __iter__(self) -> Iterator[Any]:
        """The batches of an epoch; in a loader's worker, that worker's share.

        Raises:
            ReaderError: if a worker reads shuffled blocks.
        """
        worker = torch.utils.data.get_worker_info()
        if worker is not None and getattr(self._blocks, "shuffled", True):
            raise ReaderError(
                "shuffled blocks in a loader's workers would come in the same order each epoch: use num_workers=0, and "
                "lowtide.data.isolate(blocks) to read in another process"
            )
        for number, batch in enumerate(self._blocks):
            if worker is None or number % worker.num_workers == worker.id:
                yield _tensors(batch)

    def state_dict(self) -> dict[str, Any]:
        """The position in the blocks."""
        return dict(self._blocks.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position."""
        self._blocks.load_state_dict(state)
