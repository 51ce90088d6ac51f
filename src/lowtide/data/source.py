"""The `Source` protocol, and reading samples of a source into memory that is already allocated."""

from __future__ import annotations

from typing import Any, Final, Protocol

from numpy.typing import NDArray

ONE_BY_ONE_BYTES: Final = 16 << 10
"""Samples of at least this size are read one by one where possible: a read call costs 1 us, copying 16 KiB costs 2 us."""
Array = NDArray[Any]


class Source(Protocol):
    """Samples along the first dimension. It can be sent to other processes; each opens the files when it first reads."""

    def __len__(self) -> int:
        """Number of samples."""

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample as `read` returns it."""

    def read(self, start: int, stop: int) -> Array:
        """Samples ``start`` to ``stop`` in a new array: [stop - start, ...]."""


def read_into(source: Any, room: Any, start: int, stop: int) -> None:
    """Read samples ``start`` to ``stop`` into ``room``: an array [stop - start, ...], or a tuple of such arrays."""
    direct = getattr(source, "read_into", None)
    if direct is not None:
        direct(room, start, stop)
    else:
        fill(room, source.read(start, stop))


def gathers(source: Any) -> bool:
    """Whether to read samples one by one: the file supports it, and samples are so large that it costs less than a copy."""
    able = getattr(source, "gathers", None)
    return able is not None and able() and source.sample_bytes >= ONE_BY_ONE_BYTES


def within(start: int, stop: int, length: int) -> None:
    """Check that a slice lies within the data.

    Raises:
        IndexError: if it does not; names the slice.
    """
    if not 0 <= start <= stop <= length:
        raise IndexError(f"samples {start} to {stop} are out of range: there are {length}")


def fill(room: Any, samples: Any) -> None:
    """Copy samples into ``room``, an array or a tuple of arrays."""
    if isinstance(room, tuple):
        for part, found in zip(room, samples, strict=True):
            part[...] = found
    else:
        room[...] = samples
