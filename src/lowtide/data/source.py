"""What a source of samples is, and how some of them are read into memory that is there."""

from __future__ import annotations

from typing import Any, Final, Protocol

from numpy.typing import NDArray

ONE_BY_ONE_BYTES: Final = 16 << 10
"""Samples from this size on are read one by one where that is possible: a call costs a microsecond, a copy of so much two."""
Array = NDArray[Any]


class Source(Protocol):
    """Samples along the first dimension. Can be sent to other processes; files are opened where they are first read."""

    def __len__(self) -> int:
        """How many."""

    @property
    def sample_bytes(self) -> int:
        """Of one sample, as it is read."""

    def read(self, start: int, stop: int) -> Array:
        """Samples of a slice, in memory of their own: [stop - start, ...]."""


def read_into(source: Any, room: Any, start: int, stop: int) -> None:
    """Samples of a slice, into memory that is there: [stop - start, ...], or a tuple of such."""
    direct = getattr(source, "read_into", None)
    if direct is not None:
        direct(room, start, stop)
    else:
        fill(room, source.read(start, stop))


def gathers(source: Any) -> bool:
    """Whether samples are large enough, and the file such, that reading one by one costs less than one copy more."""
    able = getattr(source, "gathers", None)
    return able is not None and able() and source.sample_bytes >= ONE_BY_ONE_BYTES


def within(start: int, stop: int, length: int) -> None:
    """Refuse a slice that reaches beyond the data.

    Raises:
        IndexError: naming it.
    """
    if not 0 <= start <= stop <= length:
        raise IndexError(f"samples {start} to {stop} of {length}")


def fill(room: Any, samples: Any) -> None:
    """Copy samples into memory that is there."""
    if isinstance(room, tuple):
        for part, found in zip(room, samples, strict=True):
            part[...] = found
    else:
        room[...] = samples
