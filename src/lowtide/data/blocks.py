"""Batches from a source: in order, or shuffled within a bounded buffer of blocks; the position can be saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from lowtide.base.errors import ReaderError
from lowtide.base.units import MIB, parse_bytes
from lowtide.data.source import Source, gathers, read_into

READ_BYTES: Final = 4 * MIB
"""A block, where nothing else is asked: few enough seeks, little enough memory."""


@final
class Blocks:
    """Batches of a source, read in contiguous blocks.

    Shuffled: blocks come in random order, as many as the buffer holds are read together, and samples are drawn from them at
    random; each sample comes once an epoch. An epoch's order depends on ``seed`` and the number of the epoch alone, so it
    can go on at any batch (`state_dict`). Large samples of a file that can be read anywhere are not buffered: the system is
    told of the blocks, and each sample is read from its cache straight into the batch.

    Attributes:
        buffer_bytes: the most that is held at once: the buffer, and one batch.
        allocate: makes the memory of a batch that is read by itself, from its shape and type; nobody looks there any more once
            the next batch is asked for.
    """

    allocate: Callable[..., NDArray[Any]] = staticmethod(np.empty)

    def __init__(
        self,
        source: Source | Any,
        *,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
        block: int | None = None,
        buffer: int | str = 64 * MIB,
        drop_last: bool = False,
    ) -> None:
        """Nothing is read yet.

        Args:
            source: what is read.
            batch_size: samples of a batch.
            shuffle: whether in random order.
            seed: of the order.
            block: samples that are read together; about 4 MiB where it is not given.
            buffer: bytes that are held at most while shuffling (``"256MiB"``).
            drop_last: whether an incomplete last batch is left out.

        Raises:
            ReaderError: if the buffer does not hold two blocks.
        """
        if batch_size < 1:
            raise ReaderError("batch_size is at least 1")
        self._source, self._batch, self._shuffle, self._seed, self._drop = source, batch_size, shuffle, seed, drop_last
        size = max(1, source.sample_bytes)
        self.buffer_bytes = parse_bytes(buffer) if isinstance(buffer, str) else buffer
        self._block = block or max(1, min(READ_BYTES, self.buffer_bytes // 8) // size)
        if block is None and not shuffle:  # so that no batch is put together from two
            self._block = max(1, self._block // batch_size) * batch_size
        self._held = self.buffer_bytes // (self._block * size) - 2  # one more is being read, and one is given out
        if shuffle and self._held < 2:
            raise ReaderError(
                f"a buffer of {self.buffer_bytes} bytes does not hold four blocks of {self._block} samples of {size} bytes: "
                "give a larger buffer, or a smaller block"
            )
        self._epoch = self._given = self._start = 0
        self._iteration = 0

    @property
    def shuffled(self) -> bool:
        """Whether batches come in random order."""
        return self._shuffle

    def __len__(self) -> int:
        """Batches of an epoch."""
        total = len(self._source)
        return total // self._batch if self._drop else -(-total // self._batch)

    def __iter__(self) -> Iterator[Any]:
        """The batches of an epoch, or the rest of the one that was loaded. Left before its end, the epoch is over too.

        Raises:
            ReaderError: if it is iterated a second time before the first was over.
        """
        start, self._start = self._start, 0
        self._iteration += 1
        mine, self._given = self._iteration, start
        try:
            for number, batch in enumerate(self._batches(start), start=start):
                if mine != self._iteration:
                    raise ReaderError("these blocks are iterated a second time before the first was over: make two of them")
                self._given = number + 1
                yield batch
        finally:
            if mine == self._iteration:
                self._epoch, self._given = self._epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """Which epoch, and how many of its batches were given."""
        return {"epoch": self._epoch, "given": self._given}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from there when iterated next."""
        self._iteration += 1
        self._epoch, self._given, self._start = state["epoch"], state["given"], state["given"]

    def _batches(self, skip: int) -> Iterator[Any]:
        """Batches from a number on. The shuffled order is played through without reading what is passed over."""
        total, first = len(self._source), skip * self._batch
        rest: Any = None
        held = 0
        for part in self._parts(total, first):
            rest = part if rest is None else _join(rest, part)
            del part  # so that its memory can be used for the next
            held = _count(rest)
            at = 0
            while held - at >= self._batch:
                yield _part(rest, slice(at, at + self._batch))
                at += self._batch
            rest = None if at == held else _copied(rest, slice(at, held)) if at else rest
            held -= at
        if held and not self._drop:
            yield rest

    def _parts(self, total: int, first: int) -> Iterator[Any]:
        """Samples from the first on, in the order of the epoch, a few blocks at a time."""
        if first < total:
            yield from self._shuffled(total, first) if self._shuffle else self._in_order(total, first)

    def _in_order(self, total: int, first: int) -> Iterator[Any]:
        like = self._source.read(0, 1) if self._apart else None
        for start in range(first, total, self._block):
            stop = min(start + self._block, total)
            if like is None:
                yield self._source.read(start, stop)
            else:
                batch = _room(like, stop - start, self.allocate)
                read_into(self._source, batch, start, stop)
                yield batch
                del batch

    def _shuffled(self, total: int, first: int) -> Iterator[Any]:
        random = np.random.default_rng((self._seed, self._epoch))
        blocks = random.permutation(-(-total // self._block))
        like = self._source.read(0, 1)
        room = None if gathers(self._source) else _room(like, self._held * self._block, np.empty)
        step = max(self._batch, self._block)
        passed = 0
        for group in range(0, len(blocks), self._held):
            chosen = blocks[group : group + self._held]
            bounds = [(int(b) * self._block, min((int(b) + 1) * self._block, total)) for b in chosen]
            size = sum(stop - start for start, stop in bounds)
            order = random.permutation(size)
            if passed + size > first:
                wanted = order[max(0, first - passed) :]
                draws = [wanted[start : start + step] for start in range(0, len(wanted), step)]
                yield from self._gathered(like, bounds, draws) if room is None else self._buffered(room, bounds, draws)
            passed += size

    def _gathered(self, like: Any, bounds: list[tuple[int, int]], draws: list[NDArray[np.int64]]) -> Iterator[Any]:
        """Samples of some blocks, each read by itself."""
        source: Any = self._source
        source.expect(bounds)
        places = np.concatenate([np.arange(*b) for b in bounds])
        for which in draws:
            batch = _room(like, len(which), self._allocate)
            source.gather_into(batch, places[which])
            yield batch
            del batch

    def _buffered(self, room: Any, bounds: list[tuple[int, int]], draws: list[NDArray[np.int64]]) -> Iterator[Any]:
        """Samples of some blocks, which are read one behind the other into room for them."""
        at = 0
        for start, stop in bounds:
            read_into(self._source, _part(room, slice(at, at + stop - start)), start, stop)
            at += stop - start
        yield from (_pick(room, which, self._allocate) for which in draws)

    @property
    def _allocate(self) -> Callable[..., NDArray[Any]]:
        """What makes the memory of what is drawn at random."""
        return self.allocate if self._apart else np.empty

    @property
    def _apart(self) -> bool:
        """Whether each batch is read by itself, not cut out of what several have in common."""
        return self._block == self._batch


def _pick(samples: Any, which: NDArray[np.int64], allocate: Callable[..., Any]) -> Any:
    """Some of the samples, in memory of their own."""
    if isinstance(samples, tuple):
        return tuple(_pick(s, which, allocate) for s in samples)
    made = allocate((len(which), *samples.shape[1:]), samples.dtype)
    return samples.take(which, axis=0, out=made, mode="clip")  # "raise" would take them aside first


def _copied(samples: Any, which: slice) -> Any:
    """Some of the samples, in memory of their own, so that the rest can go."""
    return tuple(s[which].copy() for s in samples) if isinstance(samples, tuple) else samples[which].copy()


def _room(like: Any, size: int, allocate: Callable[..., Any]) -> Any:
    """Room for so many samples."""
    if isinstance(like, tuple):
        return tuple(_room(part, size, allocate) for part in like)
    return allocate((size, *like.shape[1:]), like.dtype)


def _part(samples: Any, which: slice) -> Any:
    """Some of the samples, without a copy."""
    return tuple(s[which] for s in samples) if isinstance(samples, tuple) else samples[which]


def _join(a: Any, b: Any) -> Any:
    return _gather([a, b])


def _gather(parts: list[Any]) -> Any:
    if isinstance(parts[0], tuple):
        return tuple(np.concatenate([p[i] for p in parts]) for i in range(len(parts[0])))
    return np.concatenate(parts)


def _count(samples: Any) -> int:
    return len(samples[0]) if isinstance(samples, tuple) else len(samples)
