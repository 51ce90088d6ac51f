"""Updates parameters one by one before the script's own step, so that one gradient and its states are resident at a time.

The step then finds nothing left to do for them. Where this is not possible (an optimizer that is not known to treat parameters
independently, a closure, step hooks), the step reads all gradients and states as usual.
"""

from __future__ import annotations

from typing import Any, final

import torch
from lowtide.runtime.tensors import GRAD, is_plain
from lowtide.runtime.torch_state import is_compiled_here
from lowtide.runtime.updates.offloaded_gradients import OffloadedGradients
from lowtide.runtime.updates.offloaded_states import OffloadedStates
from lowtide.runtime.updates.single_update import overlap, parameters_of, scales, unfit, update_one
from lowtide.runtime.updates.stand_in import StandIns
from lowtide.runtime.updates.streamed_update import StreamedUpdate


@final
class StepwiseUpdate:
    """Runs the updates of parameters whose gradients or states are offloaded."""

    def __init__(
        self, gradients: OffloadedGradients, states: OffloadedStates, stand_ins: StandIns, streamed: StreamedUpdate
    ) -> None:
        """Share what is offloaded; ``stand_ins`` tells what updates do, and ``streamed`` updates slice by slice."""
        self._gradients, self._states, self._stand_ins, self._streamed = gradients, states, stand_ins, streamed
        self._begun: set[int] = set()

    def begins(self, optimizer: Any, *, closure: bool) -> None:
        """The script calls an optimizer's step: update the parameters whose gradients are offloaded, one by one.

        Where states are offloaded, too, all parameters are updated so.

        Args:
            optimizer: the optimizer.
            closure: whether the step was given a closure, which may compute other gradients first.
        """
        gradients = self._gradients
        self._begun.add(id(optimizer))
        gradients.early.is_over()
        if is_compiled_here():  # the step's own arithmetic is the compiler's
            gradients.bring_back_all()
            self._states.stays(optimizer)
            return
        if not gradients.engaged or closure or unfit(optimizer) or scales(optimizer):
            return
        together = overlap(parameters_of(optimizer)) or _has_sparse(optimizer) or _share_gradients(optimizer)
        every = self._states.engaged and not together
        waiting = [
            (group, p) for group in optimizer.param_groups for p in group["params"]
            if gradients.waits(p, together=together) or (every and GRAD.__get__(p) is not None)
        ]
        with gradients.early.begins(optimizer), self._streamed.buffers():
            self._update(optimizer, waiting, every=every)

    def _update(self, optimizer: Any, waiting: list[tuple[dict[str, Any], torch.Tensor]], *, every: bool) -> None:
        gradients = self._gradients
        for place, (group, parameter) in enumerate(waiting):
            if (every or gradients.is_away(parameter)) and self._streamed.update(optimizer, group, parameter):
                continue
            for _, following in waiting[place + 1 : place + 2]:
                gradients.begin(following)
            with self._states.during_update(optimizer, parameter), gradients.fetched_for_update(parameter) as grad:
                if grad is not None:
                    update_one(optimizer, group, parameter)
                elif every:
                    self._update_resident(optimizer, group, parameter)
            if grad is not None and self._stand_ins.writes_gradient(optimizer, group, parameter):
                gradients.written(parameter, grad)

    def ends(self, optimizer: Any, *, within_backward: bool) -> None:
        """The step returned; it skipped the parameters that :meth:`begins` had updated.

        Args:
            optimizer: the optimizer.
            within_backward: whether it stepped in a hook of a backward, where :meth:`begins` is not called.
        """
        self._gradients.early.returned(optimizer)
        if id(optimizer) not in self._begun and not within_backward:  # it was not seen to begin: it steps in compiled code
            self._states.stays(optimizer)
        self._begun.discard(id(optimizer))
        self._states.optimizer_ends(optimizer)

    def _update_resident(self, optimizer: Any, group: dict[str, Any], parameter: torch.Tensor) -> None:
        """Update a parameter whose gradient is resident; the gradient is hidden from the step, and is there again after it."""
        grad: torch.Tensor | None = GRAD.__get__(parameter)
        if grad is None:  # another thread has dropped it
            return
        update_one(optimizer, group, parameter)
        self._gradients.early.add(parameter)
        self._gradients.early.remains(parameter, grad)
        GRAD.__set__(parameter, None)


def _has_sparse(optimizer: Any) -> bool:
    """Whether a parameter has a sparse gradient, for which a step may raise before it updates any."""
    return any((grad := GRAD.__get__(p)) is not None and grad.layout is not torch.strided for p in parameters_of(optimizer))


def _share_gradients(optimizer: Any) -> bool:
    """Whether resident gradients are on one storage: a foreach update may write to all of them before it reads any."""
    grads = (GRAD.__get__(p) for p in parameters_of(optimizer))
    places = [g.untyped_storage()._cdata for g in grads if g is not None and is_plain(g)]
    return len(set(places)) < len(places)
