"""What is known of one recorded unit of training: a forward and the backward that consumes it.

Time is counted in *events*: event ``e`` is either an operator that ran, or a *need*, the moment at which backward asks
for a saved tensor. Bytes change only at events. The recorder (``runtime/record/trace_recorder.py``) writes a
:class:`Trace`; the planner reads it; nobody changes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """The part of a step in which an event happened.

    ``data`` is all that is none of the others; ``loss`` lies between the model's return and the backward, criterion included;
    ``evaluation`` is a forward without gradients.
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
    """Where in the model an operator runs: stable from step to step, also when lengths change.

    Attributes:
        module: dotted path of the innermost module, ``""`` outside any.
        op: the ATen operator's name, overload included.
        nth: how often that operator ran in that module before, within the unit.
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
        seconds: how long it took, host time of the call (device time on CUDA).
        inside_bytes: highest memory inside the operator, above what was live before it; its outputs included.
        reads: values it read (ids).
        writes: values it made, one per fresh storage (ids).
        overwrites: pairs (old version, new version) of values that it changed in place.
        replayable: whether running it again on the same inputs gives the same bits and no other effect.
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
    """Backward asks for a saved value (an event).

    Attributes:
        value: id of the value.
        pinned_until: last event during which the autograd node that asked still holds it.
    """

    value: int
    pinned_until: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """One value: one version of one storage.

    Attributes:
        bytes: size of the storage.
        born: event that made it; -1 if it was there before the unit or its maker was not seen.
        slot: which of its maker's values it is; 0 without a maker.
        held_until: last event at whose end something other than autograd's saved tensors held the storage.
        released: last event at whose end autograd held a saved tensor of it; -1 if it was never saved.
        counted: whether its bytes count on top of the base (not so for what was there before the unit).
        movable: whether it may be moved to the second board.
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
    """One tensor that autograd saved (one call of the pack hook), in the order of the calls."""

    value: int
    event: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One recorded unit.

    Attributes:
        base_bytes: live when the unit began.
        resident_bytes: parameters, buffers and optimizer states among them.
        events: operators and needs in the order in which they happened.
        other_bytes: per event, live bytes that belong to no value, relative to the base (may be negative: something from
            before the unit was freed).
        spike_bytes: per event, how far memory rose above ``live before`` since the event before, outside any operator.
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
