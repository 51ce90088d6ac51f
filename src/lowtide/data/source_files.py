"""Array files, each opened with the library of its format: .npy, HDF5, Zarr, Parquet."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from lowtide.base.errors import ReaderError
from lowtide.data.source import Array, within

NAMED: Final = 8


class _File:
    """Base of all formats: a handle that each process opens on first use, and dtype conversion."""

    def __init__(self, path: Path, name: Any, dtype: np.dtype[Any] | None) -> None:
        self._path, self._name, self._dtype = path, name, dtype
        self._handle: Any = None
        self._owner = 0

    def __getstate__(self) -> dict[str, Any]:
        """The state without the handle."""
        return {**self.__dict__, "_handle": None}

    def _open(self) -> Any:
        """The handle, opened by this process: one inherited through a fork is not used."""
        if self._handle is None or self._owner != os.getpid():
            try:
                self._handle, self._owner = self._opened(), os.getpid()
            except ImportError as error:
                raise ReaderError(f"{self._path}: reading it needs {error.name}: pip install {error.name}") from None
            except (OSError, EOFError, KeyError, ValueError) as error:
                raise ReaderError(f"{self._path}: cannot be read: {error}") from error
        return self._handle

    def _opened(self) -> Any:
        raise NotImplementedError

    def __len__(self) -> int:
        """Number of samples."""
        return int(self._open().shape[0])

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample as `read` returns it."""
        array = self._open()
        return int((self._dtype or array.dtype).itemsize * np.prod(array.shape[1:], dtype=np.int64))

    def read(self, start: int, stop: int) -> Array:
        """Samples ``start`` to ``stop``: [stop - start, ...]."""
        array = self._open()
        within(start, stop, len(self))
        found = np.asarray(array[start:stop])
        return found if self._dtype is None else found.astype(self._dtype, copy=False)


@final
class _Opened:
    """An open .npy file and the offset of its samples; closed with the object. Mapped only if samples are not contiguous."""

    def __init__(self, path: Path) -> None:
        mapped = np.load(path, mmap_mode="r", allow_pickle=False)
        self.shape, self.dtype, self.offset = mapped.shape, mapped.dtype, mapped.offset
        self.sample_bytes = int(self.dtype.itemsize * np.prod(self.shape[1:], dtype=np.int64))
        self.mapped: Array | None = None if mapped.flags.c_contiguous else mapped
        if self.mapped is None:
            self.file = os.open(path, os.O_RDONLY)
            weakref.finalize(self, os.close, self.file)


@final
class Npy(_File):
    """A .npy file, read into given memory: pages of a memory map would stay resident in this process."""

    def _opened(self) -> Any:
        return _Opened(self._path)

    def read(self, start: int, stop: int) -> Array:
        """Samples ``start`` to ``stop``, read from the file into a new array: [stop - start, ...]."""
        within(start, stop, len(self))
        opened = self._open()
        made = np.empty((stop - start, *opened.shape[1:]), self._dtype or opened.dtype)
        self.read_into(made, start, stop)
        return made

    def read_into(self, room: Array, start: int, stop: int) -> None:
        """Read samples ``start`` to ``stop`` into ``room``: [stop - start, ...], without a copy if nothing is converted."""
        opened: _Opened = self._open()
        within(start, stop, opened.shape[0])
        if opened.mapped is not None:
            room[...] = opened.mapped[start:stop]
            return
        raw = _as_it_lies(room, opened.dtype)
        self._read(opened, _bytes_of(raw), opened.offset + start * opened.sample_bytes)
        if raw is not room:
            room[...] = raw

    def gathers(self) -> bool:
        """Whether each sample is contiguous in the file."""
        return self._open().mapped is None

    def expect(self, bounds: Sequence[tuple[int, int]]) -> None:
        """Have the kernel read ahead the slices whose samples will be requested."""
        opened: _Opened = self._open()
        for start, stop in bounds:
            first, size = opened.offset + start * opened.sample_bytes, (stop - start) * opened.sample_bytes
            if not (_is_cached(opened.file, first) and _is_cached(opened.file, first + size - 1)):
                os.posix_fadvise(opened.file, first, size, os.POSIX_FADV_WILLNEED)

    def gather_into(self, room: Array, which: NDArray[np.int64]) -> None:
        """Read the samples with indices ``which`` into ``room``, each without a copy if nothing is converted."""
        opened: _Opened = self._open()
        total, size = opened.shape[0], opened.sample_bytes
        within(int(which.min(initial=total)), int(which.max(initial=-1)) + 1, total)
        raw = _as_it_lies(room, opened.dtype)
        view, read, file = _bytes_of(raw), os.preadv, opened.file
        for place, offset in zip(range(0, len(view), size), (opened.offset + which * size).tolist(), strict=True):
            part = view[place : place + size]
            got = read(file, (part,), offset)
            if got != size:
                self._read(opened, part[got:], offset + got)
        if raw is not room:
            room[...] = raw

    def _read(self, opened: _Opened, view: memoryview, offset: int) -> None:
        while view:
            got = os.preadv(opened.file, (view,), offset)
            if not got:
                raise ReaderError(f"{self._path}: truncated at byte {offset}, before its last sample")
            view, offset = view[got:], offset + got


