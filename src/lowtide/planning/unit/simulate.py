"""Plays decisions on a unit exactly as the runtime carries them out; the judge of units.

The rules, which ``runtime/planned/mode.py`` and ``runtime/replay/chain.py`` follow to the letter:

* A value that is away in a gap leaves once only autograd holds it and the autograd node of its last need has finished.
* At a need of an absent value, the chain of operators that recomputes it from present values runs in recorded order. Outputs
  of an operator that are already present are freed at once; intermediates are freed after their last reader in the chain;
  values whose decision says so (``Away.until``) are held for their own later need.
* An in-place operator runs on a clone of the value that it overwrites. If that value is an intermediate of the same chain
  with no other reader left, the operator runs on it directly.
* A value that a replayable operator reads and that the plain run would not keep is captured: it is held until the values
  computed from it are released.
* A value from before the unit that is overwritten within it (a weight that the optimizer updates during the backward) is read
  directly until then: values recomputed from it are needed before that event, or are kept.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lowtide.base.errors import StructureError
from lowtide.base.trace import Op
from lowtide.planning.unit.problem import FOREVER, Action, Away, Key, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Remake:
    """What happens at one need of an absent value.

    Attributes:
        value: the value that is needed.
        need: index of the need among the value's needs.
        ops: events of the operators that run again, in order.
        fetched: values fetched from the second board.
        held: other values recomputed or fetched in the process that stay for their own later need.
    """

    value: int
    need: int
    ops: tuple[int, ...]
    fetched: tuple[int, ...]
    held: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitTimeline:
    """The outcome of playing decisions.

    Attributes:
        base_bytes: bytes live when the unit begins.
        live_bytes: per event, bytes live just before it.
        peak_bytes_at: per event, peak bytes within it, replays included.
        extra_seconds: seconds of recomputation and transfers in addition to the plain run.
        remakes: the needs of absent values.
        stays: needs after which a value with decisions is held until the next one.
        intervals: per value with decisions, closed spans of events during which it is absent.
        recorded: events of the operators that the runtime must record.
        captured: values that the runtime must hold although the plain run would free them.
        moved_bytes: bytes written to the second board.
    """

    base_bytes: int
    live_bytes: NDArray[np.int64]
    peak_bytes_at: NDArray[np.int64]
    extra_seconds: float
    remakes: tuple[Remake, ...]
    stays: frozenset[Key]
    intervals: Mapping[int, tuple[tuple[int, int], ...]]
    recorded: frozenset[int]
    captured: frozenset[int]
    moved_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of the unit."""
        return int(self.peak_bytes_at.max(initial=self.base_bytes))

    @property
    def peak_event(self) -> int:
        """Event at which the unit peaks."""
        return int(self.peak_bytes_at.argmax())

    def absent(self, value: int, event: int) -> bool:
        """Whether a value is absent just before an event."""
        spans = self.intervals.get(value, ())
        i = bisect_left(spans, (event + 1, -1)) - 1
        return i >= 0 and spans[i][1] >= event


Decisions = Mapping[Key, Away]


def check(problem: Problem, decisions: Decisions) -> None:
    """Raise if the runtime cannot carry out the decisions.

    Raises:
        StructureError: names the value and the rule.
    """
    for (v, gap), away in decisions.items():
        buffer = problem.trace.buffers[v]
        if buffer.released < 0:
            raise StructureError(f"value {v} was never saved by autograd: it cannot be dropped or offloaded")
        if gap < problem.gap_starts[v]:
            raise StructureError(f"value {v} is held by the script in gap {gap}")
        if away.action is Action.RECOMPUTE and not problem.remakeable[v]:
            raise StructureError(f"value {v} cannot be recomputed: its maker or an ancestor cannot be replayed")
        if away.action is Action.MOVE and not problem.can_move(v):
            raise StructureError(f"value {v} cannot be offloaded: no offload tier, or held until the backward begins")
        if away.action is Action.MOVE and gap > problem.gap_starts[v]:
            first = decisions.get((v, problem.gap_starts[v]))
            if first is None or first.action is not Action.MOVE:
                raise StructureError(f"value {v} cannot be offloaded in gap {gap}: it was not written in its first gap")


def closure(problem: Problem, decisions: Decisions) -> tuple[tuple[int, ...], set[int]]:
    """Operators that must be recorded (events, last first), and values that must be captured."""
    remade = {v for (v, _), away in decisions.items() if away.action is Action.RECOMPUTE}
    moved = {v for v, _ in decisions} - remade
    buffers = problem.trace.buffers
    recorded: set[int] = set()
    captured: set[int] = set()
    stack = list(remade)
    while stack:
        v = stack.pop()
        if buffers[v].born in recorded:
            continue
        recorded.add(buffers[v].born)
        for r in problem.maker(v).reads:
            if r in moved or (buffers[r].born < 0 and not problem.capturable(r)):  # present until overwritten
                continue
            if r in remade or not problem.capturable(r):
                stack.append(r)
            elif buffers[r].released >= 0 or not problem.remakeable[r]:
                captured.add(r)
            else:
                stack.append(r)
    return tuple(sorted(recorded, reverse=True)), captured


