"""The levers of a run: those that the user asked for, and those that engage automatically."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from lowtide.base.lever_catalogue import CHECKPOINTS, GRADIENTS, LOSS, SLICES, SPLIT_OPS, STATES, UPDATE
from lowtide.base.trace import Phase
from lowtide.base.units import Rescue
from lowtide.runtime.budget import SLACK_BYTES, Budget
from lowtide.runtime.control.interception import Interception
from lowtide.runtime.control.settings import BudgetSettings
from lowtide.runtime.device.offload import Ticket
from lowtide.runtime.intercept.checkpoint_calls import CheckpointCalls
from lowtide.runtime.levers.deferred_logits import DeferredLogits
from lowtide.runtime.levers.split_layers import SplitLayers
from lowtide.runtime.run_figures import LeverFigures
from lowtide.runtime.storage.views import bytes_of
from lowtide.runtime.tensors import grad_of, states_of
from lowtide.runtime.torch_state import in_process_group
from lowtide.runtime.updates.clipped_gradients import ClippedGradients
from lowtide.runtime.updates.offloaded_gradients import OffloadedGradients
from lowtide.runtime.updates.offloaded_states import OffloadedStates
from lowtide.runtime.updates.optimizer_in_backward import OptimizerInBackward
from lowtide.runtime.updates.single_update import parameters_of, scales, unfit
from lowtide.runtime.updates.sliced_optimizer import TEMPORARIES, SlicedOptimizer
from lowtide.runtime.updates.stand_in import StandIns
from lowtide.runtime.updates.stepwise_update import StepwiseUpdate
from lowtide.runtime.updates.streamed_update import StreamedUpdate


@final
class LeverSet:
    """Engages and removes the levers of a run; one per runtime.

    Attributes:
        in_backward: updates each parameter as soon as its gradient is complete.
        states: offloads optimizer states between updates.
        gradients: offloads gradients as soon as they are complete.
        clipping: clips gradients one by one where they are offloaded.
        updates: updates parameters one by one where gradients or states are offloaded.
        slices: runs a foreach optimizer's update slice by slice.
        logits: computes the loss of a wide linear layer piece by piece.
        layers: splits large operators.
        checkpoints: runs the script's own checkpoints as plain calls where that gives the same bits.
        optimizers: all optimizers that were made or have stepped.
    """

    def __init__(
        self, settings: BudgetSettings, budget: Budget, interception: Interception, phase: Callable[[], Phase],
        before_update: Callable[[Any, torch.Tensor], None],
    ) -> None:
        """Install nothing yet.

        Args:
            settings: says which levers may be used.
            budget: the budget that the sliced update stays below.
            interception: provides the meter, and the tier to which gradients may be offloaded.
            phase: returns the current phase.
            before_update: called with the optimizer and the parameter before a parameter is updated within the backward.
        """
        self._settings, self._budget, self._interception = settings, budget, interception
        self.in_backward = OptimizerInBackward(phase, before_update)
        self.states = OffloadedStates(self._put, interception.evictor.room_for)
        self.gradients = OffloadedGradients(self._put, interception.evictor.room_for)
        self._stand_ins = StandIns(self.gradients.is_away)
        streamed = StreamedUpdate(
            self.gradients, self.states, self._stand_ins, self._movable_tier, interception.evictor.room_for, self._transferred,
            self._unseen,
        )
        self.clipping = ClippedGradients(self.gradients, streamed)
        self.updates = StepwiseUpdate(self.gradients, self.states, self._stand_ins, streamed)
        self.slices = SlicedOptimizer(self._room)
        self.logits = DeferredLogits()
        self.layers = SplitLayers()
        self.checkpoints = CheckpointCalls(interception.sees_what_is_saved, self.is_ours, interception.events_so_far)
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()

    def _is_allowed(self, lever: str) -> bool:
        return lever in self._settings.allow - self._settings.without

    def install(self, optimizers: list[Any]) -> None:
        """Engage the levers that the user asked for; ``optimizers`` are those that exist already."""
        settings = self._settings
        self.optimizers.update(optimizers)
        if self._is_allowed(UPDATE):
            self.in_backward.install(optimizers)
        elif self._is_allowed(GRADIENTS) or self._is_allowed(STATES):
            self.gradients.engage(optimizers)
            if self._is_allowed(STATES):
                self.states.engage(optimizers)
        limited = not (settings.budget is None or isinstance(settings.budget, Rescue))
        if SLICES not in settings.without and (limited or SLICES in settings.allow):
            self.slices.install()
        if limited or self.gradients.engaged:
            self.clipping.install()
        if CHECKPOINTS not in settings.without and limited:
            self.checkpoints.install()
        if self._is_allowed(LOSS):
            self.logits.install()
        if self._is_allowed(SPLIT_OPS):
            self.layers.install()

    def remove(self, *, over: bool) -> None:
        """Remove all levers; ``over``: whether the script has ended, too."""
        self.in_backward.remove()
        self.gradients.remove(over=over)
        self.states.remove(over=over)
        self.slices.remove()
        self.clipping.remove()
        self.layers.remove()
        self.checkpoints.remove()
        if LOSS in self._settings.allow:
            self.logits.remove()

    @property
    def takes_gradients(self) -> bool:
        """Whether a lever takes gradients away within the backward, which makes another kind of unit."""
        return self.gradients.engaged or self.in_backward.engaged

    def unit_begins(self) -> None:
        """A unit begins: offload what the script has read since it was offloaded last."""
        self.gradients.unit_begins()
        self.states.unit_begins()

    def optimizer_begins(self, optimizer: Any, *, closure: bool) -> None:
        """An optimizer's step begins, with a closure or without."""
        self.updates.begins(optimizer, closure=closure)

    def optimizer_ends(self, optimizer: Any, *, within_backward: bool) -> None:
        """An optimizer's step returned; ``within_backward``: it was a hook's."""
        self.updates.ends(optimizer, within_backward=within_backward)

    def bring_back_all(self) -> None:
        """Fetch everything that is offloaded: code is about to run that may read it past the properties in its place."""
        self.gradients.bring_back_all()
        self.states.bring_back_all()

    def exposed(self, storage: torch.UntypedStorage) -> None:
        """The script has a storage's address: its bytes stay there."""
        self.gradients.exposed(storage)
        self.states.exposed(storage)

    def forked(self) -> None:
        """This process is a forked child: it offloads nothing."""
        self.gradients.forked()
        self.states.forked()

    def is_ours(self, hook: Any) -> bool:
        """Whether a hook of a parameter is a lever's."""
        return self.in_backward.is_ours(hook) or self.gradients.is_ours(hook)

    def optimizer_made(self, optimizer: Any) -> None:
        """The script has made an optimizer."""
        self.optimizers.add(optimizer)
        self.in_backward.optimizer_made(optimizer)

    def most_lowered_bytes(self, *, in_update: bool = False) -> int:
        """Upper bound on how many bytes offloading gradients lowers a peak, or only the peak of the optimizers' updates.

        The gradients leave, and the temporaries of updating all parameters at once are avoided; not in the update of an
        optimizer that reads all gradients.
        """
        lowered = [optimizer for optimizer in self.optimizers if not (in_update and unfit(optimizer))]
        parameters = {id(p): p for optimizer in lowered for p in parameters_of(optimizer)}
        return (1 + TEMPORARIES) * sum(bytes_of(p) for p in parameters.values())

    def may_move_gradients(self) -> bool:
        """Whether the lever that offloads gradients is still available to lower the peak."""
        return not (self.takes_gradients or GRADIENTS in self._settings.without) and self._interception.evictor.moves

    def move_gradients(self) -> None:
        """Offload gradients from now on."""
        self.gradients.engage(self.optimizers)

    def wanted_by_update(self, optimizer: Any) -> frozenset[str]:
        """The levers that an optimizer's update needs so as not to cross the budget, of those that are still available.

        That is of an update that allocates states, usually the first one, and of an optimizer that can be updated one
        parameter at a time.
        """
        room = self._room()
        wanted: set[str] = set()
        if room is None or not (self.may_move_gradients() or self.may_move_states()):
            return frozenset()
        parameters = list(parameters_of(optimizer))
        if len(states_of(optimizer)) >= len(parameters) or unfit(optimizer) or scales(optimizer) or in_process_group():
            return frozenset()
        room -= SLACK_BYTES
        if not self._stand_ins.states_exceed(optimizer, room):
            return frozenset()
        if self.may_move_gradients():
            wanted.add(GRADIENTS)
            room += sum(bytes_of(grad) for p in parameters if (grad := grad_of(p)) is not None)
        if self.may_move_states() and self._stand_ins.states_exceed(optimizer, room):
            wanted.add(STATES)
        return frozenset(wanted)

    def may_move_states(self) -> bool:
        """Whether the lever that offloads optimizer states is still available to lower the peak; it moves gradients, too."""
        if self.states.engaged or STATES in self._settings.without or self.in_backward.engaged or in_process_group():
            return False
        return self.gradients.engaged or self.may_move_gradients()

    def movable_state_bytes(self, *, in_update: bool = False) -> int:
        """Bytes of the resident optimizer states that may be offloaded, or of those that then are away in the update, too."""
        return self.states.movable_bytes(o for o in self.optimizers if not (in_update and unfit(o)))

    def move_states(self) -> None:
        """Offload optimizer states from now on."""
        self.states.engage(self.optimizers)

    def has_gradients_to_move(self) -> bool:
        """Whether the lever that offloads gradients is available, and there are gradients now."""
        if not self.may_move_gradients() or not self.gradients.can_engage(self.optimizers):
            return False
        return any(grad_of(p) is not None for optimizer in self.optimizers for p in parameters_of(optimizer))

    def figures(self) -> tuple[LeverFigures, ...]:
        """What each lever did."""
        allow = self._settings.allow
        return (
            *self.gradients.figures(),
            *self.states.figures(),
            *self.in_backward.figures(),
            *self.slices.figures(),
            *(self.logits.figures() if LOSS in allow else ()),
            *(self.layers.figures() if SPLIT_OPS in allow else ()),
            *self.checkpoints.figures(),
        )

    def _put(self, storage: torch.UntypedStorage) -> Ticket | None:
        """Offload a gradient or an optimizer state; None if it stays on the device."""
        evictor = self._interception.evictor
        if not (evictor.moves and self._interception.meter.counts(storage)):
            return None
        start = time.perf_counter()
        try:
            ticket = self._interception.tier.put(storage)
        except OSError:  # the tier is full
            return None
        self._transferred(time.perf_counter() - start, storage.nbytes())
        return ticket

    def _movable_tier(self) -> object:
        """The offload tier; None if nothing may be offloaded."""
        return self._interception.tier if self._interception.evictor.moves else None

    def _unseen(self) -> AbstractContextManager[object]:
        """A context in which operators pass by Lowtide's mode, if they are counted without it and no other mode is on."""
        modes: int = torch._C._len_torch_dispatch_stack()  # type: ignore[attr-defined]
        unseen = modes == 1 and not self._interception.stack.mode_covered() and self._interception.meter.exact
        return torch._C._DisableTorchDispatch() if unseen else nullcontext()  # type: ignore[attr-defined]

    def _transferred(self, seconds: float, written_bytes: int) -> None:
        """A value, or a slice of one, was read or written."""
        tally = self._interception.evictor.tally
        tally.offload_seconds += seconds
        tally.offloaded_bytes += written_bytes

    def _room(self) -> int | None:
        """Bytes left below the budget; None if there is no budget."""
        return self._budget.bytes - self._interception.meter.live() if self._budget.bytes else None
