"""Chooses, from the recordings, how a unit that begins is to run; the choice is returned as a value.

One module: every choice weighs the same recordings, figures and limits.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, Final, final

from lowtide.base.errors import BudgetError
from lowtide.planning.unit.bound import forced_live
from lowtide.planning.unit.plan_file import Plan, plan_of
from lowtide.planning.unit.problem import Problem
from lowtide.planning.unit.solve import Solution
from lowtide.runtime.budget import SLACK_BYTES, Budget
from lowtide.runtime.control import plan_consensus
from lowtide.runtime.control.budget_error import figures_of, raised, refusal, resident_figures, resized
from lowtide.runtime.control.budget_source import BudgetSource
from lowtide.runtime.control.evaluations import Evaluations
from lowtide.runtime.control.interception import Interception
from lowtide.runtime.control.lever_set import LeverSet
from lowtide.runtime.control.settings import BudgetSettings
from lowtide.runtime.control.step_audit import StepAudit
from lowtide.runtime.control.unit_choices import AsWritten, Choice, Follow, Hold, Ignore, MoveGradients, MoveStates, Refuse
from lowtide.runtime.online.retry import LIBRARY_BYTES
from lowtide.runtime.run_figures import Neighbour, PlanFigures
from lowtide.runtime.torch_state import in_process_group
from lowtide.runtime.units.knowledge import Knowledge
from lowtide.runtime.units.plan_cache import CROSSED
from lowtide.runtime.units.recorded_unit import TOLERANCE_BYTES, TOLERANCE_SHARE, RecordedUnit, near
from lowtide.runtime.units.resizing import Resizing
from lowtide.runtime.units.unit import Unit
from lowtide.runtime.units.unit_mode import OnlineReason
from lowtide.runtime.units.unit_signature import UnitSignature

UPDATES: Final = 2
"""Steps after which the optimizer's update is known: the first one also allocates the optimizer's states."""
SPARE_SHARE: Final = 0.03
"""Share of the room above the base that is left free where a unit follows the plan of one of other sizes."""
GRID: Final = 20
"""Number of steps into which the room of such plans is divided ..."""
SEARCHES: Final = 5
"""... and for how many of them plans are searched; the others are served by plans that need less."""
TRIES: Final = 3
"""Units that follow plans of an earlier run's recording although none of them has borne it out yet."""
FORWARDS: Final = 128
"""Steps, those without a backward included, after which a run is no longer refused."""
AGREED_UNITS: Final = range(2, 10)
"""Units, counted from 1, at whose beginning ranks agree on one plan; every rank reaches these units."""


