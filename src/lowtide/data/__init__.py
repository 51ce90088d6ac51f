"""Readers that cannot leak, for .npy, HDF5, Zarr and Parquet: slices, shuffled blocks, separate processes.

All formats share one interface, `Source`.

::

    source = lowtide.data.open("train.h5", "images", dtype="float32")
    for batch in lowtide.data.Blocks(source, batch_size=64, shuffle=True, seed=epoch, buffer="256MiB"):
        ...
    loader = DataLoader(lowtide.data.dataset(source), ...)            # or lowtide.data.stream(blocks)
    loader = DataLoader(lowtide.data.isolate(my_dataset, memory="1GiB"), ...)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lowtide.data.blocks import Blocks
from lowtide.data.isolate import Isolated, isolate
from lowtide.data.source import Source
from lowtide.data.sources import Arrays, open_source

if TYPE_CHECKING:
    from lowtide.runtime.datasets import dataset, stream

__all__ = ["Arrays", "Blocks", "Isolated", "Source", "dataset", "isolate", "open", "stream"]

open = open_source  # noqa: A001 - users write lowtide.data.open


def __getattr__(name: str) -> Any:
    """Import the names that need torch on first access."""
    if name in {"dataset", "stream"}:
        from lowtide.runtime import datasets

        return getattr(datasets, name)
    raise AttributeError(f"module 'lowtide.data' has no attribute {name!r}")