class _Play:
    """The state of both boards while the needs of one unit are served in order."""

    def __init__(self, problem: Problem, decisions: Decisions) -> None:
        self.problem = problem
        self.decisions = decisions
        self.buffers = problem.trace.buffers
        self.away_values = {v for v, _ in decisions}
        recorded, self.captured = closure(problem, decisions)
        self.recorded = frozenset(recorded)
        self.ends = self._ends(recorded)
        self.present_until: dict[int, int] = {}
        self.absent_since: dict[int, int] = {}
        self.spans: dict[int, list[tuple[int, int]]] = {v: [] for v in self.away_values}
        self.on_board2: set[int] = set()
        self.leaving: list[tuple[int, int]] = []
        self.ending: list[tuple[int, int]] = []
        self.absent_bytes = 0
        self.seconds = 0.0
        self.moved = 0
        self.remakes: list[Remake] = []
        self.stays: set[Key] = set()

    def _ends(self, recorded: tuple[int, ...]) -> dict[int, int]:
        """Per value with decisions or captured, the last event at whose end it can still be needed."""
        ends: dict[int, int] = {}
        released = [b.released for b in self.buffers]
        lasting = dict(enumerate(released))
        for e in recorded:
            op = self.problem.trace.events[e]
            assert isinstance(op, Op)
            made = (*op.writes, *(new for _, new in op.overwrites))
            last = max((lasting[v] for v in made), default=-1)
            for r in op.reads:
                lasting[r] = max(lasting[r], last)
        for v in self.captured | self.away_values:
            ends[v] = max(self.buffers[v].held_until, lasting[v])
        return ends

    def extension(self) -> NDArray[np.int64]:
        """Per event, bytes that are live longer than in the plain run because replays need them."""
        events = len(self.problem.trace.events)
        delta = np.zeros(events + 2, dtype=np.int64)
        for v, end in self.ends.items():
            plain = self.problem.end(v)
            if end > plain:
                delta[plain + 1] += self.buffers[v].bytes
                delta[min(end, events) + 1] -= self.buffers[v].bytes
        return np.cumsum(delta)[:events]

    def gap(self, v: int, e: int) -> int:
        """Index of the value's gap that contains the event."""
        return bisect_left(self.problem.needs[v], (e + 1, -1))

    def present(self, v: int, e: int) -> bool:
        """Whether a value is on the board just before (or during) an event."""
        if v in self.away_values:
            return v not in self.absent_since and e <= self.ends[v]
        end = self.ends[v] if v in self.captured else self.problem.end(v)
        overwritten = self.problem.overwritten.get(v, FOREVER)
        return e <= min(end, overwritten)

    def leave(self, v: int, after: int) -> None:
        """Schedule a value to leave at the end of event ``after``, unless it is held again by then."""
        self.present_until[v] = after
        heapq.heappush(self.leaving, (after, v))

    def settle(self, e: int) -> None:
        """Remove the values that leave before event ``e``; a value that ends while absent stops counting as absent."""
        while self.leaving and self.leaving[0][0] < e:
            after, v = heapq.heappop(self.leaving)
            if self.present_until.get(v) == after and v not in self.absent_since and after < self.ends[v]:
                self.absent_since[v] = after + 1
                self.absent_bytes += self.buffers[v].bytes
                heapq.heappush(self.ending, (self.ends[v], v))
                away = self.decisions.get((v, self.gap(v, after)))
                if away is not None and away.action is Action.MOVE and v not in self.on_board2:
                    self._write(v)
            elif self.present_until.get(v) == after and after >= self.ends[v]:
                self.present_until[v] = FOREVER
        while self.ending and self.ending[0][0] < e:
            end, v = heapq.heappop(self.ending)
            if v in self.absent_since:
                self.back(v, end)

    def _write(self, v: int) -> None:
        assert self.problem.bandwidth is not None
        self.on_board2.add(v)
        self.moved += self.buffers[v].bytes
        self.seconds += self.buffers[v].bytes / self.problem.bandwidth.write

    def back(self, v: int, e: int) -> None:
        """Put an absent value back on the board from the end of event ``e`` on."""
        since = self.absent_since.pop(v)
        self.absent_bytes -= self.buffers[v].bytes
        if since <= e:
            self.spans[v].append((since, e))

    def chain(self, v: int, e: int) -> tuple[list[int], list[int]]:
        """Operators to run again, and values to fetch, to have value ``v`` at event ``e``."""
        ops: set[int] = set()
        fetched: list[int] = []
        seen = {v}
        stack = [v]
        while stack:
            u = stack.pop()
            if u in self.on_board2:
                fetched.append(u)
                continue
            born = self.buffers[u].born
            if born < 0 or born not in self.recorded:
                raise StructureError(f"value {u} is needed again at event {e}, but cannot be recomputed")
            if born in ops:
                continue
            ops.add(born)
            for r in self.problem.maker(u).reads:
                if r not in seen and not self.present(r, e):
                    seen.add(r)
                    stack.append(r)
        return sorted(ops), fetched

    def meet(self, v: int, e: int, k: int, live: int) -> int:
        """Serve need ``k`` of a value at event ``e``, with ``live`` bytes before it; returns the peak bytes, base included."""
        peak = live
        if v in self.absent_since:
            peak = self._remake(v, e, k, live)
        following = self.decisions.get((v, k + 1))
        pin = self.problem.needs[v][k][1]
        if following is None or following.until <= e:
            self.present_until[v] = FOREVER
            self.stays.add((v, k))
        else:
            self.leave(v, max(pin, self.buffers[v].held_until))
        return peak

    def _remake(self, v: int, e: int, k: int, live: int) -> int:
        ops, fetched = self.chain(v, e)
        events = self.problem.trace.events
        peak = live
        readers: dict[int, int] = {}
        for at in ops:
            op = events[at]
            assert isinstance(op, Op)
            for r in op.reads:
                readers[r] = at
        held: set[int] = set()
        fresh: set[int] = set()
        for u in fetched:
            self.seconds += self.problem.back_seconds(self.buffers[u].bytes)
            live += self.buffers[u].bytes
            fresh.add(u)
            if u != v and self._held(u, e):
                held.add(u)
        peak = max(peak, live)
        for at in ops:
            op = events[at]
            assert isinstance(op, Op)
            self.seconds += self.problem.again_seconds(op)
            peak = max(peak, live + self._clone_bytes(op, at, fresh, held, readers) + op.inside_bytes)
            for old, _ in op.overwrites:
                if self._steals(old, at, fresh, held, readers):
                    fresh.discard(old)
                    live -= self.buffers[old].bytes
            for u in (*op.writes, *(new for _, new in op.overwrites)):
                if self.present(u, e) or u in fresh:
                    continue
                if u == v or readers.get(u, -1) > at or self._held(u, e):
                    live += self.buffers[u].bytes
                    fresh.add(u)
                    if u != v and self._held(u, e):
                        held.add(u)
            for u in [u for u in fresh if u != v and u not in held and readers.get(u, -1) <= at]:
                fresh.discard(u)
                live -= self.buffers[u].bytes
        for u in (v, *held):
            self.back(u, e)
        for u in held:
            self.present_until[u] = FOREVER
        self.remakes.append(
            Remake(value=v, need=k, ops=tuple(ops), fetched=tuple(sorted(fetched)), held=frozenset(held))
        )
        return peak

    def _held(self, u: int, e: int) -> bool:
        if u not in self.absent_since or e >= self.ends[u]:
            return False
        away = self.decisions.get((u, self.gap(u, e)))
        return away is not None and away.until <= e and self.gap(u, e) < len(self.problem.needs[u])

    def _steals(self, old: int, at: int, fresh: set[int], held: set[int], readers: Mapping[int, int]) -> bool:
        return old in fresh and old not in held and readers.get(old, -1) <= at

    def _clone_bytes(self, op: Op, at: int, fresh: set[int], held: set[int], readers: Mapping[int, int]) -> int:
        return sum(
            self.buffers[old].bytes for old, _ in op.overwrites if not self._steals(old, at, fresh, held, readers)
        )


