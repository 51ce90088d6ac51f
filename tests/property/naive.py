"""The referee's rules again, event by event with sets, for decisions to recompute only: slow and simple.

Written from the docstrings of ``planning/referee.py`` and ``planning/unit/problem.py``; it shares no code with ``_Play``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

from lowtide.planning.unit.problem import Away, Key, Problem
from lowtide.base.trace import Need, Op


@dataclass
class Naive:
    """One play."""

    problem: Problem
    decisions: dict[Key, Away]
    seconds: float = 0.0
    peaks: list[int] = field(default_factory=list)
    absent: set[int] = field(default_factory=set)
    leaving: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Derive what must be remembered from the values that are recomputed."""
        self.buffers = self.problem.trace.buffers
        self.events = self.problem.trace.events
        self.away = {v for v, _ in self.decisions}
        self.replayed: set[int] = set()
        self.captured: set[int] = set()
        for v in self.away:
            self.remember(v)

    def remember(self, v: int) -> None:
        """Remember the operator that makes a value; its inputs are captured, or remembered in turn."""
        if self.buffers[v].born in self.replayed:
            return
        self.replayed.add(self.buffers[v].born)
        for r in self.problem.maker(v).reads:
            if self.buffers[r].born < 0 and not self.problem.capturable(r):
                continue
            kept = self.buffers[r].released >= 0 or not self.problem.remakeable[r]
            if r in self.away or not self.problem.capturable(r) or not kept:
                self.remember(r)
            else:
                self.captured.add(r)

    def last(self, v: int) -> int:
        """Last event at whose end a value, or anything recomputed from it, can be asked for."""
        if v not in self._lasting:
            made = [self.made(e) for e in self.replayed if v in self.op(e).reads]
            heirs = [self.last(u) for us in made for u in us if u != v]
            self._lasting[v] = max([self.buffers[v].released, *heirs])
        return self._lasting[v]

    @property
    def _lasting(self) -> dict[int, int]:
        return self.__dict__.setdefault("lasting", {})

    def op(self, e: int) -> Op:
        """An event that is known to be an operator."""
        found = self.events[e]
        assert isinstance(found, Op)
        return found

    def made(self, e: int) -> list[int]:
        """All values that an operator makes."""
        return [*self.op(e).writes, *(new for _, new in self.op(e).overwrites)]

    def end(self, v: int) -> int:
        """Last event at whose end a value would be there, were it never away."""
        plain = max(self.buffers[v].held_until, self.buffers[v].released)
        return max(self.buffers[v].held_until, self.last(v)) if v in self.away | self.captured else plain

    def there(self, v: int, e: int) -> bool:
        """Whether a value's bytes count just before an event."""
        return self.buffers[v].born < e <= self.end(v) and v not in self.absent

    def readable(self, v: int, e: int) -> bool:
        """Whether a chain at an event may read a value instead of making it."""
        overwritten = any(old == v for at in range(e) if isinstance(self.events[at], Op)
                          for old, _ in self.op(at).overwrites)  # fmt: skip
        return self.there(v, e) and not overwritten

    def live(self, e: int) -> int:
        """Bytes just before an event."""
        counted = {v for v, b in enumerate(self.buffers) if b.counted}
        return self.problem.base_bytes + sum(self.buffers[v].bytes for v in counted if self.there(v, e))

    def run(self) -> Naive:
        """Play all events in order."""
        for v in self.away:
            self.plan_leave(v, self.problem.gap_starts[v])
        for e, event in enumerate(self.events):
            for v in [v for v, after in self.leaving.items() if after < e]:
                del self.leaving[v]
                self.absent.add(v)
            peak = self.live(e) + (event.inside_bytes if isinstance(event, Op) else 0)
            if isinstance(event, Need) and event.value in self.absent:
                peak = max(peak, self.chain(event.value, e))
            if isinstance(event, Need) and event.value in self.away:
                self.after_need(event.value, e)
            self.peaks.append(peak)
        return self

    def plan_leave(self, v: int, gap: int) -> None:
        """A value leaves when nothing but autograd holds it and the node of its last need has finished."""
        if (v, gap) not in self.decisions:
            return
        pin = self.problem.needs[v][gap - 1][1] if gap else -1
        after = max(pin, self.buffers[v].held_until, self.buffers[v].born)
        self.leaving[v] = after

    def after_need(self, v: int, e: int) -> None:
        """Once a value was asked for, its next gap says whether it is away again."""
        gap = sum(1 for at, _ in self.problem.needs[v] if at <= e)
        if gap < self.problem.gap_starts[v]:
            return
        if gap == self.problem.gap_starts[v] and e <= self.buffers[v].held_until:
            return
        self.leaving.pop(v, None)
        if (v, gap) in self.decisions and self.decisions[v, gap].until > e:
            self.plan_leave(v, gap)

    def wanted(self, v: int, e: int) -> list[int]:
        """Events of the operators that recompute a value from those in memory."""
        ops: set[int] = set()

        @cache
        def make(u: int) -> None:
            ops.add(self.buffers[u].born)
            for r in self.problem.maker(u).reads:
                if not self.readable(r, e):
                    make(r)

        make(v)
        return sorted(ops)

    def stays(self, u: int, e: int) -> bool:
        """Whether a value that a chain makes on its way is held for its own later need."""
        needs = self.problem.needs[u]
        gap = sum(1 for at, _ in needs if at <= e)
        away = self.decisions.get((u, gap))
        return u in self.absent and e < self.end(u) and gap < len(needs) and away is not None and away.until <= e

    def chain(self, v: int, e: int) -> int:
        """Make a value again; the highest point of it."""
        ops = self.wanted(v, e)
        live = peak = self.live(e)
        board: set[int] = set()
        for at in ops:
            op = self.op(at)
            later = {r for o in ops if o > at for r in self.op(o).reads}
            hold = {u for u in range(len(self.buffers)) if u == v or self.stays(u, e)}
            stolen = {old for old, _ in op.overwrites if old in board and old not in later | hold}
            cloned = sum(self.buffers[old].bytes for old, _ in op.overwrites if old not in stolen)
            peak = max(peak, live + sum(self.buffers[u].bytes for u in board) + cloned + op.inside_bytes)
            board -= stolen
            board |= {u for u in self.made(at) if not self.readable(u, e)}
            board &= later | hold
            peak = max(peak, live + sum(self.buffers[u].bytes for u in board))
            self.seconds += op.seconds + self.problem.replay_seconds
        self.absent -= board
        return peak
