"""A recorded unit: its operators, the plans solved for it, and how much higher or lower another unit lies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, final

from lowtide.base.trace import Trace
from lowtide.planning.unit.problem import Away, Key, Problem
from lowtide.planning.unit.solve import Front
from lowtide.planning.unit.state import State
from lowtide.runtime.planned.compiled_plan import CompiledPlan
from lowtide.runtime.run_figures import Neighbour
from lowtide.runtime.units.unit_signature import UnitSignature

if TYPE_CHECKING:
    from lowtide.runtime.units.unit import Unit

TOLERANCE_BYTES = 64 << 10
"""Two bases, or a prediction and a measurement, agree if they differ by at most this many bytes, ..."""
TOLERANCE_SHARE = 0.005
"""... or by at most this share of the peak."""
RECURS = 3
"""So many units must have followed the plans of a recording before it is taken to be needed again."""
CLOCKED: Final = frozenset(4**k for k in range(8))
"""A unit is timed once so many followed their recording: the second, when the offload tier's pages are warm, then fewer."""
CHANGED: Final = 3
"""Plans that timing led to are timed at once, too: so many."""
ATTEMPTS: Final = 3
"""Units begin to be timed at most so often each time the number of those that followed their recording doubles: a unit that
leaves its plan half-way tells nothing, and timed ones take longer."""
DETOUR_STEPS = 16
"""Room for operators that were not recorded is left in steps of this part of the baseline's peak."""
NEIGHBOURS: Final = (-0.1, 0.1)
"""Budgets beside one in force whose plans are shown, as shares of what it adds to the resident bytes."""
NEIGHBOUR_SECONDS: Final = 1.0
"""Their plans are searched for if all searches took fewer seconds so far."""


def near(a: int, b: int, peak: int) -> bool:
    """Whether two byte counts agree within the tolerance for this peak."""
    return abs(a - b) <= max(TOLERANCE_BYTES, TOLERANCE_SHARE * peak)


@final
@dataclass(frozen=True, slots=True)
class RetainedBytes:
    """What graphs of earlier units hold when a unit begins.

    Attributes:
        there_bytes: resident bytes.
        away_bytes: bytes that were dropped or offloaded.
        dropped: whether some were dropped, not offloaded: dropped values are recomputed before any phase in which writes are
            not observed, such as a planned unit.
    """

    there_bytes: int
    away_bytes: int = 0
    dropped: bool = False

    @property
    def bytes(self) -> int:
        """Bytes that they would hold if nothing had been evicted."""
        return self.there_bytes + self.away_bytes

    @property
    def followed_bytes(self) -> int:
        """Bytes that they may hold while a plan is followed.

        If values were dropped, these are recomputed, and offloaded values that they are made from are fetched for that.
        """
        return self.bytes if self.dropped else self.there_bytes


@final
@dataclass(eq=False)
class Timings:
    """The units that were timed while they followed plans of one recording.

    Attributes:
        begun: how many began to be timed.
        ended: how many of them ended as planned, so that their seconds count.
        measured: the decisions that the last of them followed, and what these took, in seconds.
    """

    begun: int = 0
    ended: int = 0
    measured: tuple[dict[Key, Away], float] | None = None

    def are_due(self, state: State, followed: int) -> bool:
        """Whether a unit that follows a plan is to be timed, after so many that followed plans of the recording."""
        changed = 0 < self.ended <= CHANGED and self.seconds(state) is None
        may = self.begun < CHANGED + ATTEMPTS * followed.bit_length()
        return may and (changed or followed in CLOCKED)

    def note(self, state: State, seconds: float) -> None:
        """A unit that followed a plan to its end was timed."""
        self.ended += 1
        self.measured = state.decisions, seconds

    def seconds(self, state: State | None) -> float | None:
        """What the decisions of a plan took when a unit that followed them was timed; None if none was."""
        if state is None or self.measured is None or self.measured[0] != state.decisions:
            return None
        return self.measured[1]


