"""Decides where a unit ends, from its backwards, the optimizer's step, and the next model call."""

from __future__ import annotations

from typing import Final

from lowtide.runtime.control.interception import Interception
from lowtide.runtime.intercept.phases import PhaseTracker
from lowtide.runtime.units.recorded_unit import near
from lowtide.runtime.units.resizing import LARGEST
from lowtide.runtime.units.unit import Unit
from lowtide.runtime.units.unit_mode import Diverged, Expectation, Unmonitored
from lowtide.runtime.units.unit_signature import UnitSignature, are_alike, input_bytes

BACKWARDS: Final = 3
"""Backwards (that build no graph of their own) after which a unit ends even though autograd still holds handles."""
BACKWARDS_BEFORE_STEP: Final = 64
"""The same limit until an optimizer steps: an inner loop may run many times while another graph is open."""


def is_over(unit: Unit, kind: UnitSignature, *, optimizers_seen: bool, awaited: int) -> bool:
    """Whether a unit is over: its optimizer stepped and only a retained graph is left, or its module is called again.

    Args:
        unit: the running unit.
        kind: the kind of unit that the call would begin.
        optimizers_seen: whether a training step ends with an optimizer's step.
        awaited: number of saved tensors that no backward has asked for.
    """
    anew = kind.call == unit.kind.call
    if not unit.consumed or not (unit.stepped or (anew and not optimizers_seen)):
        return False
    if unit.following is not None:
        return unit.backwards >= len(unit.following.script.backwards)
    return anew or _has_given_all(unit, awaited)


def _has_given_all(unit: Unit, awaited: int) -> bool:
    """Whether a backward has asked for everything that a unit saved and autograd still holds."""
    return unit.recorder is None or not awaited


def is_consumed(unit: Unit, awaited: int) -> bool:
    """Whether a unit that follows no plan has had its backward, so that at most a retained graph is left."""
    return bool(unit.consumed) and unit.following is None and _has_given_all(unit, awaited)


def is_stale(unit: Unit, kind: UnitSignature, interception: Interception) -> bool:
    """Whether the running unit was a forward that no backward will follow.

    Args:
        unit: the running unit.
        kind: the kind of unit that the call would begin.
        interception: shows what is left of the unit's graph.
    """
    if unit.backwards:
        return False
    plan = unit.following
    if plan is not None:
        done = not plan.is_awaited() if plan.unplanned else plan.at == len(plan.script.funcs) - 1
        return kind == unit.kind and bool(done)
    left = unit.plan
    if interception.saver.outstanding or (left is not None and left.is_awaited()):
        return False
    if kind == unit.kind:
        return True
    meter = interception.meter
    unwatched = isinstance(unit.mode, Unmonitored) and meter.exact
    if unwatched and not near(meter.live(), unit.base_bytes + unit.left.bytes, unit.base_bytes):
        return False  # its graph is alive, although the model's outputs are not
    return not any(output() is not None for output in unit.outputs)


def is_alike_so_far(unit: Unit, expected: Expectation) -> bool:
    """Whether the root calls of a unit so far are those of the recorded unit, with other sizes that are not much larger."""
    calls = expected.entry.calls[: len(unit.calls)]
    if len(calls) < len(unit.calls) or not all(map(are_alike, unit.calls, calls)):
        return False
    return sum(map(input_bytes, unit.calls)) <= LARGEST * sum(map(input_bytes, calls))


def goes_on_after_backward(unit: Unit, clock: PhaseTracker, *, outstanding: int) -> bool:
    """Whether a unit continues after a backward, where no plan expects another one.

    Args:
        unit: the running unit.
        clock: shows which module calls are open.
        outstanding: number of saved tensors that autograd holds.
    """
    diverged = unit.mode.left.plan if isinstance(unit.mode, Diverged) else None
    owes = outstanding > 0 or (diverged is not None and diverged.owes())
    if isinstance(unit.mode, Unmonitored):  # its saved tensors are not counted
        expected = unit.mode.expected
        within = clock.open > 0 and not unit.stepped  # inside a module call, whose own graph is still to be consumed
        owes = within if expected is None else unit.backwards < len(expected.entry.backward_starts)
    before_step = not unit.stepped and (clock.open > 0 or clock.optimizers_seen)
    return owes and unit.consumed < (BACKWARDS_BEFORE_STEP if before_step else BACKWARDS)
