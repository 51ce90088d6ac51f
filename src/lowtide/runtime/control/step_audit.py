"""Steps as they are measured: how long each took, how high it was, and whether it crossed the budget.

Where a step ends is decided by :class:`lowtide.probe.marks.Rounds` and :class:`.runtime.Runtime`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, final

from lowtide.base.messages import tell
from lowtide.base.units import format_bytes
from lowtide.runtime.budget import Budget
from lowtide.runtime.control.interception import Interception
from lowtide.runtime.run_figures import POLICIES, PlanFigures, StepFigures, Steps, StepTally
from lowtide.runtime.units.plan_cache import BudgetCrossings

REFUSED: Final = 3
"""Steps within which a budget that cannot be held ends the script; later ones are only told of."""
TOLD_SECONDS: Final = 60.0
"""Between two lines about steps over the budget, at least."""


@final
@dataclass(slots=True)
class RunningStep:
    """The step that runs.

    Attributes:
        units: how many have begun in it.
        done: whether a round of the optimizers is over.
        trains: whether a backward has begun in it.
        policy: how it runs so far: of its units' policies the last of :data:`POLICIES`.
        peak_bytes: highest point of the spans of it that are over.
        unseen_peak_bytes: what planned units were to reach where operators inside plans are not counted.
    """

    started: float = field(default_factory=time.perf_counter)
    units: int = 0
    done: bool = False
    trains: bool = False
    policy: str = POLICIES[0]
    peak_bytes: int = 0
    unseen_peak_bytes: int = 0


@final
class StepAudit:
    """One per runtime.

    Attributes:
        steps: figures of those that are over; ``running`` is the one that runs.
        crossings: those of them that crossed the budget.
        units_a_step: how many units the last one had.
    """

    def __init__(self, budget: Budget, interception: Interception, on_step: Callable[[], None] | None) -> None:
        """No step has begun; ``on_step`` is called after each, with its figures in place."""
        self._budget, self._interception, self._on_step = budget, interception, on_step
        self.steps = Steps()
        self.running = RunningStep()
        self.crossings = BudgetCrossings()
        self.units_a_step = 1
        self._last_told = -math.inf

    def open(self) -> None:
        """A step begins."""
        self._interception.meter.begin_span()
        self._interception.evictor.tally = StepTally()
        self.running = RunningStep()

    def end_span(self) -> int:
        """Begin the next span; the highest point of the one that ends, which reaches from one unit's border to the next."""
        meter = self._interception.meter
        peak = meter.span_peak()
        self.running.peak_bytes = max(self.running.peak_bytes, peak)
        meter.begin_span()
        return peak

    def note_policy(self, policy: str) -> None:
        """A unit of the step runs so."""
        self.running.policy = max(self.running.policy, policy, key=POLICIES.index)

    def close(self, figures: PlanFigures | None, evaluation_bytes: int, unreached: Sequence[str]) -> None:
        """The step is over.

        Args:
            figures: of the plan in force.
            evaluation_bytes: highest point of any evaluation.
            unreached: what the script does that the interception does not reach.
        """
        running, tally, budget = self.running, self._interception.evictor.tally, self._budget.bytes
        self.units_a_step = max(1, running.units)
        peak = max(self._interception.meter.span_peak(), running.peak_bytes, running.unseen_peak_bytes)
        crossed = bool(budget) and peak > budget
        self.crossings.step_ends(crossed=bool(self.steps) and crossed)
        if crossed and len(self.steps) >= REFUSED:
            self._tell_of_crossing(peak, figures, evaluation_bytes, unreached)
        self.steps.append(
            StepFigures(
                index=len(self.steps),
                seconds=time.perf_counter() - running.started,
                peak_bytes=peak,
                policy=running.policy,
                recomputed_ops=tally.recomputed_ops,
                recompute_seconds=tally.recompute_seconds,
                offloaded_bytes=tally.offloaded_bytes,
                offload_seconds=tally.offload_seconds,
                rescued_ops=tally.rescues,
                overrun=tally.overrun and peak > budget,
            )
        )
        if self._on_step is not None:
            self._on_step()

    def _tell_of_crossing(
        self, peak: int, figures: PlanFigures | None, evaluation_bytes: int, unreached: Sequence[str]
    ) -> None:
        """A step crossed the budget after the script has run for too long to be ended for it."""
        now = time.monotonic()
        if now - self._last_told < TOLD_SECONDS:
            return
        self._last_told = now
        budget = self._budget.bytes
        if evaluation_bytes > budget and peak <= evaluation_bytes:
            why = f"an evaluation without gradients needs {format_bytes(evaluation_bytes)} whatever is planned"
        elif figures is not None and figures.lowest_peak_bytes > budget:
            why = f"the lowest plan found for its sizes needs {format_bytes(figures.lowest_peak_bytes)}"
        elif unreached:
            why = f"what Lowtide does not reach in this script: {'; '.join(unreached)}"
        elif self.running.policy == "online":
            why = "it followed no plan (other operators or sizes than before)"
        else:
            why = "what ran beside its plan (an evaluation, the script's own code) needs more than was recorded"
        tell(
            f"lowtide: step {len(self.steps)} peaked at {format_bytes(peak)}, {format_bytes(peak - budget)} over "
            f"the budget: {why}; training goes on, and the exit code will say so"
        )
