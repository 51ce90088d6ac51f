"""Sources and blocks as torch's data sets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, final

import torch
from lowtide.base.errors import ReaderError
from lowtide.data.blocks import Blocks
from lowtide.data.isolate import Isolated
from lowtide.data.source import Source


def dataset(source: Source | Isolated) -> SourceDataset:
    """A source as a map-style data set: samples as tensors; several indices that lie together are read as one slice."""
    return SourceDataset(source)


def stream(blocks: Blocks | Isolated) -> BlocksDataset:
    """Blocks as an iterable data set of whole batches: give the loader ``batch_size=None``.

    Workers of a loader share the batches out, each gives every n-th; of blocks in order only, since workers do not know which
    epoch it is.
    """
    return BlocksDataset(blocks)


def _tensors(found: Any) -> Any:
    if isinstance(found, tuple):
        return tuple(_tensors(part) for part in found)
    return torch.from_numpy(found)


@final
class SourceDataset(torch.utils.data.Dataset[Any]):
    """A source, sample by sample."""

    def __init__(self, source: Source | Isolated) -> None:
        """Read from a source."""
        self._source = source

    def __len__(self) -> int:
        """Samples."""
        return len(self._source)

    def __getitem__(self, index: int) -> Any:
        """One sample."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        found = _tensors(self._source.read(index, index + 1))
        return tuple(part[0] for part in found) if isinstance(found, tuple) else found[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """Several samples: runs of neighbours are read together."""
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
    """Blocks, batch by batch; the position can be saved where no workers read."""

    def __init__(self, blocks: Blocks | Isolated) -> None:
        """Read from blocks."""
        self._blocks = blocks

    def __len__(self) -> int:
        """Batches of an epoch."""
        return len(self._blocks)

    def __iter__(self) -> Iterator[Any]:
        """Batches; of a worker, its share."""
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
        """The position."""
        return dict(self._blocks.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._blocks.load_state_dict(state)
