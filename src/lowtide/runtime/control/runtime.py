"""Runs a script under a budget: tracks where units begin and end, and passes events on to the runtime's parts.

A *unit* is a forward and the backward that consumes it. A unit whose kind was never seen runs with the full interception:
the budget is held online, and the unit is recorded. Its recording is solved when the next unit of that kind begins, on the
base that memory has by then; once a recording was made on the same base, units run with the lean interception. A unit that
leaves its plan falls back to the full interception for the rest of the unit. :mod:`.plan_choice` chooses how a unit runs,
:mod:`.unit_start` installs what that needs, and :mod:`.unit_review` learns from the unit when it has ended.

One module: it has one method for each event that the clock reports, and most of these pass the event on in a few lines.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

import torch
from lowtide.base.errors import SizeError
from lowtide.base.forks import weakly
from lowtide.base.lever_catalogue import GRADIENTS, STATES
from lowtide.base.messages import tell
from lowtide.base.trace import Phase
from lowtide.base.units import Auto, FromStep
from lowtide.planning.unit.plan_file import Plan
from lowtide.probe.marks import Rounds
from lowtide.runtime.budget import SLACK_BYTES, Budget
from lowtide.runtime.control import unit_boundaries
from lowtide.runtime.control.budget_source import BudgetSource
from lowtide.runtime.control.evaluations import Evaluations
from lowtide.runtime.control.interception import Interception
from lowtide.runtime.control.lever_set import LeverSet
from lowtide.runtime.control.plan_choice import PlanChoice
from lowtide.runtime.control.settings import BudgetSettings
from lowtide.runtime.control.step_audit import REFUSED, StepAudit
from lowtide.runtime.control.unit_choices import AsWritten, Hold, MoveGradients, MoveStates, Refuse
from lowtide.runtime.control.unit_review import UnitReview
from lowtide.runtime.control.unit_start import UnitStart
from lowtide.runtime.device import accelerator
from lowtide.runtime.device.accelerator import HOST, counted_device_of, is_accelerator
from lowtide.runtime.early_stop import StepLimitReached
from lowtide.runtime.intercept.bypass import Bypass
from lowtide.runtime.intercept.coverage import COMPILED, TRANSFORM, Coverage
from lowtide.runtime.intercept.data_swaps import is_applying
from lowtide.runtime.intercept.mode_sensitive_backward import ModeSensitiveBackward, Unseen
from lowtide.runtime.intercept.phases import PhaseTracker
from lowtide.runtime.intercept.pointer_escapes import PointerEscapes
from lowtide.runtime.online.kept_modules import KeptModules
from lowtide.runtime.online.retry import LIBRARY_BYTES
from lowtide.runtime.planned.mode import PlannedMode
from lowtide.runtime.planned.retained_graphs import WriteMode
from lowtide.runtime.record.quiet_recorders import NO_UNIT
from lowtide.runtime.run_figures import Neighbour, RunOutcome
from lowtide.runtime.storage.arguments import PLAIN_TYPES
from lowtide.runtime.tensors import node_of, storages_of, tensors_in, with_gradients
from lowtide.runtime.units.knowledge import Knowledge
from lowtide.runtime.units.plan_cache import PlanCache
from lowtide.runtime.units.recorded_unit import TOLERANCE_BYTES, RetainedBytes
from lowtide.runtime.units.resizing import Resizing
from lowtide.runtime.units.script_checkpoints import ScriptCheckpoints
from lowtide.runtime.units.unit import Unit
from lowtide.runtime.units.unit_mode import Following, Online, OnlineReason, Recording, Unmonitored
from lowtide.runtime.units.unit_signature import UnitSignature, kind_of


@final
@dataclass(slots=True)
class _Former:
    """The unit that ended last, and the optimizer that stepped last.

    Attributes:
        units: how many units have begun in the run.
        kind: the kind of the unit.
        plan: the plan that it followed, even if it diverged from it.
        left_graphs: whether graphs outlived it.
        optimizer: ``id`` of the optimizer that stepped last.
    """

    units: int = 0
    kind: UnitSignature | None = None
    plan: PlannedMode | None = None
    left_graphs: bool = False
    optimizer: int = 0


@final
class Runtime:
    """One per process while a budget is in force; listens to the clock.

    Its many fields are the parts that it wires together, and its many methods are the events that it handles.

    Attributes:
        of_command: the runtime that ``lowtide run`` started in this process.
        unit: the running unit, or None between units.
        excused: how many steps at the beginning ran before a lever was engaged; they are not judged against the budget.
        script_code_in_backward: whether code of the script (hooks, custom functions) may run in a backward.
    """

    of_command: ClassVar[Runtime | None] = None

    def __init__(self, settings: BudgetSettings) -> None:
        """Install nothing yet."""
        self.settings = settings
        self.clock = PhaseTracker(self, ModeSensitiveBackward(self))
        self.budget = budget = Budget()
        self.interception = interception = Interception(self.clock, budget)
        interception.evictor.exempt = KeptModules(settings.keep)
        interception.evictor.moves = settings.offload
        interception.evictor.last_resort = self._offload_gradients_within
        interception.saver.on_first = self._functional_begins
        self.patches = PointerEscapes(self)
        self.asides = Bypass(
            interception.stack, self.clock, self._run_region, before_tracing=self._before_tracing
        )
        self.unreached = Coverage(interception.stack)
        self.levers = LeverSet(settings, budget, interception, lambda: self.clock.phase, self._before_update)
        self.clock.on_optimizer = self._optimizer_made
        self._rounds = Rounds()
        recordings = PlanCache()
        self.knowledge = knowledge = Knowledge(ScriptCheckpoints(self.levers.checkpoints, recordings), recordings)
        self.audit = StepAudit(budget, interception, settings.on_step)
        self.evaluations = Evaluations(budget, interception)
        self.source = BudgetSource(settings.budget, budget, interception, knowledge)
        self.choice = PlanChoice(
            settings, budget, self.source, interception, knowledge, self.levers, self.audit, self.evaluations
        )
        self._starts = UnitStart(budget, interception, knowledge, self.audit, self.choice)
        self._reviews = UnitReview(budget, interception, knowledge, self.audit)
        self.unit: Unit | None = None
        self.excused = 0
        self._former = _Former()
        self._pid = os.getpid()
        self._active = False
        self._functional = False
        self.script_code_in_backward = False

    # --- on and off --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start intercepting; the full interception stays on until the first plan.

        Raises:
            SizeError: if the budget is to be read off a device and there is none.
        """
        if isinstance(self.settings.budget, Auto) and not accelerator.is_there():
            raise SizeError("a budget of auto needs a CUDA device, and there is none: give a size or share, as 6GiB or 50%")
        self._active = True
        self.interception.measure_tier()
        if not self.interception.meter.exact:
            tell(
                "lowtide: the heap counter is not loaded (no compiler at installation, or not Linux): operators' workspace "
                "is known only from recorded steps, by torch's profiler; a first step may exceed the budget"
            )
        os.register_at_fork(after_in_child=weakly(self.forked))
        optimizers = [o for o in gc.get_objects() if issubclass(type(o), torch.optim.Optimizer)]
        for optimizer in optimizers:
            self.clock.expect_optimizer(optimizer)
        self.clock.install()
        self.asides.install()
        self.patches.install()
        self.levers.install(optimizers)
        self.source.begin()
        self.audit.open()
        self.interception.watch_fully(NO_UNIT, remember=False)
        self.clock.settle()

    def stop(self, *, over: bool = False) -> None:
        """Stop intercepting; handles that autograd still holds stay valid.

        Args:
            over: whether the script has ended, too.

        Raises:
            LeverError: if the script goes on although a lever has consumed gradients for an optimizer step that has not come.
        """
        if not self._active:
            return
        if self.unit is not None:
            self._end_unit()
        self._close_last_step()  # what comes back from now on is no part of it
        if not over:
            self.interception.hold_everything()
        self._active = False
        self.interception.online.passive = True
        self.levers.remove(over=over)
        self.interception.stack.take()
        self.clock.remove()
        self.patches.remove()
        self.asides.remove()
        self.budget.lift()
        self.interception.meter.close()
        if not over:
            self.levers.in_backward.check_left()

    def _close_last_step(self) -> None:
        step = self.audit.running
        if step.units and not self.clock.optimizers_seen:
            step.done = True
        if step.done or step.trains or (step.units and not self.audit.steps):  # otherwise it had no backward
            self._close_step()

    @property
    def plan(self) -> Plan | None:
        """The decisions by site of the unit that was solved last; until one was, the plan that the user gave."""
        return self.choice.plan

    def outcome(self) -> RunOutcome:
        """Figures of the run so far."""
        return RunOutcome(
            budget_bytes=self.budget.bytes,
            steps=tuple(self.audit.steps),
            setup_peak_bytes=self.audit.setup_peak_bytes,
            plan=self.choice.figures,
            exact=self.interception.meter.exact,
            asked=not self.source.only_rescues,
            of_first=isinstance(self.settings.budget, FromStep),
            excused=self.excused,
            units=self.audit.units_a_step,
            origin=self.source.origin,
            share=self.source.share,
            unreached=self.unreached.reasons,
            unmet=self.interception.evictor.exempt.unmet,
            levers=self.levers.figures(),
            units_of_earlier_runs=0 if self.settings.earlier is None else self.settings.earlier.followed,
        )

    def neighbours(self) -> tuple[Neighbour, ...]:
        """What a little less and a little more memory would cost; searching for it may take a second."""
        return self.choice.neighbours()

    def forked(self) -> None:
        """This process is a forked child (a data loader's worker) that inherited the interpreter: intercept nothing in it."""
        if self._active:
            self._active = False
            self.interception.silence()
            self.levers.forked()

    # --- events that the clock reports -------------------------------------------------------------------------------

    def phase_begins(self, phase: Phase) -> None:
        """Ignored: the other events show where units begin and end."""

    def root_begins(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """A module is called from outside any module."""
        if not self._active or os.getpid() != self._pid:
            return
        if not torch.is_grad_enabled():
            self.evaluations.begin(lambda: self._retained().there_bytes, within_unit=self.unit is not None)
            return
        if self.asides.transforming:
            self.unreached.note(TRANSFORM)
            return
        self.unreached.look(args, kwargs)
        self.knowledge.persistent.roots.add(module)
        self.levers.in_backward.root_begins()
        if not is_accelerator(self.interception.meter.device) and (device := counted_device_of(module.parameters())):
            self.interception.count_on(device)
            self.evaluations.forget()
            self.source.device_found()
        step = self.audit.running
        turn = 0 if step.done else step.units
        kind = kind_of(module, args, kwargs, engaged=self.levers.takes_gradients, after=self._after(), turn=turn)
        if self.unit is not None:
            within = replace(kind, plain_checkpoints=self.unit.kind.plain_checkpoints)
            if self._is_over(self.unit, within):
                self._end_unit()
            elif unit_boundaries.is_stale(self.unit, within, self.interception):
                self._abandon_unit()
            else:
                self._goes_on(self.unit, within)
                return
        self._begin_unit(self.knowledge.checkpoints.as_it_runs(kind))
        self.interception.saver.inputs.add(tensors_in((args, kwargs)))

    def _goes_on(self, unit: Unit, kind: UnitSignature) -> None:
        """The unit makes another root call."""
        unit.calls.append(kind)
        if unit.is_roomy and not self.choice.has_room(unit):
            self.source.rescue_begins(fits=False)
            self._starts.stop_ignoring(unit, OnlineReason.OUTGREW)
        mode = unit.mode
        if isinstance(mode, Following) and mode.expected.resizing and not unit_boundaries.is_alike_so_far(unit, mode.expected):
            mode.plan.leave()

    def _is_over(self, unit: Unit, kind: UnitSignature) -> bool:
        return unit_boundaries.is_over(
            unit, kind, optimizers_seen=self.clock.optimizers_seen, awaited=self.interception.saver.awaited
        )

    def _after(self) -> int:
        return self._former.optimizer if len(self.knowledge.persistent.optimizers) > 1 else 0

    def root_ends(self, result: Any) -> None:
        """A root call returned."""
        if not torch.is_grad_enabled():
            if self._active and self.unit is None and self.evaluations.end():  # otherwise it is a part of the unit
                self.choice.raise_figures(self.evaluations.highest_bytes)
        elif self.unit is not None:
            plain = [t for t in tensors_in(result) if type(t) in PLAIN_TYPES]  # on other types `grad_fn` may be costly
            self.unit.outputs += [weakref.ref(t) for t in plain if node_of(t) is not None]

    def called_elsewhere(self, module: torch.nn.Module) -> None:
        """A module is called in another thread."""
        self.unreached.elsewhere(module)

    def _functional_begins(self) -> Callable[[torch.Tensor], Any] | None:
        """Begin a unit of plain functions: autograd is about to save a tensor outside any module and any unit.

        Returns the plan's ``pack``, which then packs the tensor, if the unit follows a plan; else None.
        """
        if not self._active or self.unit is not None or not self._is_outside():
            return None
        self._functional = True
        self._begin_unit(UnitSignature((), engaged=self.levers.takes_gradients, after=self._after()))
        unit: Unit | None = self.unit
        return unit.following.pack if unit is not None and unit.following is not None else None

    def _is_outside(self) -> bool:
        """Whether the running code is in no module call and in no phase of a step."""
        return not self.clock.depth and self.clock.phase is Phase.DATA

    def _before_tracing(self) -> None:
        """A compiler is about to trace the script past Lowtide's wrappers."""
        self.levers.bring_back_all()

    def _run_region(self, region: Any, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a compiled region, whose operators are not seen; while the budget is held online, make room for it first."""
        self.unreached.note(COMPILED)
        if not isinstance(region, torch.nn.Module):  # it may read gradients and states past the properties in their place
            self.levers.bring_back_all()
        step = self.audit.running
        begins = step.done or not step.trains  # otherwise it is a later part of the step, perhaps its update
        if self._active and self.unit is None and begins and torch.is_grad_enabled() and self._is_outside():
            self._begin_unit(UnitSignature((), engaged=self.levers.takes_gradients, after=self._after()))
        if not (self._active and self.interception.holds_on_line()):
            return run(*args, **kwargs)
        with self.interception.evictor.around_unseen(region, sum(t.nbytes for t in tensors_in((args, kwargs)))):
            self.interception.recorder.begin_window()  # what making room took is no part of the plain run
            return run(*args, **kwargs)

    @contextlib.contextmanager
    def unseen(self, what: Unseen) -> Iterator[None]:
        """Make room for a derivative that runs without the dispatch mode, while the budget is held online."""
        if not (self._active and self.interception.holds_on_line()):
            yield
            return
        with self.interception.evictor.leaving(what.most_bytes):
            self.interception.recorder.begin_window()
            yield

    def backward_begins(self) -> None:
        """Autograd's engine is about to run."""
        if not self._active:
            return
        levers = self.levers
        own_code = self.script_code_in_backward or self.knowledge.persistent.has_hooks(levers.is_ours)
        levers.gradients.follow(levers.optimizers)
        with levers.in_backward.aside():
            self._backward_begins(own_code=own_code)
        planned = self._following is not None and self.interception.stack.mode is None
        levers.in_backward.backward_begins(own_code=own_code, planned=planned)

    @property
    def _following(self) -> PlannedMode | None:
        """The plan that the running unit follows; None without such a unit or plan."""
        return None if self.unit is None else self.unit.following

    def _backward_begins(self, *, own_code: bool) -> None:
        followed = self.clock.differentiable
        self.levers.checkpoints.backward_begins(self.clock.outputs, differentiable=followed)
        self.interception.saver.keep_only = not followed
        self.audit.running.trains = True
        unit = self.unit
        if unit is None:
            return
        if followed and isinstance(unit.mode, Unmonitored) and not self.source.only_rescues:
            self.knowledge.recordings.surprised(unit.kind, decidedly=True)  # such a backward was not expected
            if unit.is_roomy:
                self.knowledge.peaks.broke(unit.calls)
            self._starts.stop_ignoring(unit, OnlineReason.DIFFERENTIABLE)
        if unit.recorder is not None:
            unit.recorder.begin_backward(followed=followed)
            unit.starts.append(len(unit.recorder.events))
            unit.retains.append(self.clock.retains)
        if isinstance(unit.mode, Following):
            self._check_plan(unit, unit.mode, followed=followed, own_code=own_code)
        self.interception.stack.stand()
        unit.backwards += 1
        unit.consumed += not (followed or is_applying())

    def _check_plan(self, unit: Unit, mode: Following, *, followed: bool, own_code: bool) -> None:
        """Before a planned backward, check that operators and memory are where the plan says; otherwise leave the plan."""
        plan, entry = mode.plan, mode.expected.entry
        script = plan.script
        if not followed:
            plan.offload_before_backward()
        expected = script.backwards[unit.backwards] if unit.backwards < len(script.backwards) else (-1, 0)
        above = self.interception.meter.live() - unit.base_bytes - entry.left_besides(unit)
        stays = self.clock.retains and not (*entry.retains[unit.backwards:], False)[0]  # the plan does not expect that
        arrives = plan.arrives(expected[0])
        if mode.expected.resizing is None and not (plan.changed or plan.unplanned):
            cold = LIBRARY_BYTES if unit.number == 1 else 0
            fits = above <= expected[1] + entry.unfreed_bytes(unit) + TOLERANCE_BYTES + cold
        else:
            rise = script.rises[unit.backwards] if unit.backwards < len(script.rises) else 0
            resizing = mode.expected.resizing
            growth = max(plan.growth, 1.0) if resizing is None else plan.growth or resizing.growth
            excess = self._excess_resized(rise, growth)
            if plan.unplanned:  # what the unit holds less than the plan expects may not be there to be freed before the peak
                extra = plan.extra_bytes()
                excess += max(0, int(growth * expected[1]) + extra - above)
                entry.meets_detours(max(extra, entry.detour_bytes + excess))
            fits = excess <= 0 and not (plan.unplanned and self.clock.retains)  # another backward may need other parts
        grown = plan.grown and not plan.unplanned  # what was not planned is among the live bytes
        if arrives and not (grown or stays) and fits:
            plan.prune(followed=followed)
            if followed:
                return
            self.interception.stack.take()
            if own_code:
                self.interception.watch_writes_of(plan)
        else:
            plan.leave()

    def _excess_resized(self, rise_bytes: int, growth: float) -> int:
        """How far the rest of a unit that has other sizes or operators than the recorded one will exceed the budget.

        Args:
            rise_bytes: how far the recorded unit rises from here.
            growth: how many times as many bytes the operators of this unit's forward made.
        """
        rest = Resizing(1.0, growth, self.knowledge.persistent.missing_gradient_bytes())
        return self.interception.meter.live() + rest.rise(rise_bytes) - (self.budget.bytes - SLACK_BYTES)

    def exposing(self, tensor: torch.Tensor, *, shows: bool) -> None:
        """Code outside torch asks for a tensor's address, or gets its memory (``shows``), and may write there unseen."""
        interception = self.interception
        recorder = interception.recorder
        if recorder.active and not interception.online.passive:
            value = interception.ledger.find(tensor.untyped_storage())
            if value is not None:
                if shows:
                    interception.evictor.exposed(value)
                value.tainted = True
                recorder.taint(value)
        self.levers.exposed(tensor.untyped_storage())
        if shows and self._active:
            self._show(tensor)

    def _show(self, tensor: torch.Tensor) -> None:
        """A tensor may be written unseen: make now what replays of planned units would make from it."""
        plan, retained = self._following, self.interception.retained
        if plan is None and not retained.left():
            return
        with self.levers.in_backward.aside():
            retained.will_write(tensor)
            if plan is not None:
                plan.will_write(tensor)
                plan.expose(tensor)

    def backward_ends(self) -> None:
        """Autograd's engine returned, or raised."""
        if not self._active:
            return
        unit = self.unit
        with self.levers.in_backward.aside():
            self._backward_ends()
        if unit is not None and unit.is_roomy and self.source.only_rescues and sys.exception() is not None:
            self.knowledge.peaks.forget(unit.calls)  # as in _abandon_unit
        self.levers.in_backward.backward_ends()

    def _backward_ends(self) -> None:
        interception = self.interception
        interception.saver.keep_only = False
        unit = self.unit
        if unit is None:
            if self._former.kind is not None and interception.meter.exact:  # perhaps a backward over a retained graph
                self._reviews.learn_crossing(self._former.kind, interception.meter.op_peak())
            interception.watch_retained()
            return
        plan = unit.following
        if plan is not None and unit.backwards < len(plan.script.backwards):
            if self.clock.differentiable:
                plan.prune(followed=True)
            else:
                interception.follow_again(plan)
            return
        if is_applying():
            return
        if not unit_boundaries.goes_on_after_backward(unit, self.clock, outstanding=interception.saver.outstanding):
            self._end_unit()
            if self.clock.depth:
                self.clock.begin_anew()

    def _optimizer_made(self, optimizer: Any) -> None:
        self._rounds.made(optimizer)
        self.levers.optimizer_made(optimizer)

    def _before_update(self, optimizer: Any, parameter: torch.Tensor) -> None:
        """A parameter is about to be updated within the backward."""
        self.knowledge.meet_optimizer(optimizer)  # its states are created here, before its own step is seen
        if self._following is not None:
            self._following.will_write(parameter)
        self.interception.tell_retained((parameter,))

    def optimizer_begins(self, optimizer: Any) -> None:
        """An optimizer is about to step."""
        if not self._active:
            return
        self.knowledge.meet_optimizer(optimizer)
        self.levers.optimizers.add(optimizer)
        self._former.optimizer = id(optimizer)
        closure = self.clock.closure
        self.levers.in_backward.optimizer_begins(optimizer, closure=closure)
        if self.clock.phase is not Phase.BACKWARD:  # a mode taken off within the engine is back on at the next node
            self.interception.update_begins(self._following, closure=closure)
        if self.interception.stack.mode is not self.interception.online:
            self.interception.writes_unseen()
        if not closure and self.clock.phase is not Phase.BACKWARD:
            wanted = self.levers.wanted_by_update(optimizer)
            if GRADIENTS in wanted:
                self._move_gradients()
            if STATES in wanted:
                self.levers.move_states()
        self.levers.optimizer_begins(optimizer, closure=closure)

    def optimizer_ends(self, optimizer: Any) -> None:
        """An optimizer stepped (perhaps from a hook within the backward, or in a compiled region)."""
        if not self._active:
            return
        self.knowledge.persistent.optimizers.add(optimizer)
        self.audit.running.done |= self._rounds.stepped(optimizer) > 0
        self.levers.in_backward.optimizer_ends(optimizer)
        self.levers.optimizer_ends(optimizer, within_backward=self.clock.phase is Phase.BACKWARD)
        if self.clock.phase is Phase.BACKWARD:
            return
        interception, unit = self.interception, self.unit
        interception.update_is_over()
        if isinstance(interception.stack.mode, WriteMode):
            interception.stack.take()
        if unit is not None:
            unit.stepped = True
        plan = self._following
        if plan is not None:
            interception.follow_again(plan)
        elif unit is not None and not unit.kind.call and unit_boundaries.is_consumed(unit, interception.saver.awaited):
            self._end_unit()  # no module call will show where the next unit begins
        else:
            interception.watch_retained()

    # --- units -------------------------------------------------------------------------------------------------------

    def _begin_unit(self, kind: UnitSignature) -> None:
        self.levers.unit_begins()
        highest = self.audit.end_span()
        if not self._former.units:
            self.audit.setup_ends()
        step = self.audit.running
        if step.done or (step.units and not self.clock.optimizers_seen):
            self._close_step()
            self.audit.open()
            if self.settings.steps and len(self.audit.steps) >= self.settings.steps:
                raise StepLimitReached
        self.audit.unit_begins()
        self.interception.saver.inputs.clear()
        former = self._former
        former.units += 1
        interception = self.interception
        interception.update_is_over()  # an optimizer may have raised
        if not interception.meter.exact:
            self._meet_long_lived()
        if former.kind is not None and former.plan is not None and former.plan.forced and interception.meter.exact:
            # Its dropped values had to be made again before the script overwrote what their replays read.
            self._reviews.learn_crossing(former.kind, highest)
        left = self._retained()
        base = interception.meter.live() - left.there_bytes  # the script drops these graphs, at the latest within this unit
        between = base if former.left_graphs else max(highest, base)  # a graph's replays may have caused `highest`
        self.choice.between_bytes = max(between if former.units > 1 else 0, self.evaluations.highest_bytes)
        interception.meter.reset_op_peak()
        gradients = self.knowledge.persistent.gradient_bytes()
        self.unit = unit = Unit(kind, base, left, gradients, former.units, interception.evictor.times, calls=[kind])
        chosen = self.choice.choose(unit)
        if isinstance(chosen, MoveStates):
            self.unit = unit = self._move_states_before(unit)
            kind, chosen = unit.kind, self.choice.choose(unit)
        proven = isinstance(chosen, Refuse) and chosen.proven  # then the script's own checkpoints need no less
        if kind.plain_checkpoints and isinstance(chosen, (Refuse, AsWritten)) and not proven:
            unit.kind = kind = self.knowledge.checkpoints.give_up(kind)
            unit.calls = [kind]
            chosen = self.choice.choose(unit)
        if isinstance(chosen, Refuse):
            self.unit = None
            self.audit.running.units = 0
            raise self.choice.refuse(chosen, tuple(self.unreached.reasons))
        if isinstance(chosen, MoveGradients):
            self._move_gradients()
            self.audit.gradients_leave(whole=True)
            unit.kind = replace(kind, engaged=True)
            chosen = Hold(None, planned=self.choice.has_given_plan)
        self.knowledge.checkpoints.unit_begins(unit.kind)
        self._starts.run(unit, chosen)

    def _move_gradients(self) -> None:
        """Offload gradients from now on."""
        self.levers.move_gradients()
        self._peaks_fall()

    def _peaks_fall(self) -> None:
        """What was seen of peaks before a lever was engaged says nothing of later ones."""
        self.evaluations.forget()
        if self.audit.trained < REFUSED:
            self.excused = len(self.audit.steps)

    def _move_states_before(self, unit: Unit) -> Unit:
        """Offload optimizer states, and gradients, from a unit on that begins; returns the unit on its new base."""
        if not self.levers.takes_gradients:
            self.levers.move_gradients()
        self.levers.move_states()
        self._peaks_fall()
        self.audit.gradients_leave(whole=True)
        kind = replace(unit.kind, engaged=True)
        if self.audit.running.units == 1:
            self.audit.begins_anew()
        self.choice.between_bytes = base = self.interception.meter.live() - unit.left.there_bytes
        self.interception.meter.reset_op_peak()
        gradients = self.knowledge.persistent.gradient_bytes()
        return Unit(kind, base, unit.left, gradients, unit.number, unit.times, calls=[kind])

    def _offload_gradients_within(self) -> bool:
        """Offload the gradients that exist and all later ones, because an operator of the running unit fits in no other way.

        Returns whether that was possible, so that the operator is worth another try.
        """
        unit = self.unit
        if unit is None or not self.budget.bytes or not self.levers.has_gradients_to_move():
            return False
        self._move_gradients()
        if isinstance(unit.mode, Recording):
            unit.become(Online(unit.mode.recorder, OnlineReason.RELIEVED))
            self.audit.gradients_leave(whole=False)
        return True

    def _retained(self) -> RetainedBytes:
        """What graphs of earlier units still hold."""
        return self.interception.retained_bytes(self._former.plan)

    def _meet_long_lived(self) -> None:
        """Enter into the ledger what planned steps allocated unseen: gradients, and the first optimizer states."""
        ledger = self.interception.ledger
        for storage in storages_of(with_gradients(self.knowledge.persistent.tensors())).values():
            with contextlib.suppress(RuntimeError):  # a wrapper's storage has no address
                if storage.device == HOST and ledger.find(storage) is None:
                    ledger.enter(storage, None)

    def _end_unit(self) -> None:
        unit = self.unit
        assert unit is not None
        self.unit = None
        self._reviews.review(unit)
        self.knowledge.checkpoints.unit_ends(unit.kind, unit.base_bytes)
        plan, expected = unit.plan, unit.expected
        if plan and expected and (plan.changed or plan.unplanned or expected.resizing is not None):
            self.choice.raise_prediction(self.interception.meter.op_peak())
        elif unit.recorder is not None and self.audit.running.policy == "planned":  # held online with a plan's drops
            self.choice.raise_prediction(max(self.interception.meter.op_peak(), self.interception.meter.span_peak()))
        former = self._former
        former.kind, former.plan = unit.kind, unit.plan
        if unit.plan is not None:
            self.interception.end_plan(unit.plan)
        former.left_graphs = self._retained().bytes > 0
        self._clean_up()
        if self._functional and self.interception.stack.mode is None:
            self.interception.watch_fully(NO_UNIT, remember=False)
        else:
            self.interception.watch_retained()

    def _abandon_unit(self) -> None:
        """Drop the running unit: it was a forward without a backward."""
        unit, self.unit = self.unit, None
        self.levers.checkpoints.unit_ends()
        if unit is not None and unit.plan is not None:
            self.interception.end_plan(unit.plan)
        if unit is not None and unit.is_roomy and self.source.only_rescues:
            self.knowledge.peaks.forget(unit.calls)  # it may have run out of memory, and the script goes on
        self.audit.unit_abandoned()
        self._clean_up()

    def _clean_up(self) -> None:
        """A unit has ended in one way or another: note nothing more for it, and begin the next span."""
        self.interception.note_nothing()
        self.interception.meter.reset_op_peak()
        self.audit.end_span()

    def _close_step(self) -> None:
        self.audit.close(self.choice.figures, self.evaluations.highest_bytes, self.unreached.reasons)
