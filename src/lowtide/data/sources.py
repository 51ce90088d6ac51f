"""Opens arrays on disk that are read in slices: .npy, HDF5, Zarr, Parquet columns."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from lowtide.base.errors import ReaderError
from lowtide.data.source import Array, Source
from lowtide.data.source_files import Hdf5, Npy, Parquet, Zarr, names


def open_source(path: str | os.PathLike[str], name: str | Sequence[str] | None = None, *, dtype: str | None = None) -> Source:
    """Open an array on disk.

    Args:
        path: ``.npy``; ``.h5`` or ``.hdf5``; a Zarr store (a folder, ``.zarr``); ``.parquet`` or ``.pq``.
        name: the data set within an HDF5 file or a Zarr group, or the column or columns of a Parquet file (several form a
            second dimension).
        dtype: type that samples are converted to as each slice is read, such as ``"float32"``.

    Raises:
        ReaderError: if the file cannot be opened, ``name`` or ``dtype`` does not fit it, or the library that reads it is not
            installed.
    """
    file = Path(path)
    if not file.exists():
        raise ReaderError(f"no such data: {file}")
    kinds: Mapping[str, Any] = {
        ".npy": Npy, ".h5": Hdf5, ".hdf5": Hdf5, ".zarr": Zarr, ".parquet": Parquet, ".pq": Parquet,
    }  # fmt: skip
    kind = kinds.get(file.suffix.lower()) or (Zarr if file.is_dir() else None)
    if kind is None:
        raise ReaderError(f"{file}: unknown file format: the name must end in .npy, .h5, .hdf5, .zarr, .parquet or .pq")
    if kind is Npy and name is not None:
        raise ReaderError(f"{file}: a .npy file holds one array, without a name: leave out the name")
    if kind in {Hdf5, Parquet} and name is None:
        raise ReaderError(
            f"{file}: name the {'data set' if kind is Hdf5 else 'column'} to read: {', '.join(names(file, kind))}"
        )
    try:
        wanted = None if dtype is None else np.dtype(dtype)
    except TypeError:
        raise ReaderError(f"unknown dtype {dtype!r}: give one that NumPy knows, such as float32") from None
    found = kind(file, name, wanted)
    try:
        len(found)  # opens the file, so that an error is raised here and not by the first read
    except (AttributeError, IndexError):
        raise ReaderError(f"{file}: {name or 'it'} is not an array with samples along its first dimension") from None
    return found  # type: ignore[no-any-return]




@final
class Arrays:
    """Several sources of equal length as one; a sample is a tuple."""

    def __init__(self, *sources: Source) -> None:
        """Join them.

        Raises:
            ReaderError: if their lengths differ.
        """
        lengths = {len(s) for s in sources}
        if len(lengths) != 1:
            raise ReaderError(f"the sources have {sorted(lengths)} samples: all must have the same number")
        self._sources = sources

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._sources[0])

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample, summed over the sources."""
        return sum(s.sample_bytes for s in self._sources)

    def read(self, start: int, stop: int) -> tuple[Array, ...]:
        """Samples ``start`` to ``stop`` of each source."""
        return tuple(s.read(start, stop) for s in self._sources)

    def gathers(self) -> bool:
        """Whether `gather_into` works for every source: each sample is contiguous in its file, and not empty."""
        return all(hasattr(s, "gathers") and s.gathers() and s.sample_bytes for s in self._sources)

    def expect(self, bounds: Sequence[tuple[int, int]]) -> None:
        """Have the kernel read ahead these slices of each source."""
        for source in self._sources:
            source.expect(bounds)  # type: ignore[attr-defined]

    def gather_into(self, room: tuple[Array, ...], which: NDArray[np.int64]) -> None:
        """Read the samples with indices ``which`` from each source into its part of ``room``."""
        for source, part in zip(self._sources, room, strict=True):
            source.gather_into(part, which)  # type: ignore[attr-defined]
