"""The modes in which a unit may run, and the transitions between them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, final

from lowtide.planning.unit.state import State
from lowtide.runtime.planned.mode import PlannedMode
from lowtide.runtime.record.trace_recorder import TraceRecorder
from lowtide.runtime.units.recorded_unit import RecordedUnit
from lowtide.runtime.units.resizing import Resizing


class OnlineReason(StrEnum):
    """Why a unit is held online and not recorded."""

    NO_LIMIT = "there is no budget, only rescue from out-of-memory"
    SIZE_OF_ITS_OWN = "a unit of this size is not worth a recording"
    WORN = "its kind was recorded often enough, but no plan holds the budget or units of its kind diverge from their plan"
    DIFFERENTIABLE = "it was not observed, and its backward builds a graph"
    RELIEVED = "gradients are offloaded from its middle on: no later unit of its kind runs like that"
    OUTGREW = "it was not observed, and another call of a model leaves too little room"


@final
@dataclass(frozen=True, slots=True)
class Expectation:
    """What a unit that follows a plan is compared with when it ends.

    Attributes:
        entry: the recording that the plan was made from.
        state: the plan.
        predicted_bytes: the unit's predicted peak.
        certain: whether the peak should be exactly that; otherwise it is an upper bound.
        resizing: the relation to the recorded unit, if it has other sizes; the peak is then an estimate.
    """

    entry: RecordedUnit
    state: State
    predicted_bytes: int
    certain: bool
    resizing: Resizing | None


@final
@dataclass(frozen=True, slots=True)
class Beginning:
    """No mode has been chosen yet."""


@final
@dataclass(frozen=True, slots=True)
class Recording:
    """The budget is held online, and the unit is recorded for a plan."""

    recorder: TraceRecorder


@final
@dataclass(frozen=True, slots=True)
class Online:
    """The budget is held online; the recorder only tracks which values belong to the unit."""

    recorder: TraceRecorder
    reason: OnlineReason


@final
@dataclass(frozen=True, slots=True)
class Following:
    """The unit follows a plan; ``plan`` is the dispatch mode that does so."""

    plan: PlannedMode
    expected: Expectation


@final
@dataclass(frozen=True, slots=True)
class Diverged:
    """The unit left the plan that it followed; the budget is held online for the rest of the unit."""

    left: Following


@final
@dataclass(frozen=True, slots=True)
class Unmonitored:
    """Nothing is intercepted.

    Attributes:
        expected: set if a plan drops nothing, or if its mode could not be installed; None if the unit is smaller than one
            that fits.
    """

    expected: Expectation | None


UnitMode = Beginning | Recording | Online | Following | Diverged | Unmonitored

TRANSITIONS: Final[frozenset[tuple[type[UnitMode], type[UnitMode]]]] = frozenset({
    (Beginning, Recording),  # no recording of its kind, or one that does not fit
    (Beginning, Online),  # the same, but another recording would be of no use
    (Beginning, Following),  # a plan fits
    (Beginning, Unmonitored),  # nothing has to be dropped
    (Recording, Online),  # an operator fits only if gradients are offloaded from here on
    (Following, Diverged),  # another operator, another size, or no room
    (Unmonitored, Online),  # a backward that builds a graph, or another root call for which there is too little room
})
"""The allowed transitions; a unit may end in any mode. (tests/torch/test_unit_modes.py walks them all.)"""
