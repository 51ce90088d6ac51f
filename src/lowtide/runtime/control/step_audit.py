"""Measures steps: how long each took, how high it peaked, and whether it crossed the budget.

:class:`lowtide.probe.marks.Rounds` and :class:`.runtime.Runtime` decide where a step ends.
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
"""Number of first steps in which a budget that cannot be held ends the script; later steps over the budget are only
reported."""
TOLD_SECONDS: Final = 60.0
"""Minimum seconds between two messages about steps over the budget."""


@final
@dataclass(slots=True)
class RunningStep:
    """The step that is running.

    Attributes:
        started: when it began (``time.perf_counter``).
        units: how many units have begun in it.
        abandoned: how many of them were forwards that no backward followed.
        done: whether a round of the optimizers is over.
        trains: whether a backward has begun in it.
        policy: of the policies of its units so far, abandoned ones aside, the one that comes last in :data:`POLICIES`.
        policy_before: what ``policy`` was before the running unit began.
        peak_bytes: highest point of its finished spans.
        unseen_peak_bytes: highest predicted peak of its planned units, if the meter does not see inside planned operators.
    """

    started: float = field(default_factory=time.perf_counter)
    units: int = 0
    abandoned: int = 0
    done: bool = False
    trains: bool = False
    policy: str = POLICIES[0]
    policy_before: str = POLICIES[0]
    peak_bytes: int = 0
    unseen_peak_bytes: int = 0


@final
class StepAudit:
    """Measures the steps of a run; one per runtime.

    Attributes:
        steps: figures of the finished steps.
        trained: how many of them had a backward: Keras, for one, calls each layer once while it builds a model.
        running: the step that is running.
        crossings: counts of the steps that crossed the budget.
        units_a_step: how many units the last step had.
        refusable: number of first steps after which a budget that cannot be held no longer ends the script.
        setup_peak_bytes: highest point before the first unit began: imports, data and the model, which no plan lowers.
    """

    def __init__(self, budget: Budget, interception: Interception, on_step: Callable[[], None] | None) -> None:
        """Start without steps; ``on_step`` is called after each step, once its figures are in :attr:`steps`."""
        self._budget, self._interception, self._on_step = budget, interception, on_step
        self.steps = Steps()
        self.trained = 0
        self.running = RunningStep()
        self.crossings = BudgetCrossings()
        self.units_a_step = 1
        self.refusable = REFUSED
        self.setup_peak_bytes = 0
        self._last_told = -math.inf

    def open(self) -> None:
        """A step begins."""
        self._interception.meter.begin_span()
        self._interception.evictor.tally = StepTally()
        self.running = RunningStep()

    def end_span(self) -> int:
        """End the span and begin the next one; returns the peak of the span that ended.

        A span lasts from one beginning or end of a unit to the next.
        """
        meter = self._interception.meter
        peak = meter.span_peak()
        self.running.peak_bytes = max(self.running.peak_bytes, peak)
        meter.begin_span()
        return peak

    def begins_anew(self) -> None:
        """Much of what was resident as the step began has been offloaded: it belongs to the steps before."""
        self._interception.meter.begin_span()
        self.running.peak_bytes = 0

    def setup_ends(self) -> None:
        """The run's first unit begins, and with it the first step: what came before belongs to no step."""
        self.setup_peak_bytes = self.running.peak_bytes
        self.running = RunningStep()

    def gradients_leave(self, *, whole: bool) -> None:
        """Gradients are offloaded from the running unit on, or only from its middle on (not ``whole``).

        The first unit that runs like all later ones shows whether the budget can be held. A run that is in its first steps may
        be refused after that one, at the latest before its fourth step.
        """
        judged = self.trained + (2 if whole else 3)
        if judged <= REFUSED + 1:
            self.refusable = max(self.refusable, judged)

    def unit_begins(self) -> None:
        """A unit of the step begins."""
        self.running.units += 1
        self.running.policy_before = self.running.policy

    def unit_abandoned(self) -> None:
        """The running unit was a forward that no backward follows: how it ran says nothing about how the step trains."""
        self.running.abandoned += 1
        self.running.policy = self.running.policy_before

    def note_policy(self, policy: str) -> None:
        """A unit of the step runs under this policy."""
        self.running.policy = max(self.running.policy, policy, key=POLICIES.index)

    def close(self, figures: PlanFigures | None, evaluation_bytes: int, unreached: Sequence[str]) -> None:
        """The step is over.

        Args:
            figures: the figures of the plan in force.
            evaluation_bytes: highest point of any evaluation.
            unreached: what the script does that the interception does not reach.
        """
        running, tally, budget = self.running, self._interception.evictor.tally, self._budget.bytes
        self.units_a_step = max(1, running.units - running.abandoned)
        peak = max(self._interception.meter.span_peak(), running.peak_bytes, running.unseen_peak_bytes)
        crossed = bool(budget) and peak > budget
        self.crossings.step_ends(crossed=self.trained > 0 and crossed)
        if crossed and self.trained >= REFUSED:
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
                budget_bytes=budget if self._budget.is_sought else 0,
            )
        )
        self.trained += running.trains
        if self._on_step is not None:
            self._on_step()

    def _tell_of_crossing(
        self, peak: int, figures: PlanFigures | None, evaluation_bytes: int, unreached: Sequence[str]
    ) -> None:
        """Report a step that crossed the budget, after the script has run for too long to be ended for that."""
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
            why = f"out of Lowtide's reach in this script: {'; '.join(unreached)}"
        elif self.running.policy == "online":
            why = "it ran without a plan (its operators or sizes were new)"
        else:
            why = "code outside its plan (an evaluation, the script's own code) needs more than was recorded"
        tell(
            f"lowtide: step {len(self.steps)} peaked at {format_bytes(peak)}, {format_bytes(peak - budget)} over "
            f"the budget: {why}; training goes on, and the exit code will report it"
        )