@final
@dataclass(frozen=True, slots=True)
class Baseline:
    """What units take without Lowtide, as shares of what they take if nothing is dropped but their checkpoints are plain.

    Attributes:
        rise: of how far they rise above their base.
        seconds: of their time.
    """

    rise: float = 1.0
    seconds: float = 1.0

    @classmethod
    def of(cls, written: RecordedUnit, plain: RecordedUnit, again_seconds: float) -> Baseline:
        """Compare the recording of a unit as it is written with one in which its checkpoints were plain.

        Args:
            written: the first; it may be a cold one, so that its seconds are not compared with the other's.
            plain: the second.
            again_seconds: seconds of the operators in the first that the second does not run.
        """
        rises = [max(1, p.plain_peak - p.base_bytes) for p in (written.problem, plain.problem)]
        once = max(written.problem.seconds - again_seconds, again_seconds / 2, 1e-9)
        return cls(rises[0] / rises[1], (once + again_seconds) / once)


@dataclass(eq=False)
class RecordedUnit:
    """One recording of a kind of unit, and the plans made from it.

    Its many fields are what was seen of one unit, and what units that followed it have shown since.

    Attributes:
        funcs: operators that a plan follows, each with its event.
        packs: for each tensor that autograd saved, the number of events before it, and the number of its value, or -1.
        backward_starts: the event at which each backward began.
        front: the problem and its solutions.
        left: what graphs of earlier units held when it began.
        gradient_bytes: gradients that existed when it began.
        states: storages of the optimizer states at its end, by address.
        calls: its root calls.
        retains: for each backward, whether it retained the graph.
        leaving_bytes: how many of the bytes that existed before it were freed within it.
        collective: whether it ran collectives with other ranks: their buffers may be freed earlier than is counted.
        compiled: the plan that was followed last, and its compiled form.
        agreed: the plan on which all ranks agreed.
        rooms: the rooms for which plans were searched that units of other sizes follow, in steps of a grid.
        followed: how many units have followed a plan of it and reached the predicted peak.
        detour_bytes: how many bytes units that also ran other operators held besides what the plan knows of, at most.
        baseline: what such units take without Lowtide.
        timings: the units that followed a plan of it and were timed.
        nth: its number among the recordings of the run, from 1; 0 until it is kept.
        uses: how many units followed a plan of it, of other sizes, or not to the end, among them.
        state_bytes: of a recording of an earlier run, the bytes of the optimizers' states then; None for one of this run.
    """

    funcs: list[tuple[int, Any]]
    packs: list[tuple[int, int]]
    backward_starts: list[int]
    front: Front
    left: RetainedBytes
    gradient_bytes: int
    states: dict[int, int]
    calls: tuple[UnitSignature, ...]
    retains: tuple[bool, ...]
    leaving_bytes: int
    collective: bool
    compiled: tuple[State, CompiledPlan] | None = None
    agreed: State | None = None
    rooms: set[int] = field(default_factory=set)
    followed: int = 0
    detour_bytes: int = 0
    baseline: Baseline = Baseline()
    timings: Timings = field(default_factory=Timings)
    nth: int = 0
    uses: int = 0
    state_bytes: int | None = None

    @property
    def is_untried(self) -> bool:
        """Whether it was recorded in an earlier run, and no unit of this run has borne it out yet."""
        return self.state_bytes is not None and not self.followed

    def grown_bytes(self, states: Mapping[int, int]) -> int:
        """Bytes by which the optimizers' states have grown since the recording.

        Args:
            states: the states that there are, by address, with their bytes.
        """
        if self.state_bytes is not None:
            return sum(states.values()) - self.state_bytes
        return sum(size for state, size in states.items() if state not in self.states)

    @property
    def is_hasty(self) -> bool:
        """Whether plans are searched without programs, which then hardly pay.

        The run has many recordings, and units like this one may not come again: programs are for the first recording of a run,
        the second, the fourth, the eighth and so on, and for those that recur. Or the programs have been solved with the
        seconds of a warm unit, and only prices have changed since.
        """
        passing = bool(self.nth & (self.nth - 1)) and self.uses < RECURS
        return passing or self.timings.ended > 1

    @property
    def problem(self) -> Problem:
        """The problem that was solved."""
        return self.front.problem

    @property
    def trace(self) -> Trace:
        """The recorded unit."""
        return self.front.problem.trace

    @property
    def baseline_peak(self) -> int:
        """The peak that the unit has without Lowtide, in bytes."""
        problem = self.problem
        return problem.base_bytes + int(self.baseline.rise * (problem.plain_peak - problem.base_bytes))

    @property
    def baseline_seconds(self) -> float:
        """The seconds that the unit takes without Lowtide."""
        return self.baseline.seconds * self.problem.seconds

    @property
    def saved_seconds(self) -> float:
        """The seconds that a plan which drops nothing saves: what the script recomputes by itself."""
        return self.baseline_seconds - self.problem.seconds

    def meets_detours(self, extra_bytes: int, *, lacked: bool = False) -> bool:
        """Note what a unit held that ran other operators besides.

        Room for it is left in steps, as each amount needs a plan of its own.

        Args:
            extra_bytes: the bytes that it held.
            lacked: whether it left its plan because memory ran out: then at least one step more is left.

        Returns:
            Whether more room will be left from now on, and this is still likely to help.
        """
        step = max(1, self.problem.plain_peak // DETOUR_STEPS)
        before = self.detour_bytes
        self.detour_bytes = max(before, -(-extra_bytes // step) * step, before + step if lacked else 0)
        return before < self.detour_bytes <= self.problem.plain_peak // 4

    def neighbours(self, budget_bytes: int, resident_bytes: int, shift: int) -> tuple[Neighbour, ...]:
        """What the plans for a little less and a little more memory than a budget cost.

        They are searched for only if all searches took little time so far. A budget in which the unit runs plain is left out.

        Args:
            budget_bytes: the budget.
            resident_bytes: bytes of parameters, buffers and optimizer states, which no plan lowers.
            shift: how many bytes higher than recorded the unit lies.
        """
        found = []
        for share in NEIGHBOURS:
            size = budget_bytes + int(share * (budget_bytes - resident_bytes))
            state = self.front.at(size - shift, search=self.front.solve_seconds < NEIGHBOUR_SECONDS).state
            if state is not None and size - shift < self.problem.plain_peak:
                extra = state.extra_seconds - self.saved_seconds
                found.append(Neighbour(budget_bytes=size, extra_seconds=extra))
        return tuple(found)

    def shift(self, unit: Unit) -> int:
        """Upper bound on how many bytes higher than the recorded unit another of its kind lies.

        Gradients that existed only when the recorded unit began are allocated within the other. Any other bytes missing from
        this base may be bytes that the recorded unit freed before its peak, up to the amount that it freed. The plan takes
        graphs of earlier units to be as they were at the recording; it knows nothing of what had been evicted from them.
        """
        higher = unit.base_bytes - self.trace.base_bytes + max(0, self.gradient_bytes - unit.gradient_bytes)
        low = higher if higher >= 0 else min(0, higher + self.leaving_bytes)
        return low + self.left_besides(unit)

    def unfreed_bytes(self, unit: Unit) -> int:
        """Upper bound on the bytes that the recorded unit freed of what it began with, and another has not to begin with."""
        return self.shift(unit) - self.left_besides(unit) - (unit.base_bytes - self.trace.base_bytes)

    def lower_shifts(self, unit: Unit) -> tuple[int, int]:
        """Two lower estimates of how many bytes higher another unit lies.

        The first assumes that the recorded unit freed none of the bytes that are missing now. The second also assumes that
        gradients which exist only when the other unit begins are freed before its peak, and allocated anew as in the recorded
        unit; `shift` counts these twice.
        """
        exactly = unit.base_bytes - self.trace.base_bytes
        return exactly, exactly - max(0, unit.gradient_bytes - self.gradient_bytes)

    def left_besides(self, unit: Unit) -> int:
        """How many bytes more than at the recording graphs of earlier units may hold while its plan is followed."""
        return max(0, unit.left.followed_bytes - self.left.there_bytes)
