"""How a unit may run, and from which way to which it may pass."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, final

from lowtide.planning.unit.greedy import State
from lowtide.runtime.planned.mode import PlannedMode
from lowtide.runtime.record.trace_recorder import TraceRecorder
from lowtide.runtime.units.recorded_unit import RecordedUnit


class OnlineReason(StrEnum):
    """Why a unit is held on line and is not recorded."""

    NO_LIMIT = "there is no budget, only rescue from out-of-memory"
    SIZE_OF_ITS_OWN = "a unit of this size is not worth a recording"
    WORN = "its kind was recorded often enough, and no plan holds the budget or units of its kind do not follow one"
    DIFFERENTIABLE = "nobody watched it, and its backward builds a graph"
    OUTGREW = "nobody watched it, and another call of a model leaves too little room"


@final
@dataclass(frozen=True, slots=True)
class Expectation:
    """What a unit that follows a plan is held against when it ends.

    Attributes:
        entry: the recording that the plan was made from.
        state: the plan.
        predicted_bytes: what the unit's peak is to be; at most that, where it is not ``certain``.
        larger: whether it is the plan of a larger unit.
    """

    entry: RecordedUnit
    state: State
    predicted_bytes: int
    certain: bool
    larger: bool


@final
@dataclass(frozen=True, slots=True)
class Beginning:
    """Nothing is chosen yet."""


@final
@dataclass(frozen=True, slots=True)
class Recording:
    """The budget is held on line, and the unit is recorded for a plan."""

    recorder: TraceRecorder


@final
@dataclass(frozen=True, slots=True)
class Online:
    """The budget is held on line; the recorder only tells which values are the unit's."""

    recorder: TraceRecorder
    reason: OnlineReason


@final
@dataclass(frozen=True, slots=True)
class Following:
    """The unit follows a plan; ``plan`` is the mode that does."""

    plan: PlannedMode
    expected: Expectation


@final
@dataclass(frozen=True, slots=True)
class Diverged:
    """The unit left the plan that it followed; for the rest of it the budget is held on line."""

    left: Following


@final
@dataclass(frozen=True, slots=True)
class Unmonitored:
    """Nothing is intercepted.

    Attributes:
        expected: where a plan drops nothing, or could not be put on; None where the unit is smaller than one that fits.
    """

    expected: Expectation | None


UnitMode = Beginning | Recording | Online | Following | Diverged | Unmonitored

TRANSITIONS: Final[frozenset[tuple[type[UnitMode], type[UnitMode]]]] = frozenset({
    (Beginning, Recording),  # no recording of its kind, or one that does not fit
    (Beginning, Online),  # the same, where another recording would be of no use
    (Beginning, Following),  # a plan fits
    (Beginning, Unmonitored),  # nothing has to be dropped
    (Following, Diverged),  # another operator, another size, or no room
    (Unmonitored, Online),  # a backward that builds a graph, or a call too many
})
"""From which way to which a unit passes; it ends from each of them. (tests/torch/test_unit_modes.py walks them all.)"""
