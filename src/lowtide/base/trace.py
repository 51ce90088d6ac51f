"""The recorded trace of one unit of training: a forward and the backward that consumes it.

Time is counted in *events*: event ``e`` is either an operator that ran, or a *need*, the moment at which backward unpacks
a saved tensor. Bytes change only at events. The recorder (``runtime/record/trace_recorder.py``) writes a
:class:`Trace` and the planner reads it; it is immutable.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """The part of a step in which an event happened.

    ``data`` is everything outside the other phases; ``loss`` lasts from the model's return to the backward, including the
    criterion; ``evaluation`` is a forward without gradients.
    """

    DATA = "data"
    ZERO_GRAD = "zero_grad"
    EVALUATION = "evaluation"
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True)
class Site:
    """Where in the model an operator runs: the same from step to step, even if sequence lengths change.

    Attributes:
        module: dotted path of the innermost module; ``""`` outside any module.
        op: the ATen operator's name, overload included.
        nth: how many times that operator had already run in that module within the unit.
    """

    module: str
    op: str
    nth: int

    def __str__(self) -> str:
        """Print as ``module:op#nth``."""
        return f"{self.module}:{self.op}#{self.nth}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operator that ran (an event).

    Attributes:
        site: where it ran.
        phase: the part of the step in which it ran.
        seconds: how long it took: host time of the call (device time on CUDA).
        inside_bytes: peak memory inside the operator above the bytes live before it; its outputs included.
        reads: ids of the values it read.
        writes: ids of the values it produced, one per new storage.
        overwrites: pairs of ids (old version, new version) of the values that it changed in place.
        replayable: whether running it again on the same inputs gives the same bits and has no other effect.
    """

    site: Site
    phase: Phase
    seconds: float
    inside_bytes: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    overwrites: tuple[tuple[int, int], ...] = ()
    replayable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Backward unpacks a saved value (an event).

    Attributes:
        value: id of the value.
        pinned_until: last event during which the autograd node that unpacked the value still holds it.
    """

    value: int
    pinned_until: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """One value: one version of one storage.

    Attributes:
        bytes: size of the storage.
        born: event that produced it; -1 if it existed before the unit, or its operator was not seen.
        slot: its index among the values of the operator that produced it; 0 without one.
        held_until: last event at whose end something other than autograd's saved tensors held the storage.
        released: last event at whose end autograd held a saved tensor of it; -1 if it was never saved.
        counted: whether its bytes count on top of the base; False for values that existed before the unit.
        movable: whether it may be offloaded.
    """

    bytes: int
    born: int
    slot: int
    held_until: int
    released: int
    counted: bool
    movable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """One tensor that autograd saved: one call of the pack hook.

    Attributes:
        value: id of the value whose storage the tensor shows.
        event: last event before the call; -1 if there was none.
    """

    value: int
    event: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One recorded unit.

    Attributes:
        base_bytes: bytes live when the unit began.
        resident_bytes: parameters, buffers and optimizer states, which are part of the base.
        events: operators and needs in the order in which they happened.
        buffers: all values of the unit, indexed by id.
        saves: saved tensors in the order in which autograd saved them.
        other_bytes: per event, live bytes before it that belong to no value, relative to the base; negative if memory from
            before the unit was freed.
        spike_bytes: per event, how far memory between the previous event and this one, outside any operator, rose above the
            bytes live before this event.
        backward_event: first event of the (first) backward.
    """

    base_bytes: int
    resident_bytes: int
    events: tuple[Op | Need, ...]
    buffers: tuple[Buffer, ...]
    saves: tuple[Save, ...]
    other_bytes: tuple[int, ...]
    spike_bytes: tuple[int, ...]
    backward_event: int