@final
class PlanChoice:
    """Chooses how units run, and keeps the figures of the plan in force; one per runtime.

    Attributes:
        figures: the figures of the plan in force; of a step's units, those of the one with the highest predicted peak.
        between_bytes: highest point outside units: in the update before the unit that begins, and in any evaluation.
        refused: the error that ended the script.
    """

    def __init__(
        self, settings: BudgetSettings, budget: Budget, source: BudgetSource, interception: Interception, knowledge: Knowledge,
        levers: LeverSet, audit: StepAudit, evaluations: Evaluations,
    ) -> None:
        """Start without figures."""
        self._settings, self._budget, self._source = settings, budget, source
        self._interception, self._knowledge, self._levers = interception, knowledge, levers
        self._audit, self._evaluations = audit, evaluations
        self.figures: PlanFigures | None = None
        self.between_bytes = 0
        self.refused: BudgetError | None = None
        self._solved: tuple[Problem, Solution] | None = None
        self._solved_for: tuple[RecordedUnit, int] | None = None
        self._figures_key: tuple[Any, ...] = ()
        self._figures_cache: PlanFigures | None = None

    @property
    def plan(self) -> Plan | None:
        """The decisions by site of the unit that was solved last; until one was, the plan that the user gave."""
        return self._settings.plan if self._solved is None else plan_of(*self._solved)

    def neighbours(self) -> tuple[Neighbour, ...]:
        """What a little less and a little more memory would cost in the unit that was solved last."""
        budget, figures = self._budget.bytes, self.figures
        if self._solved_for is None or figures is None or figures.extra_seconds is None or not budget:
            return ()
        entry, shift = self._solved_for
        return entry.neighbours(budget, figures.resident_bytes, shift)

    def choose(self, unit: Unit) -> Choice:
        """Choose how a unit that begins is to run."""
        if not self._source.only_rescues:
            self._adopt(unit.kind)
        self._source.resolve(unit, self._audit.steps, self.between_bytes)
        if self._source.only_rescues:
            fits = self.has_room(unit)
            self._source.rescue_begins(fits=fits)
            return Ignore() if fits else self._hold(OnlineReason.NO_LIMIT)
        recordings = self._knowledge.recordings
        entry = recordings.nearest(unit.kind, unit.base_bytes)
        if entry is not None and entry.is_untried:
            followed = self._follow_earlier(unit, entry)
            if followed is not None:
                return followed
            self._leave_earlier(unit, entry)
            entry = recordings.nearest(unit.kind, unit.base_bytes, tried=True)
        if unit.number in AGREED_UNITS and plan_consensus.wanted():
            self._agree(entry, unit)
        if entry is not None:
            return self._choose_known(unit, entry)
        return self._choose_by_what_is_outside() or self._choose_unknown(unit)

    def _adopt(self, kind: UnitSignature) -> None:
        """Take over what an earlier run recorded of units of a kind, or of a sibling, that this run has not recorded."""
        earlier, recordings = self._settings.earlier, self._knowledge.recordings
        if earlier is None or in_process_group():
            return
        for each in (kind, *kind.siblings()):
            found = earlier.find(each, self._knowledge)
            if found is not None and not recordings.has(each):
                recordings.adopt(each, found)
                self._knowledge.checkpoints.recorded(each, found)
            if recordings.has(each):
                return

    @property
    def has_given_plan(self) -> bool:
        """Whether the user gave a plan: what it drops is dropped at once until there is another plan."""
        return self._settings.plan is not None

    def _hold(self, reason: OnlineReason | None, *, planned: bool = False) -> Hold:
        return Hold(reason, planned or self.has_given_plan)

    def _choose_known(self, unit: Unit, entry: RecordedUnit) -> Choice:
        """Choose for a unit whose kind was recorded: follow its plan, hold the budget online, or refuse it."""
        recordings, crossings = self._knowledge.recordings, self._audit.crossings
        self._knowledge.peaks.familiar()
        kind, base = unit.kind, unit.base_bytes
        shift = entry.shift(unit)
        solution = self._solve(entry, shift)
        doubtful = False
        for perhaps in entry.lower_shifts(unit)[: 1 if crossings.any else 2]:
            if solution.state is None and perhaps < shift:
                doubtful, shift, solution = True, perhaps, self._solve(entry, perhaps)
        if kind.plain_checkpoints and not self._is_better_than_written(unit, entry, solution):
            return AsWritten()
        figures = self._tell(unit, entry, solution, shift)
        limited, infeasible = bool(self._budget.bytes), solution.state is None
        refused = (
            limited
            and infeasible
            and max(figures.bound_peak_bytes, figures.lowest_peak_bytes) > self._budget.bytes
            and crossings.mostly(kind, at_least=CROSSED if entry.left.bytes else 0)
        )
        worn = recordings.is_worn(kind)
        proven = limited and self._cannot_be_held(figures, warm=recordings.is_warm(kind) or entry.followed > 0)
        likely_floor = max(figures.bound_peak_bytes, solution.bound.peak_bytes + entry.lower_shifts(unit)[0])
        likely = limited and infeasible and likely_floor > self._budget.bytes
        if (refused or proven or likely) and self._gradients_would_do(figures, unit, entry):
            return MoveGradients()
        if (refused or proven or likely) and self._states_would_do(figures):
            return MoveStates()
        if (refused or proven) and self.may_refuse:
            return Refuse(figures, proven=proven and not refused)
        self._solved, self._solved_for = (entry.problem, solution), (entry, shift)
        known = recordings.has(kind) and not doubtful
        exact = known and near(entry.trace.base_bytes, base, entry.problem.plain_peak)
        if recordings.is_wild(kind) and self.has_room(unit):
            return Ignore()
        if infeasible:
            crossings.without_plan(kind)
            return self._hold(None if not worn and (likely or not exact) else OnlineReason.WORN)
        if (exact or worn) and not (doubtful or recordings.is_wild(kind)):
            return Follow(entry, solution)
        return self._hold(None if not worn or doubtful else OnlineReason.WORN, planned=True)

    def _follow_earlier(self, unit: Unit, entry: RecordedUnit) -> Choice | None:
        """A plan of an earlier run for a unit; None if none fits, or none led through such units so far.

        An earlier run proves nothing of this one, so its recording refuses no budget. Libraries allocate memory of their own
        in a run's first unit; room for it is left.
        """
        earlier = self._settings.earlier
        if earlier is None or entry.uses >= TRIES or self._knowledge.recordings.is_wild(unit.kind):
            return None
        shift = entry.shift(unit)
        most = self._budget.bytes or entry.problem.plain_peak + abs(shift) + 1
        room = most - shift - SLACK_BYTES - entry.detour_bytes - (LIBRARY_BYTES if unit.number == 1 else 0)
        solution = entry.front.at(room, search=False)
        if solution.state is None:
            solution = entry.front.at_start(room, hasty=entry.is_hasty)
        if unit.kind.plain_checkpoints and not self._is_better_than_written(unit, entry, solution):
            return AsWritten()
        if solution.state is None:
            engaged, before = replace(unit.kind, engaged=True), self.figures
            figures, self.figures = self._tell(unit, entry, solution, shift), before
            would_do = earlier.has(engaged, self._knowledge) and self._gradients_would_do(figures, unit, entry)
            return MoveGradients() if would_do else None
        self._tell(unit, entry, solution, shift)
        self._solved, self._solved_for = (entry.problem, solution), (entry, shift)
        return Follow(entry, solution)

    def _leave_earlier(self, unit: Unit, entry: RecordedUnit) -> None:
        """Give up a recording of an earlier run, unless it may still suit later units.

        That is, if the unit is only a sibling of those that it was made of, or the run's first, for which more room is left.
        """
        if not self._knowledge.recordings.has(unit.kind) or unit.number == 1:
            return
        self._knowledge.recordings.reject(entry)
        if not entry.uses and self._settings.earlier is not None:
            self._settings.earlier.leave(entry)

    def _is_better_than_written(self, unit: Unit, entry: RecordedUnit, solution: Solution) -> bool:
        """Whether a unit whose checkpoints are plain holds the budget, and as fast as it does as the script is written."""
        if solution.state is not None and solution.state.extra_seconds <= entry.saved_seconds:
            return True
        written = self._knowledge.checkpoints.written(unit.kind)
        if written is None:
            return True
        other = self._solve(written, written.shift(unit))
        if other.state is None:
            return solution.state is not None or solution.lowest_bytes <= other.lowest_bytes
        saved, extra = entry.saved_seconds, other.state.extra_seconds
        return solution.state is not None and solution.state.extra_seconds <= saved + extra

    def _choose_unknown(self, unit: Unit) -> Choice:
        """Choose for a unit whose kind was not recorded: if it is smaller than one that fits, it is not intercepted."""
        if self.has_room(unit):
            return Ignore()
        peaks, interception = self._knowledge.peaks, self._interception
        limited = self._budget.bytes and interception.evictor.moves and interception.meter.capped
        follows = bool(limited) and self._knowledge.growth.may_follow(unit.kind)
        followed = self._choose_by_its_like(unit) or (self._of_other_sizes(unit) if follows else None)
        if followed is not None:
            return followed
        recorded = peaks.worth_recording(unit.kind) or follows
        return self._hold(None if recorded else OnlineReason.SIZE_OF_ITS_OWN)

    def has_room(self, unit: Unit) -> bool:
        """Whether a unit with these root calls is predicted to stay within the budget, or in the memory there is."""
        limit = self._source.limit_of_units()
        if not (limit and self._interception.meter.exact):
            return False
        peaks = self._knowledge.peaks
        unsteady = self._knowledge.recordings.is_wild(unit.kind)
        most = peaks.most(unit.calls, unit.gradient_bytes, unsteady=unsteady)
        if most is None and self._source.only_rescues:  # such units have no recordings
            most = peaks.rise_of(unit.calls, unit.gradient_bytes)
        return most is not None and unit.base_bytes + unit.left.bytes + most <= limit

    def _choose_by_its_like(self, unit: Unit) -> Choice | None:
        """Refuse a budget that a recorded unit of other sizes certainly cannot hold; None if there is no such unit."""
        if not (self._budget.bytes and self.may_refuse):
            return None
        recordings = self._knowledge.recordings
        likes = (recordings.nearest(kind, unit.base_bytes) for kind in recordings.alike(unit.kind))
        tried = (e for e in likes if e is not None and not e.is_untried)
        entry = max(tried, key=lambda e: e.front.bound.peak_bytes, default=None)
        if entry is None:
            return None
        shift = entry.shift(unit)
        figures = self._tell(unit, entry, self._solve(entry, shift), shift)
        of_recording = replace(figures, bound_peak_bytes=entry.front.bound.peak_bytes)  # the update may have been a first one
        if not self._cannot_be_held(of_recording, warm=False):
            return None
        if self._gradients_would_do(figures, unit, entry):
            return MoveGradients()
        return MoveStates() if self._states_would_do(figures) else Refuse(figures, proven=True)

    def _of_other_sizes(self, unit: Unit) -> Follow | None:
        """The plan of a recorded unit that differs only in sizes, if one fits this unit; None otherwise."""
        knowledge = self._knowledge
        other = knowledge.growth.nearest(unit.kind, knowledge.recordings.alike(unit.kind))
        entry = None if other is None else knowledge.recordings.nearest(other, unit.base_bytes)
        if other is None or entry is None:
            return None
        resizing = knowledge.growth.relation(unit.kind, other, knowledge.persistent.missing_gradient_bytes())
        shift, start = entry.shift(unit), entry.problem.base_bytes
        spare = int(SPARE_SHARE * max(0, self._budget.bytes - unit.base_bytes))
        rise = resizing.recorded_rise(self._budget.bytes - spare - start - shift - entry.detour_bytes)
        grid = max(1, (entry.problem.plain_peak - start) // GRID)
        room = rise // grid
        if room not in entry.rooms and len(entry.rooms) < SEARCHES:  # each unit has its own room, and searching takes time
            entry.rooms.add(room)
            _within(entry, start + room * grid)
        solution = entry.front.at(start + rise - SLACK_BYTES, search=False)
        if solution.state is None:
            solution = _within(entry, start + rise)
        if solution.state is None:
            return None
        self._solved, self._solved_for = (entry.problem, solution), (entry, shift)
        self._tell(unit, entry, solution, shift, resizing)
        return Follow(entry, solution, resizing)

    # --- plans -------------------------------------------------------------------------------------------------------

    def _solve(self, entry: RecordedUnit, shift: int) -> Solution:
        solution = _within(entry, self._room_for(entry, shift))
        agreed = entry.agreed
        return replace(solution, state=agreed) if agreed and agreed.peak_bytes <= solution.budget_bytes else solution

    def _room_for(self, entry: RecordedUnit, shift: int) -> int:
        """Highest peak of a plan, on the recording's base, that keeps a unit ``shift`` bytes higher within the budget.

        What units held on detours is left free, unless no plan does with the rest.
        """
        room = (self._budget.bytes or entry.problem.plain_peak + abs(shift) + 1) - shift
        careful = room - entry.detour_bytes
        return careful if careful == room or _within(entry, careful).state is not None else room

    def _agree(self, entry: RecordedUnit | None, unit: Unit) -> None:
        """Agree with the other ranks on one plan. Collectives: every rank must call this, whether it has a plan or not."""
        room = plan_consensus.on_room(None if entry is None else self._room_for(entry, entry.shift(unit)))
        mine = None if entry is None or room is None else _within(entry, room)
        agreed = plan_consensus.on_plan(None if entry is None else entry.problem, mine)
        if entry is not None:
            entry.agreed = agreed

    def _gradients_would_do(self, figures: PlanFigures, unit: Unit, entry: RecordedUnit) -> bool:
        """Whether offloading gradients may lower the peak by enough.

        The lever offloads the gradients, and avoids the temporaries of updating all parameters at once. Before the first
        backward, only gradients that existed when the unit began can be offloaded: while the run may still be refused, the
        lever is not engaged if that is too little.
        """
        levers = self._levers
        if not levers.may_move_gradients():
            return False
        lowest = max(figures.resident_bytes, figures.bound_peak_bytes - levers.most_lowered_bytes())
        if self.may_refuse:
            first = entry.backward_starts[0] if entry.backward_starts else len(entry.trace.events)
            forced = int(forced_live(entry.problem)[:first].max(initial=0)) + self._knowledge.certain_shift(entry, unit)
            lowest = max(lowest, forced - unit.gradient_bytes)
        return lowest <= self._budget.bytes and levers.gradients.can_engage(levers.optimizers)

    def _states_would_do(self, figures: PlanFigures) -> bool:
        """Whether offloading optimizer states, and gradients if they are not offloaded yet, may lower the peak by enough."""
        levers = self._levers
        if not levers.may_move_states():
            return False
        states = levers.movable_state_bytes()
        gradients = levers.most_lowered_bytes() if levers.may_move_gradients() else 0
        update = self.between_bytes - levers.movable_state_bytes(in_update=True) - levers.most_lowered_bytes(in_update=True)
        lowest = max(figures.resident_bytes - states, figures.bound_peak_bytes - states - gradients, update)
        return states > 0 and lowest <= self._budget.bytes

    # --- figures and refusals ----------------------------------------------------------------------------------------

    def _tell(
        self, unit: Unit, entry: RecordedUnit, solution: Solution, shift: int, resizing: Resizing | None = None
    ) -> PlanFigures:
        asked = (shift, unit.base_bytes, self.between_bytes, resizing)
        key = (solution.state, solution.status, entry, entry.timings.ended, *asked)
        found = self._figures_cache
        if found is None or solution.state is None or not _is_same(key, self._figures_key):
            self._figures_key = key
            found = figures_of(
                entry, solution, resident_bytes=self._knowledge.persistent.bytes(), shift_bytes=shift,
                baseline_bytes=self._knowledge.baseline_peak(entry, unit),
                certain_bytes=self._knowledge.certain_shift(entry, unit),
            )
            if resizing is not None:
                found = resized(found, resizing, entry.problem.base_bytes + shift)
            found = self._figures_cache = raised(found, self.between_bytes)
        higher = (self.figures and self.figures.predicted_peak_bytes) or 0
        if self._audit.running.units == 1 or (found.predicted_peak_bytes or self._budget.bytes) >= higher:
            self.figures = found
        return found

    def raise_figures(self, evaluation_bytes: int) -> None:
        """An evaluation peaked higher than any before: raise the figures to that, which no plan lowers."""
        if self.figures is not None:
            self.figures = raised(self.figures, evaluation_bytes)

    def raise_prediction(self, measured_bytes: int) -> None:
        """Raise the predicted peak to that of a unit of other sizes than recorded, whose own peak was only estimated."""
        figures = self.figures
        if figures is not None and figures.predicted_peak_bytes is not None:
            self.figures = replace(figures, predicted_peak_bytes=max(figures.predicted_peak_bytes, measured_bytes))

    def _cannot_be_held(self, figures: PlanFigures, *, warm: bool) -> bool:
        """Whether the minimum is certainly above the budget.

        Unless ``warm``, a margin is left: a cold first step may differ a little from later ones.
        """
        doubt = 0 if warm else max(TOLERANCE_BYTES, int(TOLERANCE_SHARE * figures.bound_peak_bytes)) + LIBRARY_BYTES
        return figures.bound_peak_bytes - doubt > self._budget.bytes

    def _choose_by_what_is_outside(self) -> Choice | None:
        """Refuse a budget below what no plan lowers, although no unit like this one was recorded (new shapes in every step).

        That is resident memory, evaluations, and the optimizer's update, which counts from the third step on: the first one
        also allocates the optimizer's states. Gradients are offloaded instead where that may be enough.
        """
        steps, levers = self._audit.steps, self._levers
        if not self._budget.bytes or not steps:
            return None
        resident = self._knowledge.persistent.bytes(self._interception.meter.counts)
        figures = resident_figures(resident, max(s.peak_bytes for s in steps), steps[-1].seconds)
        evaluated = raised(figures, self._evaluations.highest_bytes)
        outside = raised(evaluated, self.between_bytes if self._audit.trained >= UPDATES else 0)
        if resident <= self._budget.bytes and not self._cannot_be_held(outside, warm=False):
            return None
        lowest = max(evaluated.bound_peak_bytes, outside.bound_peak_bytes - levers.most_lowered_bytes(in_update=True))
        if lowest <= self._budget.bytes and levers.may_move_gradients() and levers.gradients.can_engage(levers.optimizers):
            return MoveGradients()
        if levers.may_move_states():
            lowest = max(
                resident - levers.movable_state_bytes(), evaluated.bound_peak_bytes - levers.movable_state_bytes(),
                lowest - levers.movable_state_bytes(in_update=True),
            )
            if lowest <= self._budget.bytes:
                return MoveStates()
        self.figures = outside
        return Refuse(outside, proven=True) if self.may_refuse else None

    @property
    def may_refuse(self) -> bool:
        """Whether the script may be ended here: it is in its first steps, so little is lost, and need not keep going."""
        audit = self._audit
        early = audit.trained < audit.refusable and len(audit.steps) < FORWARDS
        return early and not (self._settings.keep_going or self._source.may_rise)

    def refuse(self, choice: Refuse, unreached: tuple[str, ...]) -> BaseException:
        """The exception that ends the script; no reference to it is kept, as its traceback would keep the model alive."""
        told = functools.partial(
            refusal, choice.figures, self._budget.bytes, self.between_bytes, proven=choice.proven,
            evaluation_bytes=self._evaluations.highest_bytes, declined=self._levers.in_backward.reason, unreached=unreached,
            optimized=self._levers.takes_gradients,
        )
        self.refused = told()
        return told() if self._settings.refusal is None else self._settings.refusal(self.refused)


def _within(entry: RecordedUnit, room: int) -> Solution:
    solution = entry.front.at_start(room - SLACK_BYTES, hasty=entry.is_hasty)
    return entry.front.at_start(room, hasty=entry.is_hasty) if solution.state is None else solution


def _is_same(told: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    """Whether two tuples hold the same objects and equal integers."""
    return len(told) == len(before) and all(
        a == b if isinstance(a, int) else a is b for a, b in zip(told, before, strict=True)
    )
