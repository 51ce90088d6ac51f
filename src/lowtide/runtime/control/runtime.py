"""Running a script under a budget: which interception is on when, and which plan is in force.

A *unit* is a forward and the backward that consumes it. A unit that was never seen is run with the full interception:
the budget is held on line and the unit is recorded. Its recording is solved when the next such unit begins, on the base
that memory has by then; from a recording made on the same base, units run lean. Whatever leaves the plan falls back to the
full interception for the rest of the unit.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

import torch
from lowtide.base.errors import BudgetError, SizeError
from lowtide.base.lever_catalogue import GRADIENTS, LOSS, SLICES, SPLIT_OPS, UPDATE
from lowtide.base.messages import tell
from lowtide.base.trace import Phase
from lowtide.base.units import Auto, Share, Size, format_bytes
from lowtide.planning.unit.bound import forced_live
from lowtide.planning.unit.greedy import State
from lowtide.planning.unit.plan_file import Plan, dropped_sites, plan_of
from lowtide.planning.unit.problem import Problem
from lowtide.planning.unit.simulate import play
from lowtide.planning.unit.solve import Front, Solution
from lowtide.probe.marks import Rounds
from lowtide.runtime.control import plan_consensus
from lowtide.runtime.control.budget_error import figures_of, raised, refusal, resident_figures
from lowtide.runtime.control.peak_model import TOLERANCE_SHARE as SMALLER_SHARE
from lowtide.runtime.control.peak_model import PeakModel
from lowtide.runtime.control.persistent_state import PersistentState
from lowtide.runtime.control.plan_cache import CROSSED, BudgetCrossings, PlanCache
from lowtide.runtime.control.unit import TOLERANCE_BYTES, TOLERANCE_SHARE, RecordedUnit, RetainedBytes, Unit, near
from lowtide.runtime.control.unit_signature import UnitSignature, is_smaller, kind_of
from lowtide.runtime.device.available_memory import available_bytes, return_freed_memory
from lowtide.runtime.device.memory_meter import CudaMeter, HeapMeter, LedgerMeter, Meter, counters
from lowtide.runtime.device.offload import FileTier, PinnedTier, Ticket
from lowtide.runtime.early_stop import StepLimitReached
from lowtide.runtime.intercept.bypass import Bypass
from lowtide.runtime.intercept.coverage import COMPILED, TRANSFORM, Coverage
from lowtide.runtime.intercept.data_swaps import is_applying
from lowtide.runtime.intercept.dispatch_mode import tell_of_forks
from lowtide.runtime.intercept.mode_sensitive_backward import ModeSensitiveBackward, Unseen
from lowtide.runtime.intercept.mode_stack import ModeStack
from lowtide.runtime.intercept.phases import PhaseTracker
from lowtide.runtime.intercept.pointer_escapes import PointerEscapes
from lowtide.runtime.levers.deferred_logits import DeferredLogits
from lowtide.runtime.levers.offloaded_gradients import OffloadedGradients
from lowtide.runtime.levers.optimizer_in_backward import OptimizerInBackward
from lowtide.runtime.levers.single_update import parameters_of
from lowtide.runtime.levers.sliced_optimizer import TEMPORARIES, SlicedOptimizer
from lowtide.runtime.levers.split_layers import SplitLayers
from lowtide.runtime.online.eviction import LIBRARY_BYTES, SLACK_BYTES, Evictor, KeptModules, Refusals, StepTally
from lowtide.runtime.online.mode import OnlineMode
from lowtide.runtime.planned.mode import PlannedMode, PlannedRun, compile_script
from lowtide.runtime.planned.retained_graphs import RetainedGraphs, WriteMode
from lowtide.runtime.planned.timing import MATTERS_SHARE, Stopwatch
from lowtide.runtime.record.saved_tensors import SavedTensors
from lowtide.runtime.record.trace_recorder import OwnershipTracker, TraceRecorder
from lowtide.runtime.run_figures import POLICIES, Outcome, PlanFigures, StepFigures, Steps
from lowtide.runtime.storage.arguments import PLAIN_TYPES, written_by
from lowtide.runtime.storage.ledger import Ledger
from lowtide.runtime.storage.op_schema import OpInfo
from lowtide.runtime.storage.views import bytes_of
from lowtide.runtime.tensors import beneath_autograd, node_of, storages_of, tensors_in, with_gradients

CLOCKED = 1
"""Units that must have followed their recording before the next one is timed: the second board's pages are warm then."""
TRUSTED = 4
"""Units that must have followed their recording before one that needs nothing is not even watched."""
BACKWARDS = 3
"""Backwards (that build no graph of their own) after which a unit ends although handles are left."""
BACKWARDS_BEFORE_STEP = 64
"""The same, until an optimizer steps: an inner loop may go round many times beside a graph that is open."""
AGREED_UNITS = range(2, 10)
"""Units, counted from 1, at whose beginning ranks agree on one plan: every rank reaches them."""
REFUSED = 3
"""Steps within which a budget that cannot be held ends the script; later ones are only told of."""
TOLD_SECONDS = 60.0
"""Between two lines about steps over the budget, at least."""
AUTO_MARGIN = 0.05
"""Share of a CUDA device's free memory that ``auto`` leaves to fragmentation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the user asked for.

    Attributes:
        budget: bytes, a share, ``auto``, or None: no limit, only rescue from out-of-memory.
        keep: modules whose values are never dropped.
        plan: a plan loaded from a file.
        offload: whether values may be moved to the second board.
        allow: levers (:mod:`lowtide.base.lever_catalogue`) that may be used; exact ones are, where they are needed, without
            being named.
        without: levers that must not be used.
        refusal: makes what is raised when the budget cannot be held; the :class:`BudgetError` itself by default.
        steps: after which the script is ended; 0 for never.
        keep_going: whether the script goes on even where the first steps show that the budget cannot be held.
        on_step: called after each step, with its figures in place.
    """

    budget: Size | None
    keep: tuple[str, ...] = ()
    plan: Plan | None = None
    offload: bool = True
    allow: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()
    refusal: Callable[[BudgetError], BaseException] | None = None
    steps: int = 0
    keep_going: bool = False
    on_step: Callable[[], None] | None = None


