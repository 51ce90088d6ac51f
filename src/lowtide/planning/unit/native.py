"""Python interface to the compiled player of units (``player.cpp``), which plays decisions and moves a plan down."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from lowtide.base.trace import Op
from lowtide.planning.unit.problem import FOREVER, Action, Away, Key, Problem

_HERE: Final = Path(__file__).resolve().parent
_ACTIONS: Final = {Action.RECOMPUTE: 1, Action.MOVE: 2}
_OF_NUMBER: Final = {number: action for action, number in _ACTIONS.items()}
_WIDTH: Final = 4
"""Numbers of a decision: value, gap, action, until."""


class _Laid(ctypes.Structure):
    """The struct ``Laid`` of ``player.cpp``; the two must match."""

    _fields_ = [(name, ctypes.c_int64) for name in ("events", "values", "base_bytes")] + [
        (name, ctypes.c_void_p)
        for name in (
            "plain_live", "rise", "again_seconds", "inside_bytes", "reads_at", "reads", "writes_at", "writes",
            "overwrites_at", "overwrites", "bytes", "born", "held_until", "released", "open", "remakeable", "movable",
            "overwritten", "gap_starts", "needs_at", "need_events", "need_pins", "write_seconds", "back_seconds",
        )
    ]  # fmt: skip


@cache
def library() -> Any | None:
    """The compiled player; None if it was not built or cannot be loaded.

    It is called with the GIL held: a unit's scratch memory serves one call at a time, and no call takes more than some ms.
    """
    path = next(iter(sorted(_HERE.glob("_player*.so"))), None)
    if path is None:
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    functions: tuple[tuple[str, Any, list[Any]], ...] = (
        ("laid_bytes", number, []),
        ("unit", pointer, [ctypes.POINTER(_Laid)]),
        ("unit_failed", ctypes.c_int, [pointer]),
        ("unit_free", None, [pointer]),
        ("unit_play", pointer, [pointer, number, pointer]),
        ("unit_move", pointer, [pointer, pointer, number, number, pointer]),
        ("unit_look", ctypes.c_int, [pointer, pointer, pointer, pointer]),
        ("outcome", None, [pointer, pointer, pointer]),
        ("outcome_decisions", None, [pointer, pointer]),
        ("outcome_free", None, [pointer]),
    )
    try:
        loaded = ctypes.PyDLL(str(path))
        for name, result, arguments in functions:
            function = getattr(loaded, f"lowtide_{name}")
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError):  # an AttributeError: it was built from another version of its source
        return None
    return loaded if loaded.lowtide_laid_bytes() == ctypes.sizeof(_Laid) else None


def _freed_with(owner: object, free: Any, handle: int) -> None:
    """Free a handle with its owner, but not at the end of the process: exit handlers and threads may still plan then."""
    weakref.finalize(owner, free, handle).atexit = False


class PlayError(Exception):
    """The compiled player could not play a state: it was denied memory, or the state is of no plan of its unit."""


@final
class NativeUnit:
    """A problem laid out for the compiled player."""

    def __init__(self, problem: Problem, loaded: Any) -> None:
        """Lay out the problem's arrays.

        Raises:
            MemoryError: if there is no memory for it.
        """
        self.library = loaded
        self._arrays: list[NDArray[Any]] = []
        laid = self._laid_out(problem)
        self.handle = loaded.lowtide_unit(ctypes.byref(laid))
        if not self.handle:
            raise MemoryError("no memory for the planner")
        _freed_with(self, loaded.lowtide_unit_free, self.handle)
        self.events, self.values = len(problem.trace.events), len(problem.trace.buffers)

    def _kept(self, values: Iterable[Any], kind: type[np.generic] = np.int64) -> int:
        array = np.ascontiguousarray(np.asarray(values if isinstance(values, np.ndarray) else list(values), dtype=kind))
        self._arrays.append(array)
        return array.ctypes.data

    def _lists(self, rows: list[tuple[int, ...]]) -> tuple[int, int]:
        """Where each row begins, and the rows one after another."""
        begins = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum([len(row) for row in rows], out=begins[1:])
        return self._kept(begins), self._kept(item for row in rows for item in row)

    def _laid_out(self, problem: Problem) -> _Laid:
        events, buffers, moves = problem.trace.events, problem.trace.buffers, problem.bandwidth
        ops = [event if isinstance(event, Op) else None for event in events]
        values = range(len(buffers))
        reads_at, reads = self._lists([op.reads if op else () for op in ops])
        writes_at, writes = self._lists([(*op.writes, *(new for _, new in op.overwrites)) if op else () for op in ops])
        overwrites_at, overwrites = self._lists([tuple(old for old, _ in op.overwrites) if op else () for op in ops])
        needs_at, need_events = self._lists([tuple(e for e, _ in needs) for needs in problem.needs])
        _, need_pins = self._lists([tuple(pin for _, pin in needs) for needs in problem.needs])
        movable = [problem.can_move(v) for v in values]
        back = [problem.back_seconds(b.bytes) if may else 0.0 for b, may in zip(buffers, movable, strict=True)]
        write = [b.bytes / moves.write if may and moves else 0.0 for b, may in zip(buffers, movable, strict=True)]
        return _Laid(
            events=len(events),
            values=len(buffers),
            base_bytes=problem.base_bytes,
            plain_live=self._kept(problem.plain_live),
            rise=self._kept(problem.rise),
            again_seconds=self._kept((problem.again_seconds(op) if op else 0.0 for op in ops), np.float64),
            inside_bytes=self._kept(op.inside_bytes if op else 0 for op in ops),
            reads_at=reads_at,
            reads=reads,
            writes_at=writes_at,
            writes=writes,
            overwrites_at=overwrites_at,
            overwrites=overwrites,
            bytes=self._kept(b.bytes for b in buffers),
            born=self._kept(b.born for b in buffers),
            held_until=self._kept(b.held_until for b in buffers),
            released=self._kept(b.released for b in buffers),
            open=self._kept(b.counted and v not in problem.pinned for v, b in enumerate(buffers)),
            remakeable=self._kept(problem.remakeable),
            movable=self._kept(movable),
            overwritten=self._kept(problem.overwritten.get(v, FOREVER) for v in values),
            gap_starts=self._kept(problem.gap_starts),
            needs_at=needs_at,
            need_events=need_events,
            need_pins=need_pins,
            write_seconds=self._kept(write, np.float64),
            back_seconds=self._kept(back, np.float64),
        )

    def play(self, decisions: Mapping[Key, Away]) -> NativeOutcome | None:
        """The outcome of decisions; None if the runtime cannot carry them out (``simulate.play`` says why)."""
        rows = np.array([(v, g, _ACTIONS[away.action], away.until) for (v, g), away in decisions.items()], dtype=np.int64)
        return self._outcome(self.library.lowtide_unit_play(self.handle, len(decisions), rows.ctypes.data))

    def move(self, state: NativeOutcome, step: int, barred: AbstractSet[Key]) -> NativeOutcome | None:
        """The next state: the cheapest bytes leave the peak event until ``step`` bytes are freed; None if none can.

        Args:
            state: the state before.
            step: bytes to free.
            barred: decisions that must not be made.

        Raises:
            PlayError: if it cannot say; ``greedy`` can, or says why not.
        """
        keys = np.array(sorted(barred), dtype=np.int64)
        found = self._outcome(
            self.library.lowtide_unit_move(self.handle, state.handle, step, len(barred), keys.ctypes.data)
        )
        if found is None and self.library.lowtide_unit_failed(self.handle):
            raise PlayError
        return found

    def _outcome(self, handle: int | None) -> NativeOutcome | None:
        return NativeOutcome(self, handle) if handle else None


@final
class NativeOutcome:
    """The outcome of playing decisions on a unit: what :class:`lowtide.planning.unit.simulate.UnitTimeline` begins with."""

    def __init__(self, unit: NativeUnit, handle: int) -> None:
        """Take over what the library returned."""
        self.unit, self.handle = unit, handle
        _freed_with(self, unit.library.lowtide_outcome_free, handle)
        figures, seconds = (ctypes.c_int64 * 3)(), ctypes.c_double()
        unit.library.lowtide_outcome(handle, ctypes.byref(figures), ctypes.byref(seconds))
        self.peak_bytes, self.peak_event, self._count = figures
        self.extra_seconds = seconds.value

    @cached_property
    def decisions(self) -> dict[Key, Away]:
        """What was decided, by value and gap."""
        rows = np.zeros((self._count, _WIDTH), dtype=np.int64)
        self.unit.library.lowtide_outcome_decisions(self.handle, rows.ctypes.data)
        return {(v, g): Away(_OF_NUMBER[action], until) for v, g, action, until in rows.tolist()}

    @cached_property
    def _looked_at(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        peaks, spent = np.zeros(self.unit.events, dtype=np.int64), np.zeros(self.unit.values)
        if not self.unit.library.lowtide_unit_look(self.unit.handle, self.handle, peaks.ctypes.data, spent.ctypes.data):
            raise PlayError
        return peaks, spent

    @property
    def peak_bytes_at(self) -> NDArray[np.int64]:
        """Per event, peak bytes within it, replays included; ``PlayError`` if there was no memory for it."""
        return self._looked_at[0]

    @property
    def spent_seconds(self) -> NDArray[np.float64]:
        """Per value, seconds of the operators that compute it again; ``PlayError`` if there was no memory for it."""
        return self._looked_at[1]