def _is_cached(file: int, offset: int) -> bool:
    """Whether a byte is in the page cache: this check is cheaper than requesting read-ahead of data that is cached."""
    try:
        return os.preadv(file, (bytearray(1),), offset, os.RWF_NOWAIT) == 1
    except OSError:
        return False


def _as_it_lies(room: Array, dtype: np.dtype[Any]) -> Array:
    """Memory to read the file's bytes into: ``room`` itself if nothing is converted, else an array of the file's dtype."""
    return room if _takes(room, dtype) else np.empty(room.shape, dtype)


def _takes(room: Array, dtype: np.dtype[Any]) -> bool:
    """Whether a file's bytes can be read straight into memory: it is contiguous and of the file's dtype."""
    return bool(room.flags.c_contiguous and room.dtype == dtype)


def _bytes_of(room: Array) -> memoryview:
    return memoryview(room.reshape(-1).view(np.uint8).data)


@final
class Hdf5(_File):
    """A data set of an HDF5 file."""

    def _opened(self) -> Any:
        import h5py

        return h5py.File(self._path, "r")[self._name]

    def read_into(self, room: Array, start: int, stop: int) -> None:
        """Read samples ``start`` to ``stop`` into ``room``, without a copy if nothing is converted."""
        within(start, stop, len(self))
        array = self._open()
        if stop > start and _takes(room, array.dtype):
            array.read_direct(room, np.s_[start:stop])
        else:
            room[...] = self.read(start, stop)


@final
class Zarr(_File):
    """A Zarr array."""

    def _opened(self) -> Any:
        import zarr

        found = zarr.open(str(self._path), mode="r")
        return found if self._name is None else found[self._name]

    def read_into(self, room: Array, start: int, stop: int) -> None:
        """Read samples ``start`` to ``stop`` into ``room``; chunks are decoded straight into it if nothing is converted."""
        within(start, stop, len(self))
        array = self._open()
        if stop > start and _takes(room, array.dtype):
            from zarr.core.buffer.cpu import NDBuffer

            array.get_basic_selection(slice(start, stop), out=NDBuffer.from_numpy_array(room))
        else:
            room[...] = self.read(start, stop)