@final
class Runtime:
    """One per process while a budget is in force; listens to the clock.

    Attributes:
        of_command: the one that ``lowtide run`` has begun in this process.
    """

    of_command: ClassVar[Runtime | None] = None

    def __init__(self, settings: Settings) -> None:
        """Install nothing yet."""
        self.settings = settings
        self.ledger = Ledger(self._counts)
        self.meter: Meter = self._meter()
        self.board = self._board_of(self.meter)
        self.evictor = Evictor(self.meter, self.ledger, self.board)
        self.evictor.exempt = KeptModules(settings.keep)
        self.evictor.moves = settings.offload
        self.evictor.on_unheld = self._unheld
        self.evictor.on_back = self._back
        self.evictor.on_anchored = self._anchored
        self.saver = SavedTensors(self.ledger, self.evictor)
        self.clock = PhaseTracker(self, ModeSensitiveBackward(self))
        self.full = OnlineMode(self.clock, self.ledger, self.evictor)
        self.saver.on_first = self._functional_begins
        self.stack = ModeStack()
        self.patches = PointerEscapes(self)
        self.asides = Bypass(self.stack, self.clock, self._run_region)
        self.unreached = Coverage(self.stack)
        self.updates = OptimizerInBackward(lambda: self.clock.phase, self._before_update)
        self.gradients = OffloadedGradients(self._put_gradient)
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._rounds = Rounds()
        self.clock.on_optimizer = self._optimizer_made
        self.slices = SlicedOptimizer(self._room)
        self.logits = DeferredLogits()
        self.pieces = SplitLayers()
        self.unit: Unit | None = None
        self.recordings = PlanCache()
        self.rises = PeakModel()
        self.budget_bytes = 0
        self.steps = Steps()
        self._crossings = BudgetCrossings()
        self.figures: PlanFigures | None = None
        self._told: tuple[Any, ...] = ()
        self._found: PlanFigures | None = None
        self._solved: tuple[Problem, Solution] | None = None
        self.refused: BudgetError | None = None
        self._evaluation_low = self._evaluation_high = 0
        self.resident = PersistentState()
        self._last_optimizer = 0
        self._last_lean: PlannedMode | None = None
        self._last_kind: UnitSignature | None = None
        self._excused = 0
        self._last_told = -math.inf
        self._units_a_step = 1
        self._owed = RetainedGraphs()
        self._owing = False
        self._between_bytes = self._evaluation_bytes = self._evaluation_from = 0
        self._share_peak = self._share_step = self._there_bytes = 0
        self._unseen_peak = self._step_peak = 0
        self._units = 0
        self._pid = os.getpid()
        self._active = False
        self._functional = False
        self.script_code_in_backward = False

    # --- on and off --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to watch; the full interception is on from here until the first plan.

        Raises:
            SizeError: if the budget is to be read off a device, and there is none.
        """
        if isinstance(self.settings.budget, Auto) and not torch.cuda.is_available():
            raise SizeError("auto reads the budget off a CUDA device, and there is none: give a size, as 6GiB or 50%")
        self._active = True
        self._measure_board()
        if not self.meter.exact:
            tell(
                "lowtide: the heap counter is not loaded (no compiler at installation, or not Linux): what operators take "
                "inside is known only from recorded steps, by torch's profiler; a first step may cross the budget"
            )
        tell_of_forks(self)
        optimizers = [o for o in gc.get_objects() if issubclass(type(o), torch.optim.Optimizer)]
        for optimizer in optimizers:
            self.clock.expect_optimizer(optimizer)
        self.clock.install()
        self.asides.install()
        self.patches.install()
        settings = self.settings
        self._optimizers.update(optimizers)
        if UPDATE in settings.allow - settings.without:
            self.updates.install(optimizers)
        elif GRADIENTS in settings.allow - settings.without:
            self.gradients.engage(optimizers)
        if SLICES not in settings.without and (settings.budget is not None or SLICES in settings.allow):
            self.slices.install()
        if LOSS in settings.allow - settings.without:
            self.logits.install()
        if SPLIT_OPS in settings.allow - settings.without:
            self.pieces.install()
        budget = self.settings.budget
        if isinstance(budget, int):
            self.budget_bytes = budget
            return_freed_memory(budget)
        elif isinstance(budget, Auto):
            self.budget_bytes = self._auto()
        self.evictor.limit_bytes = self.budget_bytes
        if isinstance(budget, Share):  # the first step has no budget, but no more than there is
            self._limit_to_what_is_there()
        self._open_step()
        self._watch_fully(None)
        self.clock.settle()

    def stop(self, *, over: bool = False) -> None:
        """Watch no more; handles that autograd still has stay good.

        Args:
            over: whether the script has ended with it.

        Raises:
            LeverError: if the script goes on where a lever has left it what it would not have had.
        """
        if not self._active:
            return
        if self.unit is not None:
            self._end_unit()
        if not over:
            self._let_go()
        self._active = False
        self.full.passive = True
        self.updates.remove()
        self.gradients.remove(over=over)
        self.slices.remove()
        self.pieces.remove()
        if LOSS in self.settings.allow:
            self.logits.remove()
        self.stack.take()
        self.clock.remove()
        self.patches.remove()
        self.asides.remove()
        if self._step_units and not self.clock.optimizers_seen:
            self._step_done = True
        if self._step_done or self._step_trains or (self._step_units and not self.steps):  # else no backward followed
            self._close_step()
        self.evictor.limit_bytes = 0
        self.meter.close()
        if not over:
            self.updates.check_left()

    def _let_go(self) -> None:
        """Nobody looks on from here: what the script may still ask for is made now, where there is memory for it."""
        with contextlib.suppress(RuntimeError, MemoryError):
            self.evictor.limit_bytes = 0
            self.evictor.before_unseen_writes()
            self._owed.hold_all()

    @property
    def plan(self) -> Plan | None:
        """The last unit's decisions by site; those that were given until there are any."""
        return self.settings.plan if self._solved is None else plan_of(*self._solved)

    def outcome(self) -> Outcome:
        """Figures of the run so far."""
        return Outcome(
            budget_bytes=self.budget_bytes,
            steps=tuple(self.steps),
            plan=self.figures,
            exact=self.meter.exact,
            asked=self.settings.budget is not None,
            of_first=isinstance(self.settings.budget, Share),
            excused=self._excused,
            units=self._units_a_step,
            share_step=self._share_step,
            share=budget.fraction if isinstance(budget := self.settings.budget, Share) else 0.0,
            unreached=self.unreached.reasons,
            unmet=self.evictor.exempt.unmet,
            levers=(
                *self.gradients.figures(),
                *self.updates.figures(),
                *self.slices.figures(),
                *(self.logits.figures() if LOSS in self.settings.allow else ()),
                *(self.pieces.figures() if SPLIT_OPS in self.settings.allow else ()),
            ),
        )

    def forked(self) -> None:
        """A child (a loader's worker) inherits the interpreter: it is not to be watched."""
        if self._active:
            self._active = False
            self.full.passive = True
            self.saver.keep_only = True
            with contextlib.suppress(AssertionError, RuntimeError):
                self.stack.take()

    def _meter(self) -> Meter:
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            return CudaMeter(torch.device("cuda", torch.cuda.current_device()))
        found = counters()
        if found is not None:
            return HeapMeter(found)
        return LedgerMeter(lambda: self.ledger.live_bytes)

    @staticmethod
    def _board_of(meter: Meter) -> FileTier | PinnedTier:
        """Where values of the meter's device may be moved."""
        return PinnedTier(meter.device) if isinstance(meter, CudaMeter) else FileTier()

    def _counts(self, storage: torch.UntypedStorage) -> bool:
        return self.meter.counts(storage)

    def _use_cuda(self, device: torch.device) -> None:
        """The model turned out to live on a CUDA device: count there."""
        self.meter = CudaMeter(device)
        self.board = self._board_of(self.meter)
        self.evictor.use(self.meter, self.board)
        self._measure_board()
        if isinstance(self.settings.budget, Auto):
            self.budget_bytes = self.evictor.limit_bytes = self._auto()
        elif isinstance(self.settings.budget, Share) and not self.budget_bytes:
            self._limit_to_what_is_there()

    def _limit_to_what_is_there(self) -> None:
        self._there_bytes = self.evictor.limit_bytes = self.meter.live() + available_bytes(self.meter.device)

    def _measure_board(self) -> None:
        """Time copies to and from a device while it has the most room, before the first step."""
        if isinstance(self.meter, CudaMeter):
            with self.meter.hidden():
                _ = self.evictor.bandwidth

    def _auto(self) -> int:
        free, _ = torch.cuda.mem_get_info()
        return int(free * (1 - AUTO_MARGIN)) + int(torch.cuda.memory_allocated())

    # --- what the clock tells ----------------------------------------------------------------------------------------

    def phase_begins(self, phase: Phase) -> None:
        """The units are told by what follows."""

    def root_begins(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """A module is called from outside any module."""
        if not self._active or os.getpid() != self._pid:
            return
        if not torch.is_grad_enabled():
            self._evaluation_begins()
            return
        if self.asides.transforming:
            self.unreached.note(TRANSFORM)
            return
        self.unreached.look(args, kwargs)
        self.resident.roots.add(module)
        self.updates.root_begins()
        if isinstance(self.meter, (HeapMeter, LedgerMeter)) and torch.cuda.is_initialized():
            device = next((p.device for p in module.parameters() if p.is_cuda), None)
            if device is not None:
                self._use_cuda(device)
        turn = 0 if self._step_done else self._step_units
        kind = kind_of(module, args, kwargs, engaged=self._engaged, after=self._after(), turn=turn)
        if self.unit is not None:
            if self._is_over(self.unit, kind):
                self._end_unit()
            elif self._is_stale(self.unit, kind):
                self._abandon_unit()
            else:
                self._goes_on(self.unit, kind)
                return
        self._begin_unit(kind)

    def _goes_on(self, unit: Unit, kind: UnitSignature) -> None:
        """A unit has another root call."""
        unit.calls.append(kind)
        if unit.roomy and not self._has_room(unit):
            unit.roomy = False
            self._run_fully(unit, None, record=False)
        lean = unit.lean if unit.smaller else None
        if lean is not None and not lean.lost and not self._follows(unit):
            lean.leave()

    def _follows(self, unit: Unit) -> bool:
        """Whether the root calls of a unit so far are those of the recorded one, but for smaller sizes."""
        assert unit.entry is not None
        calls = unit.entry.calls
        pairs = zip(unit.calls, calls, strict=False)
        return len(unit.calls) <= len(calls) and all(mine == other or is_smaller(mine, other) for mine, other in pairs)

    def _has_room(self, unit: Unit) -> bool:
        """Whether no unit with such root calls rises above the budget, by all that is known."""
        known = self.budget_bytes and self.meter.exact
        unsteady = self.recordings.is_wild(unit.kind)
        most = self.rises.most(unit.calls, unit.gradient_bytes, unsteady=unsteady) if known else None
        return most is not None and unit.base_bytes + unit.left.bytes + most <= self.budget_bytes

    def _after(self) -> int:
        return self._last_optimizer if len(self.resident.optimizers) > 1 else 0

    def root_ends(self, result: Any) -> None:
        """A root call returned."""
        if not torch.is_grad_enabled():
            self._evaluation_ends()
        elif self.unit is not None:
            plain = [t for t in tensors_in(result) if type(t) in PLAIN_TYPES]  # of others `grad_fn` may be costly
            self.unit.outputs += [weakref.ref(t) for t in plain if node_of(t) is not None]

    def _evaluation_begins(self) -> None:
        """A model is called without gradients: if that took more than there is room for, what training holds makes way."""
        known = self._evaluation_bytes - self._evaluation_from
        if self.budget_bytes and self.unit is None and self.saver.outstanding > 0 and known > 0:
            with beneath_autograd():
                self.evictor.room_for(known)
        self._evaluation_low = self.meter.live() - self._left().there_bytes
        self._evaluation_high = self.meter.span_peak()

    def _evaluation_ends(self) -> None:
        """That call returned: what it took counts for the plain peak and for the floor, as no plan lowers it."""
        if not self._active or self.unit is not None:  # else it is a part of the unit that is recorded
            return
        highest = self.meter.span_peak()
        if highest > self._evaluation_high and highest > self._evaluation_bytes:
            self._evaluation_bytes, self._evaluation_from = highest, self._evaluation_low
            if self.figures is not None:
                self.figures = raised(self.figures, highest)

    def called_elsewhere(self, module: torch.nn.Module) -> None:
        """A module is called in another thread."""
        self.unreached.elsewhere(module)

    def _is_over(self, unit: Unit, kind: UnitSignature) -> bool:
        """Whether a unit is over: its optimizer stepped and only a retained graph is left, or its module is called again."""
        anew = kind.call == unit.kind.call
        if not unit.consumed or not (unit.stepped or (anew and not self.clock.optimizers_seen)):
            return False
        if unit.lean is not None and not unit.lean.lost:
            return unit.backwards >= len(unit.lean.script.backwards)
        return anew or self._is_retained(unit)

    def _is_retained(self, unit: Unit) -> bool:
        """Whether a backward has asked for all that a unit saved and that is still there."""
        return unit.recorder is None or not self.saver.awaited

    def _is_stale(self, unit: Unit, kind: UnitSignature) -> bool:
        """Whether the unit that runs was a forward that no backward will follow."""
        if unit.backwards:
            return False
        if unit.lean is not None and not unit.lean.lost:
            return bool(kind == unit.kind and unit.lean.at == len(unit.lean.script.funcs) - 1)
        if self.saver.outstanding:
            return False
        if kind == unit.kind:
            return True
        unwatched = unit.lean is None and unit.recorder is None and self.meter.exact
        if unwatched and not near(self.meter.live(), unit.base_bytes + unit.left.bytes, unit.base_bytes):
            return False  # its graph is there, though what the model returned is not
        return not any(output() is not None for output in unit.outputs)

    def _functional_begins(self) -> Callable[[torch.Tensor], Any] | None:
        """Autograd saves something outside any module and any unit: a script of plain functions; who packs instead."""
        if not self._active or self.unit is not None:
            return None
        if not self._is_outside():
            return None
        self._functional = True
        self._begin_unit(UnitSignature((), engaged=self._engaged, after=self._after()))
        unit: Unit | None = self.unit
        return None if unit is None or unit.lean is None else unit.lean.pack

    def _is_outside(self) -> bool:
        """Whether what runs is part of no module's call and of no phase of a step."""
        return not self.clock.depth and self.clock.phase is Phase.DATA

    def _run_region(self, region: Any, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A compiled region runs, whose operators are not seen: while the policy on line holds the budget, it makes room."""
        self.unreached.note(COMPILED)
        begins = self._step_done or not self._step_trains  # else it is a later part of the step: its update, perhaps
        if self._active and self.unit is None and begins and torch.is_grad_enabled() and self._is_outside():
            self._begin_unit(UnitSignature((), engaged=self._engaged, after=self._after()))
        if not self._holds_on_line():
            return run(*args, **kwargs)
        with self.evictor.around_unseen(region, sum(t.nbytes for t in tensors_in((args, kwargs)))):
            if self.saver.recorder is not None:
                self.saver.recorder.begin_window()  # what was let go for it is not the plain run's
            return run(*args, **kwargs)

    @contextlib.contextmanager
    def unseen(self, what: Unseen) -> Iterator[None]:
        """A derivative runs without the mode: room is made for it, too."""
        if not self._holds_on_line():
            yield
            return
        with self.evictor.leaving(what.most_bytes):
            if self.saver.recorder is not None:
                self.saver.recorder.begin_window()
            yield

    def _holds_on_line(self) -> bool:
        return self._active and bool(self.budget_bytes) and self.stack.mode is self.full and not self.full.passive

    def backward_begins(self) -> None:
        """Autograd's engine is about to run."""
        if not self._active:
            return
        own_code = self.script_code_in_backward or self.resident.has_hooks(self._is_ours)
        self.gradients.follow(self._optimizers)
        with self.updates.aside():
            self._backward_begins(own_code=own_code)
        lean = None if self.unit is None else self.unit.lean
        planned = lean is not None and not lean.lost and self.stack.mode is None
        self.updates.backward_begins(own_code=own_code, planned=planned)

    @property
    def _engaged(self) -> bool:
        """Whether a lever takes gradients away as they come, which makes another kind of unit."""
        return self.gradients.engaged or self.updates.engaged

    def _is_ours(self, hook: Any) -> bool:
        return self.updates.is_ours(hook) or self.gradients.is_ours(hook)

    def _optimizer_made(self, optimizer: Any) -> None:
        self._optimizers.add(optimizer)
        self._rounds.made(optimizer)
        self.updates.optimizer_made(optimizer)

    def _put_gradient(self, storage: torch.UntypedStorage) -> Ticket | None:
        """Put a gradient on the second board; None where it stays."""
        if not (self.evictor.moves and self.meter.counts(storage)):
            return None
        start = time.perf_counter()
        try:
            ticket = self.board.put(storage)
        except OSError:  # no room there
            return None
        self.evictor.tally.offload_seconds += time.perf_counter() - start
        self.evictor.tally.offloaded_bytes += storage.nbytes()
        return ticket

    def _can_move_gradients(self, figures: PlanFigures, unit: Unit, entry: RecordedUnit) -> bool:
        """Whether the lever that moves gradients is left to lower the peak, and may lower it by enough.

        The lever offloads the gradients, and avoids the temporaries of an update of all parameters at once. Before the first
        backward only gradients that existed when the unit began can be offloaded: while the run may still be refused, the
        lever is not engaged where that is too little.
        """
        if self._engaged or GRADIENTS in self.settings.without or not self.evictor.moves:
            return False
        parameters = {id(p): p for optimizer in self._optimizers for p in parameters_of(optimizer)}
        most = (1 + TEMPORARIES) * sum(bytes_of(p) for p in parameters.values())
        lowest = max(figures.resident_bytes, figures.bound_peak_bytes - most)
        if self._may_refuse:
            first = entry.backward_starts[0] if entry.backward_starts else len(entry.trace.events)
            forced = int(forced_live(entry.problem)[:first].max(initial=0)) + self._certain_shift(entry, unit)
            lowest = max(lowest, forced - unit.gradient_bytes)
        return lowest <= self.budget_bytes and self.gradients.can_engage(self._optimizers)

    def _backward_begins(self, *, own_code: bool) -> None:
        followed = self.clock.differentiable
        self.saver.keep_only = not followed
        self._step_trains = True
        unit = self.unit
        if unit is None:
            return
        if followed and unit.lean is None and unit.recorder is None and self.settings.budget is not None:
            self.recordings.surprised(unit.kind, decidedly=True)  # it was left alone because nothing like this came before
            if unit.roomy:
                self.rises.broke(unit.calls)
            unit.roomy = False
            self._run_fully(unit, None, record=False)
        if unit.recorder is not None:
            unit.recorder.begin_backward(followed=followed)
            unit.starts.append(len(unit.recorder.events))
            unit.retains.append(self.clock.retains)
        if unit.lean is not None and not unit.lean.lost:
            self._check_lean(unit, unit.lean, followed=followed, own_code=own_code)
        unit.backwards += 1
        unit.consumed += not (followed or is_applying())

    def _check_lean(self, unit: Unit, lean: PlannedMode, *, followed: bool, own_code: bool) -> None:
        """Before a planned backward: is memory where the plan says it is?"""
        script = lean.script
        if not followed:
            lean.last_moves()
        expected = script.backwards[unit.backwards] if unit.backwards < len(script.backwards) else (-1, 0)
        assert unit.entry is not None
        above = self.meter.live() - unit.base_bytes - unit.entry.left_besides(unit)
        stays = self.clock.retains and not (*unit.entry.retains[unit.backwards:], False)[0]  # what is not in the plan
        if lean.at == expected[0] and not (lean.grown or stays) and above <= expected[1] + TOLERANCE_BYTES:
            lean.prune()
            if followed:
                return
            self.stack.take()
            if own_code:
                self.stack.put(WriteMode(lean, self._owed), self.saver.pack, _unpack, within=True)
        else:
            lean.leave()

    def exposing(self, tensor: torch.Tensor, *, shows: bool) -> None:
        """Somebody asks for a tensor's address, or is given its memory (``shows``), and may write there unseen."""
        recorder = self.saver.recorder
        value = None if recorder is None or self.full.passive else self.ledger.find(tensor.untyped_storage())
        if value is not None:
            assert recorder is not None
            if shows:
                self.evictor.exposed(value)
            value.tainted = True
            recorder.taint(value)
        if self.gradients.engaged:
            self.gradients.exposed(tensor.untyped_storage())
        if shows and self._active:
            self._show(tensor)

    def _show(self, tensor: torch.Tensor) -> None:
        """What the replays of planned units would read of a tensor is made now."""
        lean = None if self.unit is None else self.unit.lean
        following = lean is not None and not lean.lost
        if not following and not self._owed.left():
            return
        with self.updates.aside():
            self._owed.will_write(tensor)
            if lean is not None and following:
                lean.will_write(tensor)
                lean.expose(tensor)

    def _before_update(self, optimizer: Any, parameter: torch.Tensor) -> None:
        """A parameter is about to be updated within the backward."""
        self.resident.optimizers.add(optimizer)  # its states are born here, before its own step was seen
        unit = self.unit
        if unit is not None and unit.lean is not None and not unit.lean.lost:
            unit.lean.will_write(parameter)
        self._tell_owed((parameter,))

    def _room(self) -> int | None:
        """Bytes below the budget; None where there is none."""
        return self.budget_bytes - self.meter.live() if self.budget_bytes else None

    def backward_ends(self) -> None:
        """Autograd's engine returned, or raised."""
        if not self._active:
            return
        with self.updates.aside():
            self._backward_ends()
        self.updates.backward_ends()

    def _backward_ends(self) -> None:
        self.saver.keep_only = False
        unit = self.unit
        if unit is None:
            if self._last_kind is not None and self.meter.exact:  # perhaps once more over a graph that was retained
                self._learn_crossing(self._last_kind, self.meter.op_peak())
            self._watch_owed()
            return
        lean = unit.lean
        if lean is not None and not lean.lost and unit.backwards < len(lean.script.backwards):
            if self.clock.differentiable:
                lean.prune()
            else:
                self._follow_again(lean)
            return
        if is_applying():
            return
        owes = self.saver.outstanding > 0 or (lean is not None and lean.lost and lean.owes())
        within = self.clock.open > 0 and not unit.stepped  # of a module: its own graph, too, is still to be asked for
        if lean is None and unit.recorder is None:  # nobody counts what it still has
            owes = within if unit.entry is None else unit.backwards < len(unit.entry.backward_starts)
        before_step = not unit.stepped and (self.clock.open > 0 or self.clock.optimizers_seen)
        if not owes or unit.consumed >= (BACKWARDS_BEFORE_STEP if before_step else BACKWARDS):
            self._end_unit()
            if self.clock.depth:
                self.clock.begin_anew()

    def _follow_again(self, lean: PlannedMode) -> None:
        """A planned unit goes on after something that was none of its operators."""
        if self.stack.mode is not lean and not self.stack.put(lean, lean.pack, _unpack):
            lean.hold_all()

    def optimizer_begins(self, optimizer: Any) -> None:
        """An optimizer is about to step."""
        self.resident.optimizers.add(optimizer)
        self._optimizers.add(optimizer)
        self._last_optimizer = id(optimizer)
        self.updates.optimizer_begins(optimizer, closure=self.clock.closure)
        if self.clock.phase is not Phase.BACKWARD:  # a mode that is taken off within the engine is on again at its next node
            self._owed.updating = not self.clock.closure
            self.full.updating = not (self.clock.closure or self.saver.awaited)
            self._guard_update()
        if not isinstance(self.stack.mode, OnlineMode):
            self._writes_unseen()
        self.gradients.optimizer_begins(optimizer, closure=self.clock.closure)

    def _guard_update(self) -> None:
        """An optimizer steps beside a plan: its operators are no unit's, but may write to what replays read."""
        lean = None if self.unit is None else self.unit.lean
        following = lean is not None and not lean.lost
        if following or isinstance(self.stack.mode, WriteMode):
            self.stack.take()
            guards = (lean, self._owed) if lean is not None and following else (self._owed,)
            if self.stack.mode is None and (following or self._owed.left()):
                self.stack.put_mode(WriteMode(*guards), within=True)

    def _tell_owed(self, written: Iterable[torch.Tensor]) -> None:
        """Tensors are about to be written where no mode sees it."""
        if self._owed.left():
            for tensor in written:
                self._owed.will_write(tensor)

    def optimizer_ends(self, optimizer: Any) -> None:
        """An optimizer stepped (perhaps from a hook within the backward, or in a compiled region)."""
        self.resident.optimizers.add(optimizer)
        self._step_done |= self._rounds.stepped(optimizer) > 0
        self.updates.optimizer_ends(optimizer)
        self.gradients.optimizer_ends(optimizer)
        unit = self.unit
        if self.clock.phase is Phase.BACKWARD:
            return
        self._owed.updating = self.full.updating = False
        if unit is not None:
            unit.stepped = True
        if isinstance(self.stack.mode, WriteMode):
            self.stack.take()
        following = unit is not None and unit.lean is not None and not unit.lean.lost
        if unit is not None and unit.consumed and not unit.kind.call and not following and self._is_retained(unit):
            self._end_unit()  # no module is called that would tell where the next one begins
        elif unit is not None and unit.lean is not None and following:
            self._follow_again(unit.lean)
        else:
            self._watch_owed()

    # --- units -------------------------------------------------------------------------------------------------------

    def _begin_unit(self, kind: UnitSignature) -> None:
        highest = self._end_span()
        if self._step_done or (self._step_units and not self.clock.optimizers_seen):
            self._close_step()
            self._open_step()
            if self.settings.steps and len(self.steps) >= self.settings.steps:
                raise StepLimitReached
        self._step_units += 1
        self._units += 1
        self._owed.updating = self.full.updating = False  # an optimizer may have raised
        if isinstance(self.meter, LedgerMeter):
            self._meet_long_lived()
        self._learn_of_retained(highest)
        left = self._left()
        base = self.meter.live() - left.there_bytes  # it goes when the script lets go of it, at the latest within the unit
        between = base if self._owing else max(highest, base)  # else bytes of our making
        self._between_bytes = max(between if self._units > 1 else 0, self._evaluation_bytes)
        self.meter.reset_op_peak()
        gradients, times = self.resident.gradient_bytes(), self.evictor.times
        self.unit = unit = Unit(kind, base, left, gradients, "online", calls=[kind], times=times)
        self._resolve_share(unit)
        if not self.budget_bytes and self.settings.budget is None:
            self._run_fully(unit, None, record=False)
            return
        entry = self.recordings.nearest(kind, base)
        if self._units in AGREED_UNITS and plan_consensus.wanted():
            self._agree(entry, unit)
        if entry is None:
            self._check_resident()
            self._run_unknown(unit)
        else:
            self._run_known(unit, entry)

    def _run_known(self, unit: Unit, entry: RecordedUnit) -> None:
        """A unit of this kind was recorded: follow its plan, or refuse."""
        self.rises.familiar()
        kind, base = unit.kind, unit.base_bytes
        shift = entry.shift(unit)
        solution = self._solve(entry, shift)
        doubtful = False
        for perhaps in entry.lower_shifts(unit)[: 1 if self._crossings.any else 2]:
            if solution.state is None and perhaps < shift:
                doubtful, shift, solution = True, perhaps, self._solve(entry, perhaps)
        figures = self._tell_figures(unit, entry, solution, shift)
        refused = (
            bool(self.budget_bytes)
            and solution.state is None
            and max(figures.bound_peak_bytes, figures.lowest_peak_bytes) > self.budget_bytes
            and self._crossings.mostly(kind, at_least=CROSSED if entry.left.bytes else 0)
        )
        worn = self.recordings.is_worn(kind)
        warm = self.recordings.is_warm(kind) or entry.followed > 0
        proven = bool(self.budget_bytes) and self._cannot_be_held(figures, warm=warm)
        likely_floor = max(figures.bound_peak_bytes, solution.bound.peak_bytes + entry.lower_shifts(unit)[0])
        likely = bool(self.budget_bytes) and solution.state is None and likely_floor > self.budget_bytes
        if (refused or proven or likely) and self._can_move_gradients(figures, unit, entry):
            self.gradients.engage(self._optimizers)
            if len(self.steps) < REFUSED:
                self._excused = len(self.steps)
            unit.kind = replace(kind, engaged=True)
            self._run_fully(unit, None)
            return
        if (refused or proven) and self._may_refuse:
            self._refuse(figures, proven=proven and not refused)
        self._solved = entry.problem, solution
        known = self.recordings.has(kind) and not doubtful
        exact = known and near(entry.trace.base_bytes, base, entry.problem.plain_peak)
        if self.recordings.is_wild(kind) and self._has_room(unit):
            self._run_roomy(unit)
        elif solution.state is None:
            self._crossings.without_plan(kind)
            self._run_fully(unit, None, record=not worn and (likely or not exact))
        elif (exact or worn) and not (doubtful or self.recordings.is_wild(kind)):
            self._run_lean(unit, entry, solution)
        else:
            self._run_fully(unit, entry, record=not worn or doubtful)

    def _tell_figures(self, unit: Unit, entry: RecordedUnit, solution: Solution, shift: int) -> PlanFigures:
        told = (solution.state, solution.status, entry, shift, unit.base_bytes, self._between_bytes)
        if self._found is None or solution.state is None or not _same(told, self._told):
            self._told = told
            self._found = figures_of(
                entry.problem, solution, between_bytes=self._between_bytes, resident_bytes=self.resident.bytes(),
                shift_bytes=shift, likely_bytes=self._likely_shift(entry, unit),
                certain_bytes=self._certain_shift(entry, unit),
            )
        higher = (self.figures and self.figures.predicted_peak_bytes) or 0
        if self._step_units == 1 or (self._found.predicted_peak_bytes or self.budget_bytes) >= higher:
            self.figures = self._found  # of a step's units, those of the highest
        return self._found

    def _left(self) -> RetainedBytes:
        """What graphs of former units still hold."""
        planned = 0 if self._last_lean is None else self._last_lean.left_bytes()
        if self.saver.outstanding <= 0:
            return RetainedBytes(planned)
        return RetainedBytes(planned + self.ledger.saved_bytes(), self.evictor.away_bytes(), self.evictor.has_dropped())

    def _solve(self, entry: RecordedUnit, shift: int) -> Solution:
        solution = self._within(entry, self._room_for(entry, shift))
        agreed = entry.agreed
        if agreed is None or agreed.timeline.peak_bytes > solution.budget_bytes:
            return solution
        return replace(solution, state=agreed)

    def _room_for(self, entry: RecordedUnit, shift: int) -> int:
        """What a plan made on a recording's base may reach, for a unit that lies higher to stay within the budget."""
        return (self.budget_bytes or entry.problem.plain_peak + abs(shift) + 1) - shift

    def _within(self, entry: RecordedUnit, room: int) -> Solution:
        solution = entry.front.at(room - SLACK_BYTES)
        return entry.front.at(room) if solution.state is None else solution

    def _agree(self, entry: RecordedUnit | None, unit: Unit) -> None:
        """All ranks take part, whether they have a plan or not: these are collectives."""
        room = plan_consensus.on_room(None if entry is None else self._room_for(entry, entry.shift(unit)))
        mine = None if entry is None or room is None else self._within(entry, room)
        agreed = plan_consensus.on_plan(None if entry is None else entry.problem, mine)
        if entry is not None:
            entry.agreed = agreed

    def _run_fully(self, unit: Unit, entry: RecordedUnit | None, *, record: bool = True) -> None:
        """Hold the budget on line; the plan made for another base says what is dropped in the first place."""
        plan = self.plan if entry is not None or self.settings.plan is not None else None
        sites = dropped_sites(plan) if plan is not None else frozenset()
        self.evictor.planned = (lambda site, slot: (site.module, site.op, site.nth, slot) in sites) if sites else None
        unit.policy = "planned" if sites else "online"
        self._note_policy(unit.policy)
        if self.saver.outstanding <= 0:
            self.ledger.forget()
        unit.recorder, unit.keep = self._recorder(unit, notes=record), record
        self._watch_fully(unit.recorder)

    def _run_unknown(self, unit: Unit) -> None:
        """No unit of this kind was recorded: one that is smaller than what fits runs as it is."""
        if self._has_room(unit):
            self._run_roomy(unit)
            return
        follows = self.evictor.moves and self.meter.capped and self.rises.may_follow(unit.kind)
        larger = self._larger(unit) if follows else None
        if larger is not None:
            unit.smaller = True
            self._run_lean(unit, *larger)
        else:
            self._run_fully(unit, None, record=self.rises.worth_recording(unit.kind) or follows)

    def _run_roomy(self, unit: Unit) -> None:
        """No plan is needed to hold the budget, nor any interception."""
        unit.roomy = True
        self._note_policy("plain")
        self.clock.detailed = False
        self._watch_nothing()

    def _larger(self, unit: Unit) -> tuple[RecordedUnit, Solution] | None:
        """The recording of the least of all larger units, on no lower base, whose plan holds this one's bytes, too."""
        entry = self.recordings.larger(unit.kind, unit.base_bytes)
        if entry is None:
            return None
        room = self._room_for(entry, entry.shift(unit)) - int(SMALLER_SHARE * max(0, self.budget_bytes - unit.base_bytes))
        solution = entry.for_smaller
        if solution is None or solution.state is None or solution.state.timeline.peak_bytes > room:
            solution = entry.for_smaller = self._within(entry, room)
        if solution.state is None:
            return None
        self._solved = entry.problem, solution
        self._tell_figures(unit, entry, solution, entry.shift(unit))
        return entry, solution

    def _run_lean(self, unit: Unit, entry: RecordedUnit, solution: Solution) -> None:
        assert solution.state is not None
        unit.policy = "planned" if solution.state.decisions else "plain"
        unit.entry, unit.state = entry, solution.state
        shift = entry.shift(unit)
        unit.predicted_bytes = solution.state.timeline.peak_bytes + shift
        unit.certain = shift == unit.base_bytes - entry.trace.base_bytes
        self._note_policy(unit.policy)
        self.clock.detailed = False
        self.stack.take()
        trusted = entry.followed >= TRUSTED and not unit.smaller
        if not solution.state.decisions and trusted and not self.recordings.is_surprising(unit.kind):
            self._watch_nothing()
            return
        if entry.compiled is not None and entry.compiled[0] is solution.state:
            script = entry.compiled[1]
        else:
            script = compile_script(
                entry.problem, solution.state, entry.funcs, entry.packs, entry.backward_starts, overlaps=self.board.overlaps
            )
            entry.compiled = solution.state, script
        clocked = entry.followed == CLOCKED and solution.state.decisions and not (self.board.overlaps or unit.smaller)
        run = PlannedRun(script, self.evictor.tally, self.board, Stopwatch() if clocked else None)
        cap = None
        if self.budget_bytes and self.meter.capped and self.evictor.moves:
            cap = functools.partial(self._cap, self.budget_bytes - SLACK_BYTES if unit.smaller else self.budget_bytes)
        unit.lean = PlannedMode(
            script, run, self._lost, self.saver.pack, self._out_of_memory(), self._writes, cap, refusals=Refusals(self.meter),
            smaller=unit.smaller,
        )
        if not self.stack.put(unit.lean, unit.lean.pack, _unpack):
            unit.lean = None

    def _cap(self, limit_bytes: int, on: bool) -> None:
        self.meter.cap(max(limit_bytes, 1) if on else 0)

    def _writes_unseen(self) -> None:
        """What handles of former units stand for must not depend on what is about to be written."""
        if self.saver.outstanding > 0:
            self.evictor.before_unseen_writes()

    def _writes(self, info: OpInfo, args: Any, kwargs: Any) -> None:
        """A planned operator is about to write in place."""
        self._writes_unseen()
        self._tell_owed(tensor for tensor, _ in written_by(info, args, kwargs))

    def _watch_nothing(self) -> None:
        """No interception is needed but for what former units saved."""
        self.stack.take()
        self._writes_unseen()
        self._watch_owed()

    def _watch_owed(self) -> None:
        """Where nothing else is on: look on while graphs of former planned units are retained."""
        owed = self._owed.left()
        if self.stack.mode is None and owed and not self.stack.put_mode(WriteMode(self._owed)):
            self._owed.hold_all()
        elif isinstance(self.stack.mode, WriteMode) and not owed:
            self.stack.take()

    def _out_of_memory(self) -> Callable[[BaseException], bool]:
        """Tells whether an error, from now on, means that memory ran out."""
        denied = self.meter.denied()
        return lambda error: self.evictor.is_out_of_memory(error, denied)

    def _lost(self) -> OnlineMode:
        """A planned forward left its recording: hold the budget on line for the rest of the unit."""
        self._note_policy("online")
        assert self.unit is not None
        self.recordings.surprised(self.unit.kind)
        assert self.unit.lean is not None
        self.evictor.keeps = self.unit.lean.keeps
        self.clock.detailed = True
        recorder = self._recorder(self.unit, notes=False)  # half a unit
        self.full.begin(recorder, remember=True)
        self.full.guards = (self.unit.lean, self._owed)
        for storage in self.unit.lean.exposed():
            (self.ledger.find(storage) or self.ledger.enter(storage, None)).tainted = True
        self.saver.recorder = recorder
        return self.full

    def _recorder(self, unit: Unit, *, notes: bool) -> TraceRecorder:
        """A unit's recorder: one that notes events where a trace is wanted, or where the meter sums what is noted."""
        return (TraceRecorder if notes or not self.meter.exact else OwnershipTracker)(self.meter, unit.base_bytes)

    def _watch_fully(self, recorder: TraceRecorder | None) -> None:
        self.clock.detailed = True
        self.full.begin(recorder, remember=self.unit is not None)
        self.full.guards = (self._owed,)
        self.saver.recorder = recorder
        self.evictor.keeps = []
        if self.stack.mode is not self.full:
            self.stack.put(self.full, self.saver.pack, _unpack)

    def _abandon_unit(self) -> None:
        """A forward that led to no backward so far."""
        unit, self.unit = self.unit, None
        if unit is not None and unit.lean is not None:
            unit.lean.let_go()
            self._owed.add(unit.lean)
        if self.saver.recorder is not None:
            self.saver.recorder.close()
        self._end_span()

    def _end_unit(self) -> None:
        unit, self.unit = self.unit, None
        assert unit is not None
        recorder = unit.recorder
        if recorder is not None:
            if unit.keep and recorder.backward_event is not None and recorder.saves:
                self._keep_recording(unit, recorder)
            elif self.meter.exact and self.evictor.times == unit.times and self.recordings.is_wild(unit.kind):
                self._note_rise(unit)
        elif unit.predicted_bytes is not None and unit.entry is not None:
            self._verify(unit, unit.entry)
        elif unit.roomy:
            self._note_rise(unit)
        if unit.lean is not None:
            self.stack.take()
            unit.lean.let_go()
            self._owed.add(unit.lean)
        self._last_lean, unit.lean = unit.lean, None
        self._last_kind = unit.kind
        self._owing = self._left().bytes > 0
        self.full.begin(None, remember=False)
        watched, self.saver.recorder = self.saver.recorder, None
        if watched is not None:
            watched.close()
            if self.saver.outstanding <= 0:
                self.ledger.forget()
        if self._functional and self.stack.mode is None:
            self._watch_fully(None)
        else:
            self._watch_owed()
        self.meter.reset_op_peak()
        self._end_span()

    def _keep_recording(self, unit: Unit, recorder: TraceRecorder) -> None:
        trace = recorder.finish(self.resident.bytes(), movable=True)
        problem = Problem(
            trace=trace,
            base_bytes=trace.base_bytes,
            bandwidth=self.evictor.bandwidth,
            pinned=frozenset(recorder.tainted),
        )
        if self._units > 1:  # the first unit of all is a cold one
            self.rises.note(unit.calls, problem.plain_peak - problem.base_bytes, unit.gradient_bytes)
        elif self.evictor.exempt.unmet:
            names = ", ".join(self.evictor.exempt.unmet)
            tell(f"lowtide: --keep: no module of the first step has the path {names}; paths are like blocks.0")
        states = frozenset(self.resident.states())
        entry = RecordedUnit(
            recorder.funcs, recorder.packs, unit.starts, Front(problem), unit.left, unit.gradient_bytes, states,
            tuple(unit.calls), tuple(unit.retains), recorder.leaving_bytes, bool(recorder.flights),
        )
        self.recordings.keep(unit.kind, entry)

    def _note_rise(self, unit: Unit) -> None:
        """Nothing of a unit was let go."""
        peak = max(self.meter.op_peak(), self.meter.span_peak())  # where operators are looked at, one by one, and all of them
        self.rises.note(unit.calls, peak - unit.base_bytes - unit.left.bytes, unit.gradient_bytes)
        if unit.roomy and peak > self.budget_bytes:
            self.rises.broke(unit.calls)

    def _verify(self, unit: Unit, entry: RecordedUnit) -> None:
        """After a planned unit: was its peak what the plan said?"""
        measured, predicted = self.meter.op_peak(), unit.predicted_bytes
        assert predicted is not None
        if not self.meter.exact:  # planned operators pass unseen by the ledger: the prediction is all there is
            self._unseen_peak = max(self._unseen_peak, predicted)
            entry.followed += 1
            return
        lost = unit.lean is not None and unit.lean.lost
        self._learn_crossing(unit.kind, max(measured, self.meter.span_peak()) if lost else measured)
        if unit.smaller:
            if lost or (measured > predicted and not near(measured, predicted, predicted)):
                self.rises.strayed(unit.kind)
            return
        # A graph left over from a planned unit is smaller; what was not there at the beginning may never have come.
        less = (bool(entry.left.bytes) or entry.collective or not unit.certain) and measured < predicted
        if not lost and (less or near(measured, predicted, predicted)):
            entry.followed += 1
            if unit.state is not None and unit.lean is not None and unit.lean.run.stopwatch is not None:
                self._retime(entry, unit.state, unit.lean.run.stopwatch)
            return
        self.recordings.missed(unit.kind, entry)

    def _learn_crossing(self, kind: UnitSignature, peak: int) -> None:
        """If a planned unit's peak exceeded the budget, note a surprise: units of its kind soon stop following the plan."""
        if self.budget_bytes and peak > self.budget_bytes:
            self.recordings.surprised(kind, decidedly=not near(peak, self.budget_bytes, peak))

    def _learn_of_retained(self, peak: int) -> None:
        """Hold the peak between two units against the previous unit's kind, if its dropped values had to be recomputed early.

        That happens where the script is about to overwrite what their replays read.
        """
        if self._last_kind is not None and self._last_lean is not None and self._last_lean.forced and self.meter.exact:
            self._learn_crossing(self._last_kind, peak)

    def _retime(self, entry: RecordedUnit, state: State, stopwatch: Stopwatch) -> None:
        """Plan with the seconds of a warm step, where they say something else than those that were recorded."""
        self.evictor.learn(stopwatch.bandwidth(self.evictor.bandwidth))
        problem = stopwatch.problem(entry.problem, entry.funcs)
        again = State(state.decisions, play(problem, state.decisions))
        change = abs(again.timeline.extra_seconds - state.timeline.extra_seconds)
        if change > MATTERS_SHARE * problem.seconds:
            entry.front = entry.front.retimed(problem, again)

    # --- budget ------------------------------------------------------------------------------------------------------

    def _resolve_share(self, unit: Unit) -> None:
        """Turn a share into bytes once a plain peak is known, and again when a larger one is."""
        budget = self.settings.budget
        if not isinstance(budget, Share):
            return
        entry = self.recordings.nearest(unit.kind, unit.base_bytes) or next(iter(self.recordings), None)
        if entry is None:
            return
        resident = self.resident.bytes()
        peak = max(entry.problem.plain_peak + self._likely_shift(entry, unit), self._between_bytes)
        if self.budget_bytes and peak <= self._share_peak and len(self.steps) != 1:
            return
        larger = bool(self.budget_bytes) and peak > self._share_peak * (1 + TOLERANCE_SHARE)
        self._share_peak = max(peak, self._share_peak)
        asked = int(resident + budget.fraction * max(0, self._share_peak - resident))
        there = self._there_bytes  # as it was before the first step: what the process has freed since it may keep
        self.budget_bytes = self.evictor.limit_bytes = min(asked, there)
        return_freed_memory(self.budget_bytes)
        if asked > there:
            tell(f"lowtide: {budget.fraction:.0%} is {format_bytes(asked)}, but no more than {format_bytes(there)} is there")
        if larger and len(self.steps) > 1:
            self._share_step = len(self.steps)
            now, plain = format_bytes(self.budget_bytes), format_bytes(self._share_peak)
            tell(f"lowtide: {budget.fraction:.0%} is {now} from step {len(self.steps)} on, which takes {plain} plain")

    def _likely_shift(self, entry: RecordedUnit, unit: Unit) -> int:
        """How much higher than the recorded unit's the peak of another one lies: what may go within it is not counted."""
        made_anew = max(0, entry.gradient_bytes - unit.gradient_bytes)
        return min(entry.shift(unit), self._certain_shift(entry, unit) + made_anew)

    def _certain_shift(self, entry: RecordedUnit, unit: Unit) -> int:
        """How much higher than the recorded unit another one lies for certain: by what became optimizer state since."""
        grown = sum(size for state, size in self.resident.states().items() if state not in entry.states)
        return min(unit.base_bytes - entry.trace.base_bytes, grown - entry.left.bytes)

    def _meet_long_lived(self) -> None:
        """Enter what planned steps left behind unseen: their gradients, the first states."""
        for storage in storages_of(with_gradients(self.resident.tensors())).values():
            with contextlib.suppress(RuntimeError):  # a wrapper's storage has no address
                if storage.device.type == "cpu" and self.ledger.find(storage) is None:
                    self.ledger.enter(storage, None)

    def _cannot_be_held(self, figures: PlanFigures, *, warm: bool) -> bool:
        """Whether the floor is above the budget for certain: a cold first step may differ a little from the next ones."""
        doubt = 0 if warm else max(TOLERANCE_BYTES, int(TOLERANCE_SHARE * figures.bound_peak_bytes)) + LIBRARY_BYTES
        return figures.bound_peak_bytes - doubt > self.budget_bytes

    def _check_resident(self) -> None:
        """Refuse what no plan can hold although no unit like this one was recorded (another shape every step)."""
        if not self.budget_bytes or not self.steps:
            return
        resident = self.resident.bytes(self.meter.counts)
        figures = resident_figures(resident, max(s.peak_bytes for s in self.steps), self.steps[-1].seconds)
        evaluated = raised(figures, self._evaluation_bytes)
        if resident > self.budget_bytes or self._cannot_be_held(evaluated, warm=False):
            self.figures = evaluated
            if self._may_refuse:
                self._refuse(evaluated, proven=True)

    @property
    def _may_refuse(self) -> bool:
        """Whether little is lost if the script ends here."""
        return len(self.steps) < REFUSED and not self.settings.keep_going

    def _refuse(self, figures: PlanFigures, *, proven: bool) -> None:
        self.unit = None
        self._step_units = 0
        told = functools.partial(
            refusal, figures, self.budget_bytes, self._between_bytes,
            proven=proven, evaluation_bytes=self._evaluation_bytes, declined=self.updates.reason,
            unreached=self.unreached.reasons,
        )
        self.refused = told()
        # What is raised is nowhere held: its traceback leads to the script's model, and here.
        raise told() if self.settings.refusal is None else self.settings.refusal(self.refused)

    # --- steps -------------------------------------------------------------------------------------------------------

    def _end_span(self) -> int:
        """The highest point since the last unit ended, or the one that runs began; the next span begins."""
        peak = self.meter.span_peak()
        self._step_peak = max(self._step_peak, peak)
        self.meter.begin_span()
        return peak

    def _open_step(self) -> None:
        self.meter.begin_span()
        self._unseen_peak = self._step_peak = 0
        self.evictor.tally = StepTally()
        self._step_started = time.perf_counter()
        self._step_policy, self._step_units, self._step_done, self._step_trains = "plain", 0, False, False

    def _close_step(self) -> None:
        self._units_a_step = max(1, self._step_units)
        tally = self.evictor.tally
        peak = max(self.meter.span_peak(), self._step_peak, self._unseen_peak)
        crossed = bool(self.budget_bytes) and peak > self.budget_bytes
        self._crossings.step_ends(crossed=bool(self.steps) and crossed)
        if crossed and len(self.steps) >= REFUSED:
            self._tell_of_crossing(peak)
        self.steps.append(
            StepFigures(
                index=len(self.steps),
                seconds=time.perf_counter() - self._step_started,
                peak_bytes=peak,
                policy=self._step_policy,
                recomputed_ops=tally.recomputed_ops,
                recompute_seconds=tally.recompute_seconds,
                offloaded_bytes=tally.offloaded_bytes,
                offload_seconds=tally.offload_seconds,
                rescued_ops=tally.rescues,
                overrun=tally.overrun and peak > self.budget_bytes,
            )
        )
        if self.settings.on_step is not None:
            self.settings.on_step()

    def _tell_of_crossing(self, peak: int) -> None:
        """A step crossed the budget after the script has run for too long to be ended for it."""
        now = time.monotonic()
        if now - self._last_told < TOLD_SECONDS:
            return
        self._last_told = now
        figures = self.figures
        if self._evaluation_bytes > self.budget_bytes and peak <= self._evaluation_bytes:
            why = f"an evaluation without gradients needs {format_bytes(self._evaluation_bytes)} whatever is planned"
        elif figures is not None and figures.lowest_peak_bytes > self.budget_bytes:
            why = f"the lowest plan found for its sizes needs {format_bytes(figures.lowest_peak_bytes)}"
        elif self.unreached.reasons:
            why = f"what Lowtide does not reach in this script: {'; '.join(self.unreached.reasons)}"
        elif self._step_policy == "online":
            why = "it followed no plan (other operators or sizes than before)"
        else:
            why = "what ran beside its plan (an evaluation, the script's own code) needs more than was recorded"
        tell(
            f"lowtide: step {len(self.steps)} peaked at {format_bytes(peak)}, {format_bytes(peak - self.budget_bytes)} over "
            f"the budget: {why}; training goes on, and the exit code will say so"
        )

    def _note_policy(self, policy: str) -> None:
        self._step_policy = max(self._step_policy, policy, key=POLICIES.index)

    # --- small wires -------------------------------------------------------------------------------------------------

    def _unheld(self, value: Any) -> None:
        if self.saver.recorder is not None:
            self.saver.recorder.unheld(value)

    def _anchored(self, value: Any) -> None:
        if self.saver.recorder is not None:
            self.saver.recorder.anchored(value)

    def _back(self, value: Any) -> None:
        if self.saver.recorder is not None:
            self.saver.recorder.back(value)


def _same(told: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    """Whether two lists name the same objects and numbers."""
    return len(told) == len(before) and all(
        a == b if isinstance(a, int) else a is b for a, b in zip(told, before, strict=True)
    )


def _unpack(packed: Any) -> torch.Tensor:
    found: torch.Tensor = packed.unpack()
    return found
