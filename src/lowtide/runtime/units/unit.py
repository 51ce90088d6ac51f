"""The unit that is running, from its beginning to its end."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Final

import torch
from lowtide.runtime.planned.mode import PlannedMode
from lowtide.runtime.record.trace_recorder import TraceRecorder
from lowtide.runtime.units.recorded_unit import RetainedBytes
from lowtide.runtime.units.unit_mode import (
    TRANSITIONS,
    Beginning,
    Diverged,
    Expectation,
    Following,
    Online,
    Recording,
    UnitMode,
    Unmonitored,
)
from lowtide.runtime.units.unit_signature import UnitSignature

_BEGINNING: Final = Beginning()


@dataclass(eq=False)
class Unit:
    """The unit that is running.

    Attributes:
        kind: its signature.
        base_bytes: live bytes when it began, without what graphs of earlier units hold.
        left: what graphs of earlier units hold when it begins.
        gradient_bytes: gradients that existed when it began.
        number: counted from 1.
        times: the evictor's count of evictions when it began.
        mode: how it runs.
        calls: its root calls so far.
        backwards: how many have begun.
        consumed: how many of these consume its graph: they build no graph of their own, and do not run within a custom
            function's forward.
        stepped: whether an optimizer has stepped.
        starts: for each backward, the event of its recording at which it began.
        retains: for each backward, whether it retains the graph.
        outputs: tensors with a graph that its root calls returned.
    """

    kind: UnitSignature
    base_bytes: int
    left: RetainedBytes
    gradient_bytes: int
    number: int
    times: int
    mode: UnitMode = _BEGINNING
    calls: list[UnitSignature] = field(default_factory=list)
    backwards: int = 0
    consumed: int = 0
    stepped: bool = False
    starts: list[int] = field(default_factory=list)
    retains: list[bool] = field(default_factory=list)
    outputs: list[weakref.ref[torch.Tensor]] = field(default_factory=list)

    def become(self, mode: UnitMode) -> None:
        """Switch to another mode.

        Raises:
            ValueError: if this transition is not allowed.
        """
        if (type(self.mode), type(mode)) not in TRANSITIONS:
            raise ValueError(f"a unit cannot pass from {type(self.mode).__name__} to {type(mode).__name__}")
        self.mode = mode

    @property
    def _chosen(self) -> UnitMode:
        """The unit's mode, or the one it had before it left its plan."""
        return self.mode.left if isinstance(self.mode, Diverged) else self.mode

    @property
    def following(self) -> PlannedMode | None:
        """The plan that the unit follows, or None."""
        return self.mode.plan if isinstance(self.mode, Following) else None

    @property
    def plan(self) -> PlannedMode | None:
        """The plan that the unit follows, or followed until it left it; None if it never did."""
        return self._chosen.plan if isinstance(self._chosen, Following) else None

    @property
    def recorder(self) -> TraceRecorder | None:
        """The recorder of a unit that has been fully intercepted from its beginning or since ``Unmonitored``, else None.

        A unit that left its plan has one, too, but of only half a unit: None is returned.
        """
        return self.mode.recorder if isinstance(self.mode, (Recording, Online)) else None

    @property
    def expected(self) -> Expectation | None:
        """The prediction that its peak is compared with, if there is one."""
        return self._chosen.expected if isinstance(self._chosen, (Following, Unmonitored)) else None

    @property
    def is_roomy(self) -> bool:
        """Whether nothing is intercepted because the unit is smaller than one that fits."""
        return isinstance(self.mode, Unmonitored) and self.mode.expected is None
