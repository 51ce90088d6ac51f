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
"""Default size of a block: large enough for few seeks, small enough to take little memory."""


@final
class Blocks:
    """Batches of a source, read in contiguous blocks.

    With ``shuffle``, blocks come in random order. As many as the buffer holds are read together, and samples are drawn from
    them at random; each sample comes once per epoch. The order of an epoch depends only on ``seed`` and the number of the
    epoch, so an epoch can be resumed at any batch (`state_dict`). Large samples are not buffered if the file can be read at
    any offset: the kernel reads the blocks ahead, and each sample is read from the page cache straight into its batch.

    Attributes:
        buffer_bytes: limit on what is held at once while shuffling: the buffered blocks, one block being read and one handed
            out. A batch larger than a block comes on top.
        allocate: makes the memory of a batch from its shape and dtype, where each batch is read on its own; `Blocks` does not
            access the batch any more once the next one is requested.
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
        """Read no batch yet.

        Args:
            source: the source to read.
            batch_size: samples per batch.
            shuffle: whether samples come in random order.
            seed: seed of that order.
            block: samples that are read together; by default about 4 MiB of them, or an eighth of the buffer if that is
                less; without ``shuffle`` rounded to whole batches.
            buffer: most bytes that are held while shuffling, such as ``"256MiB"``.
            drop_last: whether to leave out an incomplete last batch.

        Raises:
            ReaderError: if ``batch_size`` is below 1, or if the buffer of a shuffle does not hold four blocks.
        """
        if batch_size < 1:
            raise ReaderError("batch_size must be at least 1")
        self._source, self._batch, self._shuffle, self._seed, self._drop = source, batch_size, shuffle, seed, drop_last
        size = max(1, source.sample_bytes)
        self.buffer_bytes = parse_bytes(buffer) if isinstance(buffer, str) else buffer
        self._block = block or max(1, min(READ_BYTES, self.buffer_bytes // 8) // size)
        if block is None and not shuffle:  # so that no batch spans two blocks
            self._block = max(1, self._block // batch_size) * batch_size
        self._held = self.buffer_bytes // (self._block * size) - 2  # one block is being read, and one is handed out
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
        """Number of batches per epoch."""
        total = len(self._source)
        return total // self._batch if self._drop else -(-total // self._batch)

    def __iter__(self) -> Iterator[Any]:
        """The batches of an epoch, or the rest of the epoch that was loaded. Leaving the iteration early also ends the epoch.

        Raises:
            ReaderError: if a second iteration begins before the first is over.
        """
        start, self._start = self._start, 0
        self._iteration += 1
        mine, self._given = self._iteration, start
        try:
            for number, batch in enumerate(self._batches(start), start=start):
                if mine != self._iteration:
                    raise ReaderError(
                        "these blocks are iterated again before the first iteration is over: create a Blocks for each"
                    )
                self._given = number + 1
                yield batch
        finally:
            if mine == self._iteration:
                self._epoch, self._given = self._epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """The number of the epoch, and how many of its batches were yielded."""
        return {"epoch": self._epoch, "given": self._given}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from there in the next iteration."""
        self._iteration += 1
        self._epoch, self._given, self._start = state["epoch"], state["given"], state["given"]

    def _batches(self, skip: int) -> Iterator[Any]:
        """Batches from number ``skip`` on. The shuffled order is replayed without reading the samples that are skipped."""
        total, first = len(self._source), skip * self._batch
        rest: Any = None
        held = 0
        for part in self._parts(total, first):
            rest = part if rest is None else _join(rest, part)
            del part  # so that its memory can be reused for the next part
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
        """Samples from position ``first`` on, in the order of the epoch, a few blocks at a time."""
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
        """Drawn samples of some blocks, each read on its own."""
        source: Any = self._source
        source.expect(bounds)
        places = np.concatenate([np.arange(*b) for b in bounds])
        for which in draws:
            batch = _room(like, len(which), self._allocate)
            source.gather_into(batch, places[which])
            yield batch
            del batch

    def _buffered(self, room: Any, bounds: list[tuple[int, int]], draws: list[NDArray[np.int64]]) -> Iterator[Any]:
        """Drawn samples of some blocks, which are read one after the other into ``room``."""
        at = 0
        for start, stop in bounds:
            read_into(self._source, _part(room, slice(at, at + stop - start)), start, stop)
            at += stop - start
        yield from (_pick(room, which, self._allocate) for which in draws)

    @property
    def _allocate(self) -> Callable[..., NDArray[Any]]:
        """Makes the memory of samples drawn at random: `allocate`, if a block is a batch."""
        return self.allocate if self._apart else np.empty

    @property
    def _apart(self) -> bool:
        """Whether a block is a batch: each batch is read on its own, not cut from memory that several share."""
        return self._block == self._batch


def _pick(samples: Any, which: NDArray[np.int64], allocate: Callable[..., Any]) -> Any:
    """The samples with indices ``which``, in memory from ``allocate``."""
    if isinstance(samples, tuple):
        return tuple(_pick(s, which, allocate) for s in samples)
    made = allocate((len(which), *samples.shape[1:]), samples.dtype)
    return samples.take(which, axis=0, out=made, mode="clip")  # mode "raise" would buffer `out`


def _copied(samples: Any, which: slice) -> Any:
    """A copy of a slice of the samples, so that the rest can be freed."""
    return tuple(s[which].copy() for s in samples) if isinstance(samples, tuple) else samples[which].copy()


def _room(like: Any, size: int, allocate: Callable[..., Any]) -> Any:
    """Memory for ``size`` samples of the shape and dtype of ``like``."""
    if isinstance(like, tuple):
        return tuple(_room(part, size, allocate) for part in like)
    return allocate((size, *like.shape[1:]), like.dtype)


def _part(samples: Any, which: slice) -> Any:
    """A slice of the samples, without a copy."""
    return tuple(s[which] for s in samples) if isinstance(samples, tuple) else samples[which]


def _join(a: Any, b: Any) -> Any:
    return _gather([a, b])


def _gather(parts: list[Any]) -> Any:
    if isinstance(parts[0], tuple):
        return tuple(np.concatenate([p[i] for p in parts]) for i in range(len(parts[0])))
    return np.concatenate(parts)


def _count(samples: Any) -> int:
    return len(samples[0]) if isinstance(samples, tuple) else len(samples)
