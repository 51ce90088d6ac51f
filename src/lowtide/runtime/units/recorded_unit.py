"""What is kept of a recorded unit: its operators, what was solved for it, and how far it fits another unit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from lowtide.base.trace import Trace
from lowtide.planning.unit.greedy import State
from lowtide.planning.unit.problem import Problem
from lowtide.planning.unit.solve import Front, Solution
from lowtide.runtime.planned.compiled_plan import CompiledPlan
from lowtide.runtime.units.unit_signature import UnitSignature

if TYPE_CHECKING:
    from lowtide.runtime.units.unit import Unit

TOLERANCE_BYTES = 64 << 10
"""Two bases, or a prediction and a measurement, agree within so much ..."""
TOLERANCE_SHARE = 0.005
"""... or within this share of the peak."""


def near(a: int, b: int, peak: int) -> bool:
    """Whether two numbers of bytes agree, at such a peak."""
    return abs(a - b) <= max(TOLERANCE_BYTES, TOLERANCE_SHARE * peak)


@final
@dataclass(frozen=True, slots=True)
class RetainedBytes:
    """What graphs of former units hold when a unit begins.

    Attributes:
        there_bytes: what is there.
        away_bytes: what was let go.
        dropped: whether some of it was dropped: dropped values are recomputed before any phase in which writes are not
            observed, such as a planned unit.
    """

    there_bytes: int
    away_bytes: int = 0
    dropped: bool = False

    @property
    def bytes(self) -> int:
        """What they would hold if nothing had been let go."""
        return self.there_bytes + self.away_bytes

    @property
    def followed_bytes(self) -> int:
        """What they may hold while a plan is followed: what was moved comes back with what is made from it."""
        return self.bytes if self.dropped else self.there_bytes


@dataclass(eq=False)
class RecordedUnit:
    """One recording of a kind of unit, and what was made of it.

    Attributes:
        left: what graphs of former units held when it began.
        gradient_bytes: gradients that were there when it began.
        states: optimizer states' storages at its end.
        calls: its root calls.
        retains: per backward, whether the graph stayed after it.
        leaving_bytes: how much of what was there before it went within it.
        collective: whether other ranks took part: what their collectives took may go earlier than it is counted.
        compiled: the plan for it that was followed last, and what it is compiled to.
        for_smaller: the plan that smaller units follow: bases differ a little from one to the next, and solving takes time.
    """

    funcs: list[tuple[int, Any]]
    packs: list[int]
    backward_starts: list[int]
    front: Front
    left: RetainedBytes
    gradient_bytes: int
    states: frozenset[int]
    calls: tuple[UnitSignature, ...]
    retains: tuple[bool, ...]
    leaving_bytes: int
    collective: bool
    compiled: tuple[State, CompiledPlan] | None = None
    agreed: State | None = None
    for_smaller: Solution | None = None
    followed: int = 0

    @property
    def problem(self) -> Problem:
        """What was solved."""
        return self.front.problem

    @property
    def trace(self) -> Trace:
        """The recorded unit."""
        return self.front.problem.trace

    def shift(self, unit: Unit) -> int:
        """How much higher than the recorded unit another of its kind lies, at most.

        Gradients that only the recorded one found there are made anew within the other. Any other bytes missing from this base
        may be bytes that the recorded unit freed before its peak, up to the amount that it freed. Graphs of earlier units are
        as they were when the unit was recorded; the plan knows nothing of what had been evicted from them.
        """
        higher = unit.base_bytes - self.trace.base_bytes + max(0, self.gradient_bytes - unit.gradient_bytes)
        low = higher if higher >= 0 else min(0, higher + self.leaving_bytes)
        return low + self.left_besides(unit)

    def lower_shifts(self, unit: Unit) -> tuple[int, int]:
        """Two lower estimates of how much higher another unit lies: if the recorded one freed none of the bytes that are
        missing now; and if, besides, gradients that exist are freed before the peak.

        Gradients that only the other one finds there are let go within it, and made anew as in the recorded one; by `shift`
        they count twice.
        """
        exactly = unit.base_bytes - self.trace.base_bytes
        return exactly, exactly - max(0, unit.gradient_bytes - self.gradient_bytes)

    def left_besides(self, unit: Unit) -> int:
        """How much more than in the recorded unit graphs of former units may hold while its plan is followed."""
        return max(0, unit.left.followed_bytes - self.left.there_bytes)