@final
class Parquet(_File):
    """Columns of a Parquet file, read row group by row group; the last row group read is kept."""

    def __init__(self, path: Path, name: Any, dtype: np.dtype[Any] | None) -> None:
        """Take one column, or several, which form a second dimension."""
        super().__init__(path, [name] if isinstance(name, str) else list(name), dtype)
        self._flat = isinstance(name, str)
        self._kept: tuple[int, Array] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The state without the handle and the row group that is kept."""
        return {**self.__dict__, "_handle": None, "_kept": None}

    def _opened(self) -> Any:
        import pyarrow.parquet

        file = pyarrow.parquet.ParquetFile(self._path)
        missing = [n for n in self._name if n not in file.schema_arrow.names]
        if missing:
            raise KeyError(f"no column {missing[0]!r}; there are {', '.join(file.schema_arrow.names)}")
        rows = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
        return file, np.concatenate([[0], np.cumsum(rows)])

    def __len__(self) -> int:
        """Number of rows."""
        return int(self._open()[1][-1])

    @property
    def sample_bytes(self) -> int:
        """Bytes of one row as `read` returns it."""
        first = self.read(0, 1) if len(self) else np.empty((1,))
        return int(first.nbytes)

    def _group(self, number: int) -> Array:
        kept = self._kept
        if kept is None or kept[0] != number:
            table = self._open()[0].read_row_group(number, columns=self._name)
            arrays = [_column(table.column(n), f"{self._path}, column {n}") for n in self._name]
            if self._dtype is not None:
                arrays = [a.astype(self._dtype) for a in arrays]
            if len({a.dtype for a in arrays}) > 1:
                raise ReaderError(
                    f"{self._path}: the columns have different types ({', '.join(str(a.dtype) for a in arrays)}): give dtype="
                )
            self._kept = kept = number, arrays[0] if self._flat else np.stack(arrays, axis=1)
        return kept[1]

    def read(self, start: int, stop: int) -> Array:
        """Rows ``start`` to ``stop`` in a new array: [stop - start, ...]."""
        parts = list(self._parts(start, stop))
        if not parts:
            return self._group(0)[:0]
        return np.concatenate(parts) if len(parts) > 1 else parts[0].copy()

    def read_into(self, room: Array, start: int, stop: int) -> None:
        """Read rows ``start`` to ``stop`` into ``room``, with a single copy."""
        at = 0
        for part in self._parts(start, stop):
            room[at : at + len(part)] = part
            at += len(part)

    def _parts(self, start: int, stop: int) -> Iterator[Array]:
        """Rows ``start`` to ``stop``, one row group after the other."""
        within(start, stop, len(self))
        edges = self._open()[1]
        first = int(np.searchsorted(edges, start, side="right")) - 1
        while start < stop:
            end = min(stop, int(edges[first + 1]))
            yield self._group(first)[start - edges[first] : end - edges[first]]
            start, first = end, first + 1


def _column(column: Any, where: str) -> Array:
    """A column as an array: numbers [rows], or lists of numbers of one length [rows, length].

    Raises:
        ReaderError: if a value is missing (null), lists differ in length, or values are not numbers.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks) if column.num_chunks != 1 else column.chunk(0)
    if column.null_count:
        raise ReaderError(f"{where}: {column.null_count} values of a row group are missing (null); fill them in first")
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type) or pa.types.is_fixed_size_list(column.type):
        lengths = pc.unique(pc.list_value_length(column)).to_pylist()
        if len(lengths) > 1:
            raise ReaderError(f"{where}: the lists differ in length ({min(lengths)} to {max(lengths)}): pad or cut them")
        return _column(column.flatten(), where).reshape(len(column), -1)
    made = np.asarray(column.to_numpy(zero_copy_only=False))
    if made.dtype.kind not in "biuf":
        raise ReaderError(f"{where} holds {column.type}, not numbers")
    return made


def names(file: Path, kind: Any) -> list[str]:
    """Names of the data sets or columns in a file, at most `NAMED`."""
    try:
        if kind is Hdf5:
            import h5py

            names: list[str] = []
            with h5py.File(file, "r") as opened:
                opened.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
            return names[:NAMED]
        import pyarrow.parquet

        return list(pyarrow.parquet.ParquetFile(file).schema_arrow.names)[:NAMED]
    except (ImportError, OSError) as error:
        raise ReaderError(f"{file}: cannot be read: {error}") from error
