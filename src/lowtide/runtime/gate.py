"""Loads the native gate (``gate.cpp``), which runs operators that a mode leaves alone without entering Python."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Final, Protocol

import torch

SWITCH: Final = "LOWTIDE_GATE"
"""Environment variable; with the value ``0`` dispatch modes see every operator, as where the gate was not built."""


class Gate(Protocol):
    """Lets operators pass by a dispatch mode that is on; for one thread.

    Attributes:
        at: number of the plan's operators that have passed.
        shut: whether the mode sees every operator.
        open: whether there is no plan (any more): what :func:`let_pass` was told of passes.
        unseen: how many operators passed without the mode.
        weighs: whether to compare what operators make with what they made in the recording.
        growth: how many times as many bytes an operator made, at most.
    """

    at: int
    shut: bool
    open: bool
    unseen: int
    weighs: bool
    growth: float

    def cap(self, cell: int, refused: int, limit: int) -> None:
        """Cap operators that can be run again at ``limit`` live bytes; addresses of the cap and of the count of refusals."""

    def enter(self, mode: Any) -> None:
        """Begin: the mode has been put on in this thread."""

    def stand(self, mode: Any) -> None:
        """Begin, open and in place of the mode: it is not on, and only handles what does not pass."""

    def rearm(self) -> None:
        """Go on after torch took the mode off and put it back on, as to print a tensor: since then it has seen all."""

    def disarm(self) -> None:
        """Let the mode see every operator until :meth:`rearm`, with no trace of the gate in the thread's dispatch keys."""

    def leave(self) -> None:
        """End: the mode is about to be taken off."""


def _load() -> ModuleType | None:
    """The gate that was built for this version of torch; None if there is none, or if it is switched off."""
    if os.environ.get(SWITCH) == "0":
        return None
    version = torch.__version__.partition("+")[0].replace(".", "_")
    try:
        return importlib.import_module(f"lowtide.runtime._gate_{version}")
    except ImportError:
        return None


_NATIVE: Final = _load()


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """A detached alias that shares the tensor's version counter, made without a dispatch mode seeing it."""
    if _NATIVE is not None:
        made: torch.Tensor = _NATIVE.detached(tensor)
        return made
    with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
        return tensor.detach()


def script_of(operators: Sequence[Any], alone: Sequence[bool], capped: Sequence[bool], made: Sequence[int]) -> Any:
    """What a gate must know of a plan; None where there is no gate, or where an operator is not one of the dispatcher's.

    Args:
        operators: the operators that the plan expects, in order.
        alone: per operator, whether the plan does nothing there.
        capped: per operator, whether it may be refused memory, and can then be run again.
        made: per operator, the bytes that it made when it was recorded; 0 for too few to be compared with.
    """
    if _NATIVE is None or not all(isinstance(operator, torch._ops.OpOverload) for operator in operators):
        return None
    names = [(operator._schema.name, operator._schema.overload_name) for operator in operators]
    return _NATIVE.Script(names, alone, capped, made)


def let_pass(operator: Any) -> None:
    """Let an operator pass open gates in this thread: it writes nothing, draws no numbers, and can be run again."""
    if _NATIVE is not None:
        _NATIVE.let_pass(operator._schema.name, operator._schema.overload_name)


def gate_of(script: Any) -> Gate:
    """A gate at the beginning of a unit that follows a plan."""
    assert _NATIVE is not None
    made: Gate = _NATIVE.Gate(script)
    return made
