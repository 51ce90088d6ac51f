"""Python interface to the compiled annealing search (``search.c``), which improves rows of operators."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from lowtide.planning.graph_arrays import Game

_HERE: Final = Path(__file__).resolve().parent
_NO_LIMIT: Final = 1e300
_SLACK: Final = 2.5
"""Slots per operator, so that a copy fits between any two operators."""
_WEIGHT: Final = 10.0
"""Default initial weight of the bytes above the budget; it is divided by the number of operators."""


class _Game(ctypes.Structure):
    """The struct ``Game`` of ``search.c``; the two must match."""

    _fields_ = (
        [(name, ctypes.c_int64) for name in ("ops", "plain", "values")]
        + [
            (name, ctypes.c_void_p)
            for name in (
                "out_at",
                "out",
                "in_at",
                "in_",
                "use_at",
                "use",
                "producer",
                "fetcher",
                "kind",
                "bytes",
                "seconds",
                "once",
                "workspace",
                "overwriter",
                "again",
                "pin",
                "pinned_at",
                "pinned",
            )
        ]
        + [(name, ctypes.c_double) for name in ("budget", "host_budget", "base")]
        + [(name, ctypes.c_int64) for name in ("fixed", "last")]
    )


class _Round(ctypes.Structure):
    _fields_ = (
        ("moves", ctypes.c_int64),
        ("hot", ctypes.c_double),
        ("cold", ctypes.c_double),
        ("weight", ctypes.c_double),
        ("copies", ctypes.c_int64),
        ("target", ctypes.c_double),
        ("deadline", ctypes.c_double),
        ("seed", ctypes.c_uint64),
        ("seconds", ctypes.c_double),
        ("over", ctypes.c_double),
        ("tried", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True)
class AnnealedRow:
    """A row and its cost as the search counts it.

    Attributes:
        ops: operators in order.
        seconds: seconds of all of them.
        over_bytes: bytes above the budget, summed over the places of the row (both boards); 0 if the row fits.
    """

    ops: tuple[int, ...]
    seconds: float
    over_bytes: float

    @property
    def rank(self) -> tuple[float, float]:
        """Sort key, smaller is better: bytes above the budget first, then seconds."""
        return (self.over_bytes, self.seconds)


@cache
def library() -> Any | None:
    """The compiled search; None if it was not built or cannot be loaded."""
    path = next(iter(sorted(_HERE.glob("_search*.so"))), None)
    if path is None:
        return None
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError:
        return None
    loaded.lowtide_anneal.restype = ctypes.c_int
    loaded.lowtide_anneal.argtypes = [
        ctypes.POINTER(_Game),
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_int64),
        ctypes.c_int64,
        ctypes.POINTER(_Round),
    ]
    return loaded


def end(running: list[Any]) -> None:
    """Make running rounds return their best row soon: sets their deadlines to 0, which they check every 1024 moves."""
    for asked in running[:]:
        asked.deadline = 0.0


_LIFE, _STATE, _HOST = range(3)


class Annealer:
    """Anneals rows for one game and one budget; may be used from several threads at once."""

    def __init__(self, game: Game, budget_bytes: int, *, fixed: bool) -> None:
        """Lay out the game's arrays for the library."""
        self.game = game
        self.budget = max(1, budget_bytes - game.graph.resident_bytes)
        self._arrays: list[np.ndarray[Any, Any]] = []
        self._struct = self._laid_out(fixed)

    def round(
        self,
        row: Sequence[int],
        *,
        moves: int,
        hot: float,
        cold: float,
        copies: bool,
        seed: int,
        deadline: float,
        target_seconds: float,
        weight: float | None = None,
        running: list[Any] | None = None,
    ) -> AnnealedRow:
        """Run one round of annealing, starting from a row.

        Args:
            row: operators in an order in which they can run.
            moves: largest number of moves to try.
            hot: temperature at the start, as a share of the graph's seconds.
            cold: temperature at the end, likewise.
            copies: whether operators may run again; otherwise only the order changes.
            seed: random seed; the same seed and row give the same answer unless the deadline ends the round.
            deadline: time of :func:`time.monotonic` at which the round returns its best row so far.
            target_seconds: a row that fits and takes no longer ends the round.
            weight: initial weight of the bytes above the budget (as a share of the budget, summed over the row) relative to
                seconds (as a share of the graph's). It rises while the row does not fit, and falls while it does.
            running: list that holds the round while it runs, for :func:`end`.

        Raises:
            MemoryError: if the library cannot allocate memory.
        """
        found = library()
        assert found is not None
        slots = max(int(_SLACK * self.game.plain), int(1.5 * len(row))) + 64
        buffer = np.zeros(slots, dtype=np.int32)
        buffer[: len(row)] = row
        length = ctypes.c_int64(len(row))
        if weight is None:
            weight = _WEIGHT / self.game.plain if copies else 1.0
        asked = _Round(moves, hot, cold, weight, int(copies), target_seconds, deadline, seed, 0.0, 0.0, 0)
        if running is not None:
            running.append(asked)
        done = found.lowtide_anneal(
            ctypes.byref(self._struct), buffer.ctypes.data, ctypes.byref(length), slots, ctypes.byref(asked)
        )
        if running is not None:
            running.remove(asked)
        if not done:
            raise MemoryError("the search ran out of memory")
        return AnnealedRow(tuple(buffer[: length.value].tolist()), asked.seconds, asked.over)

    def count(self, row: Sequence[int]) -> AnnealedRow:
        """The cost of a row as the search counts it; the row is not changed."""
        return self.round(
            row, moves=0, hot=1.0, cold=1.0, copies=False, seed=1, deadline=time.monotonic() + 60, target_seconds=-1.0
        )

    def _keep(self, data: Iterable[Any], kind: Any) -> int:
        array = np.ascontiguousarray(np.asarray(data if isinstance(data, np.ndarray) else list(data), dtype=kind))
        if not array.size:
            array = np.zeros(1, dtype=kind)
        self._arrays.append(array)
        return int(array.ctypes.data)

    def _lists(self, lists: Sequence[Sequence[int]]) -> tuple[int, int]:
        at = np.cumsum([0, *(len(x) for x in lists)])
        return self._keep(at, np.int32), self._keep((x for items in lists for x in items), np.int32)

    def _laid_out(self, fixed: bool) -> _Game:
        game = self.game
        values = len(game.value_nodes)
        outputs = [list(x) for x in game.outputs]
        kind, sizes = [_LIFE] * values, game.bytes.tolist()
        producer, fetcher = game.producer.tolist(), game.fetcher.tolist()
        uses: list[Sequence[int]] = list(game.readers)
        pin, overwriter = game.pin.tolist(), game.overwriter.tolist()

        def extra(what: int, size: int, maker: int, fetch: int) -> None:
            for o in {maker, fetch} - {-1}:
                outputs[o].append(len(kind))
            kind.append(what)
            sizes.append(size)
            producer.append(maker)
            fetcher.append(fetch)
            uses.append(())
            pin.append(-1)
            overwriter.append(-1)

        for o in range(game.plain):
            if game.state[o]:
                extra(_STATE, int(game.state[o]), o, -1)
        board2 = game.graph.offload
        if board2 is not None and board2.host_bytes is not None:
            for v in range(values):
                if game.fetcher[v] >= 0:
                    extra(_HOST, int(game.bytes[v]), int(game.producer[v]), int(game.fetcher[v]))
        held: list[list[int]] = [[] for _ in game.nodes]
        for v, o in enumerate(pin):
            if o >= 0:
                held[o].append(v)
        out = _Game()
        out.ops, out.plain, out.values = len(game.nodes), game.plain, len(kind)
        out.out_at, out.out = self._lists(outputs)
        out.in_at, out.in_ = self._lists(game.inputs)
        out.use_at, out.use = self._lists(uses)
        out.pinned_at, out.pinned = self._lists(held)
        out.producer, out.fetcher = self._keep(producer, np.int32), self._keep(fetcher, np.int32)
        out.kind, out.bytes = self._keep(kind, np.uint8), self._keep(sizes, np.float64)
        out.seconds, out.once = self._keep(game.seconds, np.float64), self._keep(game.once, np.float64)
        out.workspace, out.overwriter = self._keep(game.workspace, np.float64), self._keep(overwriter, np.int32)
        out.again, out.pin = self._keep(game.again, np.uint8), self._keep(pin, np.int32)
        out.budget, out.base = float(self.budget), game.base_seconds or 1.0
        limit = board2.host_bytes if board2 is not None else None
        out.host_budget = _NO_LIMIT if limit is None else float(limit)
        out.fixed, out.last = int(fixed), game.last
        return out