def play(problem: Problem, decisions: Decisions) -> UnitTimeline:
    """Play decisions on a problem.

    Raises:
        StructureError: if the runtime cannot carry out the decisions.
    """
    check(problem, decisions)
    game = _Play(problem, decisions)
    events = len(problem.trace.events)
    base = problem.plain_live + game.extension()
    peaks = base + problem.rise
    for v in game.away_values:
        first = problem.gap_starts[v]
        needs, buffer = problem.needs[v], problem.trace.buffers[v]
        if (v, first) in decisions:
            pin = needs[first - 1][1] if first else -1
            game.leave(v, max(pin, buffer.held_until, buffer.born))
    chain_peaks: list[tuple[int, int]] = []
    meetings = sorted((e, v, k) for v in game.away_values for k, (e, _) in enumerate(problem.needs[v]))
    for e, v, k in meetings:
        game.settle(e)
        if k < problem.gap_starts[v]:
            continue
        live = int(base[e]) - game.absent_bytes
        chain_peaks.append((e, game.meet(v, e, k, live)))
    game.settle(events + 1)
    absent = np.zeros(events + 2, dtype=np.int64)
    for v, since in game.absent_since.items():
        if since <= game.ends[v]:
            game.spans[v].append((since, min(game.ends[v], events - 1)))
    for v, spans in game.spans.items():
        for start, end in spans:
            absent[start] += problem.trace.buffers[v].bytes
            absent[min(end, events) + 1] -= problem.trace.buffers[v].bytes
    gone = np.cumsum(absent)[:events]
    peaks = peaks - gone
    for e, peak in chain_peaks:
        peaks[e] = max(int(peaks[e]), peak)
    return UnitTimeline(
        base_bytes=problem.base_bytes,
        live_bytes=base - gone,
        peak_bytes_at=peaks,
        extra_seconds=game.seconds,
        remakes=tuple(game.remakes),
        stays=frozenset(game.stays),
        intervals={v: tuple(spans) for v, spans in game.spans.items()},
        recorded=game.recorded,
        captured=frozenset(game.captured),
        moved_bytes=game.moved,
    )
