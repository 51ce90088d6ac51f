"""The unit that runs now, from its beginning to its end."""

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
    """The unit that runs now.

    Attributes:
        left: what graphs of former units hold when it begins.
        gradient_bytes: gradients that were there when it began.
        number: counted from 1.
        times: how often something had been let go before it began.
        mode: how it runs.
        calls: its root calls so far.
        backwards: how many have begun; ``consumed`` counts those that build no graph of their own.
        stepped: whether an optimizer has stepped.
        starts: per backward, at which event of its recording it began; ``retains`` tells whether the graph stayed after it.
        outputs: what its root calls returned.
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
        """Run in another way.

        Raises:
            ValueError: if there is no such transition.
        """
        if (type(self.mode), type(mode)) not in TRANSITIONS:
            raise ValueError(f"a unit cannot pass from {type(self.mode).__name__} to {type(mode).__name__}")
        self.mode = mode

    @property
    def _chosen(self) -> UnitMode:
        """The mode that the unit has, or had until it left its plan."""
        return self.mode.left if isinstance(self.mode, Diverged) else self.mode

    @property
    def following(self) -> PlannedMode | None:
        """The plan that is followed."""
        return self.mode.plan if isinstance(self.mode, Following) else None

    @property
    def plan(self) -> PlannedMode | None:
        """The plan that is followed, or was until the unit left it."""
        return self._chosen.plan if isinstance(self._chosen, Following) else None

    @property
    def recorder(self) -> TraceRecorder | None:
        """The recorder that was installed when the unit was first intercepted; None while it follows a plan or has left it."""
        return self.mode.recorder if isinstance(self.mode, (Recording, Online)) else None

    @property
    def expected(self) -> Expectation | None:
        """The prediction that its peak is compared with."""
        return self._chosen.expected if isinstance(self._chosen, (Following, Unmonitored)) else None

    @property
    def is_roomy(self) -> bool:
        """Whether nothing is intercepted because it is smaller than a unit that fits."""
        return isinstance(self.mode, Unmonitored) and self.mode.expected is None
