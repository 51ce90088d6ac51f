"""Starts a unit as it was chosen to run, by installing the interception that it needs."""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Final, final

from lowtide.runtime.budget import SLACK_BYTES, Budget
from lowtide.runtime.control.interception import Interception
from lowtide.runtime.control.plan_choice import PlanChoice
from lowtide.runtime.control.step_audit import StepAudit
from lowtide.runtime.control.unit_choices import Choice, Follow, Hold, Ignore
from lowtide.runtime.device.accelerator import HOST
from lowtide.runtime.online.mode import OnlineMode
from lowtide.runtime.online.retry import Refusals
from lowtide.runtime.planned.compiled_plan import CompiledPlan, compile_script
from lowtide.runtime.planned.mode import PlannedMode
from lowtide.runtime.planned.serving import PlannedRun
from lowtide.runtime.planned.timing import Stopwatch
from lowtide.runtime.record.quiet_recorders import OwnershipTracker
from lowtide.runtime.record.trace_recorder import TraceRecorder
from lowtide.runtime.units.knowledge import Knowledge
from lowtide.runtime.units.unit import Unit
from lowtide.runtime.units.unit_mode import (
    Diverged,
    Expectation,
    Following,
    Online,
    OnlineReason,
    Recording,
    Unmonitored,
)

TRUSTED: Final = 4
"""Units that must have followed their recording before one whose plan drops nothing is no longer watched at all."""

_UNRECORDED: Final = frozenset({
    OnlineReason.SIZE_OF_ITS_OWN, OnlineReason.WORN, OnlineReason.DIFFERENTIABLE, OnlineReason.OUTGREW,
})
"""Why a unit under a budget begins without being recorded: its operators need not be looked at, only what autograd saves."""


