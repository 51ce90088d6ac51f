"""Learns from a unit that ended: keeps its recording, notes its rise, and compares its peak with the plan's."""

from __future__ import annotations

from typing import final

from lowtide.base.messages import tell
from lowtide.planning.unit.problem import Problem
from lowtide.planning.unit.solve import Front
from lowtide.planning.unit.state import State
from lowtide.runtime.budget import Budget
from lowtide.runtime.control.interception import Interception
from lowtide.runtime.control.step_audit import StepAudit
from lowtide.runtime.online.retry import LIBRARY_BYTES
from lowtide.runtime.planned.timing import MATTERS_LATER_SHARE, MATTERS_SHARE, OTHERS_SHARE, Stopwatch, changed_seconds
from lowtide.runtime.record.trace_recorder import TraceRecorder
from lowtide.runtime.units.knowledge import Knowledge
from lowtide.runtime.units.recorded_unit import RecordedUnit, near
from lowtide.runtime.units.resizing import Resizing
from lowtide.runtime.units.unit import Unit
from lowtide.runtime.units.unit_mode import Diverged, Expectation, Online, OnlineReason, Recording
from lowtide.runtime.units.unit_signature import UnitSignature


@final
class UnitReview:
    """Learns from the units of a run as they end; one per runtime."""

    def __init__(self, budget: Budget, interception: Interception, knowledge: Knowledge, audit: StepAudit) -> None:
        """Share the runtime's parts."""
        self._budget, self._interception, self._knowledge, self._audit = budget, interception, knowledge, audit

    def review(self, unit: Unit) -> None:
        """Learn from a unit that ended."""
        recorder, interception = unit.recorder, self._interception
        if recorder is not None:
            worth = isinstance(unit.mode, Recording) and recorder.backward_event is not None and recorder.saves
            if worth:
                self._keep(unit, recorder)
            elif (
                interception.meter.exact
                and interception.evictor.times == unit.times
                and (self._knowledge.recordings.is_wild(unit.kind) or self._is_rescued(unit))
            ):
                self._note_rise(unit)
        elif unit.expected is not None:
            self._verify(unit, unit.expected)
        elif unit.is_roomy:
            self._note_rise(unit)

    def _keep(self, unit: Unit, recorder: TraceRecorder) -> None:
        knowledge, evictor = self._knowledge, self._interception.evictor
        trace = recorder.finish(knowledge.persistent.bytes(), movable=True)
        problem = Problem(
            trace=trace,
            base_bytes=trace.base_bytes,
            bandwidth=evictor.bandwidth,
            pinned=frozenset(recorder.tainted),
            replay_seconds=evictor.replay_seconds,
            fetch_seconds=evictor.fetch_seconds,
        )
        if unit.number > 1:  # a run's first unit is cold
            knowledge.peaks.note(unit.calls, problem.plain_peak - problem.base_bytes, unit.gradient_bytes)
        elif evictor.exempt.unmet:
            names = ", ".join(evictor.exempt.unmet)
            tell(f"lowtide: --keep: no module of the first step has the path {names}; paths look like blocks.0")
        entry = RecordedUnit(
            recorder.funcs, recorder.packs, unit.starts, Front(problem), unit.left, unit.gradient_bytes,
            knowledge.persistent.states(), tuple(unit.calls), tuple(unit.retains), recorder.leaving_bytes,
            bool(recorder.flights),
        )
        knowledge.recordings.keep(unit.kind, entry)
        knowledge.checkpoints.recorded(unit.kind, entry)

    def _is_rescued(self, unit: Unit) -> bool:
        """Whether a unit was intercepted only so that it could be rescued; a run's first unit is cold, and does not count."""
        reasons = (OnlineReason.NO_LIMIT, OnlineReason.OUTGREW)
        return not self._budget.bytes and unit.number > 1 and isinstance(unit.mode, Online) and unit.mode.reason in reasons

    def _note_rise(self, unit: Unit) -> None:
        """Note how far a unit rose from which nothing was evicted."""
        meter, peaks = self._interception.meter, self._knowledge.peaks
        peak = max(meter.op_peak(), meter.span_peak())  # op_peak begins anew with each operator that is observed
        peaks.note(unit.calls, peak - unit.base_bytes - unit.left.bytes, unit.gradient_bytes)
        if unit.is_roomy and 0 < self._budget.bytes < peak:
            peaks.broke(unit.calls)

    def _verify(self, unit: Unit, expected: Expectation) -> None:
        """Compare the peak of a planned unit with the plan's."""
        meter, entry, predicted = self._interception.meter, expected.entry, expected.predicted_bytes
        measured = meter.op_peak()
        if not meter.exact:  # the ledger does not see planned operators: there is only the prediction
            running = self._audit.running
            running.unseen_peak_bytes = max(running.unseen_peak_bytes, predicted)
            entry.followed += 1
            return
        if unit.plan is not None and unit.plan.varies:
            self._knowledge.recordings.varied(unit.kind)
        diverged = isinstance(unit.mode, Diverged)
        if entry.is_untried and (diverged or 0 < self._budget.bytes < measured):
            self._knowledge.recordings.reject(entry)
            return
        self.learn_crossing(unit.kind, max(measured, meter.span_peak()) if diverged else measured)
        if expected.resizing is not None:
            self._learn_sizes(unit, expected, expected.resizing, max(measured, meter.span_peak()))
            return
        if unit.plan is not None and (unit.plan.varies or (unit.plan.changed and not diverged)):
            if unit.plan.varies_much or (diverged and unit.plan.is_longer):
                self._knowledge.recordings.missed(unit.kind, entry)
            return  # its sizes or operators were others than those recorded
        # A graph left over from a planned unit is smaller than the recorded one; bytes that were missing at the beginning may
        # never have been allocated.
        less = (bool(entry.left.bytes) or entry.collective or not expected.certain) and measured < predicted
        cold = unit.number == 1 and predicted < measured <= predicted + LIBRARY_BYTES
        if not diverged and (less or cold or near(measured, predicted, predicted)):
            entry.followed += 1
            if unit.plan is not None and unit.plan.run.stopwatch is not None:
                self._retime(entry, expected.state, unit.plan.run.stopwatch)
            return
        self._knowledge.recordings.missed(unit.kind, entry)

    def _learn_sizes(self, unit: Unit, expected: Expectation, resizing: Resizing, measured: int) -> None:
        """Compare a unit with the recorded one of other sizes whose plan it followed."""
        knowledge, plan, start = self._knowledge, unit.plan, expected.entry.problem.base_bytes
        if plan is not None and (plan.mismatched or plan.varies_much):
            knowledge.growth.strayed(unit.kind)
            knowledge.recordings.forget_alike(unit.kind)
            return
        above = expected.predicted_bytes - resizing.rise(expected.state.peak_bytes - start)
        found = resizing.observed(expected.state.peak_bytes - start, measured - above)
        if plan is not None and plan.varies:  # it also held what other operators made
            found = plan.growth or None
        elif isinstance(unit.mode, Diverged):  # there was no room for it: what it rose by, the evictor decided
            found = max(resizing.growth, 0.0 if plan is None else plan.growth)
        else:
            knowledge.growth.followed(unit.kind)
        if found is not None:
            knowledge.growth.note(unit.kind, resizing, found)

    def learn_crossing(self, kind: UnitSignature, peak: int) -> None:
        """If a planned unit's peak exceeded the budget, note a surprise: after a few, units of its kind follow no plan."""
        if self._budget.bytes and peak > self._budget.bytes:
            self._knowledge.recordings.surprised(kind, decidedly=not near(peak, self._budget.bytes, peak))

    def _retime(self, entry: RecordedUnit, state: State, stopwatch: Stopwatch) -> None:
        """Solve again with the seconds of a warm step, if the plan's extra time differs from what was measured before."""
        evictor = self._interception.evictor
        evictor.learn(stopwatch.bandwidth(evictor.bandwidth))
        evictor.replay_seconds = stopwatch.replay_seconds(evictor.replay_seconds)
        evictor.fetch_seconds = stopwatch.fetch_seconds(evictor.fetch_seconds)
        problem = stopwatch.problem(entry.problem, entry.funcs, warm=entry.timings.ended > 0)
        again = State.of(problem, state.decisions)
        change = abs(again.extra_seconds - state.extra_seconds)
        matters = (MATTERS_LATER_SHARE if entry.timings.ended else MATTERS_SHARE) * problem.seconds
        if change > matters or changed_seconds(entry.problem, problem) > OTHERS_SHARE * problem.seconds:
            entry.front = entry.front.retimed(problem, again)
        entry.timings.note(state, stopwatch.extra_seconds)