@final
class UnitStart:
    """Installs the dispatch mode that a choice needs, and sets the unit's mode; one per runtime."""

    def __init__(
        self, budget: Budget, interception: Interception, knowledge: Knowledge, audit: StepAudit, choice: PlanChoice
    ) -> None:
        """Share the runtime's parts."""
        self._budget, self._interception, self._knowledge = budget, interception, knowledge
        self._audit, self._choice = audit, choice

    def run(self, unit: Unit, choice: Choice) -> None:
        """Start a unit as chosen.

        Raises:
            TypeError: for a refusal or a lever to be engaged first: the caller handles these.
        """
        match choice:
            case Hold():
                self.hold(unit, choice)
            case Follow():
                self._follow(unit, choice)
            case Ignore():
                self._audit.note_policy("plain")
                self._interception.watch_nothing()
                unit.become(Unmonitored(None))
            case _:
                raise TypeError(f"no way to run a unit: {choice}")

    def hold(self, unit: Unit, how: Hold) -> None:
        """Hold the budget online for a unit, and record it unless there is a reason not to."""
        interception = self._interception
        dropped = interception.drop_first(self._choice.plan if how.planned else None)
        self._audit.note_policy("planned" if dropped and how.is_planned else "online")
        if interception.saver.outstanding <= 0:
            interception.ledger.forget()
        recorder = self._recorder(unit, notes=how.reason is None)
        if how.reason in _UNRECORDED and not self._choice.has_given_plan and interception.can_hold_by_queue():
            interception.watch_what_is_saved(recorder)
        else:
            interception.watch_fully(recorder, remember=True)
        unit.become(Recording(recorder) if how.reason is None else Online(recorder, how.reason))

    def stop_ignoring(self, unit: Unit, reason: OnlineReason) -> None:
        """Hold the budget online from now on for a unit that was not intercepted so far."""
        self.hold(unit, Hold(reason, planned=self._choice.has_given_plan))

    def _recorder(self, unit: Unit, *, notes: bool) -> TraceRecorder:
        """A unit's recorder.

        It notes events if a trace is wanted (``notes``), or if the meter sums what is noted; else it only tracks which values
        belong to the unit.
        """
        meter = self._interception.meter
        return (TraceRecorder if notes or not meter.exact else OwnershipTracker)(meter, unit.base_bytes)

    def _follow(self, unit: Unit, how: Follow) -> None:
        entry, state = how.entry, how.solution.state
        assert state is not None
        entry.uses += 1
        self._audit.note_policy("planned" if state.decisions else "plain")
        shift = entry.shift(unit)
        certain = shift == unit.base_bytes - entry.trace.base_bytes
        peak = state.peak_bytes + shift
        if how.resizing is not None:
            start = entry.problem.base_bytes
            peak = start + shift + how.resizing.rise(state.peak_bytes - start)
        expected = Expectation(entry, state, peak, certain, how.resizing)
        interception = self._interception
        interception.clock.detailed = False
        interception.stack.take()
        trusted = entry.followed >= TRUSTED and how.resizing is None
        if not state.decisions and trusted and not self._knowledge.recordings.is_surprising(unit.kind):
            interception.watch_nothing()
            unit.become(Unmonitored(expected))
            return
        plan = self._planned_mode(unit, how)
        if interception.follow(plan):
            unit.become(Following(plan, expected))
        else:  # the script has a mode of its own on: no mode can be put above it
            interception.watch_nothing()
            unit.become(Unmonitored(expected))

    def _planned_mode(self, unit: Unit, how: Follow) -> PlannedMode:
        script, interception, state = self._compiled(how), self._interception, how.solution.state
        assert state is not None
        resized = how.resizing is not None
        due = how.entry.timings.are_due(state, how.entry.followed)
        clocked = due and state.decisions and not (interception.tier.overlaps or resized)
        how.entry.timings.begun += bool(clocked)
        run = PlannedRun(script, interception.evictor.tally, interception.tier, Stopwatch() if clocked else None)
        cap = room = limit = None
        if self._budget.bytes and interception.meter.capped and interception.evictor.moves:
            most = limit = self._budget.bytes - SLACK_BYTES if resized else self._budget.bytes
            cap, room = functools.partial(interception.cap, most), lambda: most - interception.meter.live()
        on_host = interception.meter.device == HOST  # elsewhere backwards run in other threads, where no gate is on
        gated = on_host and not clocked
        return PlannedMode(
            script, run, functools.partial(self._diverged, weakref.ref(unit)), interception.saver.pack,
            interception.out_of_memory(), interception.before_planned_write, cap, room=room,
            refusals=Refusals(interception.meter), resized=resized,
            gate=interception.gate_under(limit, script.gate_script) if gated else None,
            thread=threading.get_ident() if on_host else 0,
        )

    def _compiled(self, how: Follow) -> CompiledPlan:
        entry, state = how.entry, how.solution.state
        assert state is not None
        if entry.compiled is None or entry.compiled[0] is not state:
            script = compile_script(
                entry.problem, state, entry.funcs, entry.packs, entry.backward_starts,
                overlaps=self._interception.tier.overlaps,
            )
            entry.compiled = state, script
        return entry.compiled[1]

    def _diverged(self, following: weakref.ref[Unit]) -> OnlineMode:
        """A planned forward left its recording: hold the budget online for the rest of the unit."""
        unit = following()
        assert unit is not None
        self._audit.note_policy("online")
        assert isinstance(unit.mode, Following)
        plan, entry = unit.mode.plan, unit.mode.expected.entry
        if entry.is_untried:  # recorded in an earlier run: this says nothing of this run's units
            self._knowledge.recordings.reject(entry)
        elif not (plan.varies and (plan.is_longer or entry.meets_detours(plan.extra_bytes(), lacked=True))):
            self._knowledge.recordings.surprised(unit.kind)
        unit.become(Diverged(unit.mode))
        return self._interception.take_over(plan, self._recorder(unit, notes=False))  # half a unit makes no trace
