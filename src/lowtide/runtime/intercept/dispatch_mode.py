"""What all dispatch modes of this house have in common: what they tell torch of themselves, and where they end."""

from __future__ import annotations

import os
import weakref
from typing import Any, Protocol

from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode


class Mode(TorchDispatchMode):
    """Base class of Lowtide's dispatch modes; compilers and higher-order operators may run under it."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        """Nothing is on."""
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Compilers need not stand back because of this mode."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from wrapping each call: compiled regions run outside this mode anyway."""
        return False


def ours_alone() -> bool:
    """Whether modes are on, and all of them are ours: in the plain run there would be none."""
    modes = _get_current_dispatch_mode_stack()
    return bool(modes) and all(isinstance(mode, Mode) for mode in modes)


def take_all() -> list[Any]:
    """Take all modes off: the one on top first."""
    return [_pop_mode() for _ in _get_current_dispatch_mode_stack()]


def put_back(taken: list[Any]) -> None:
    """Put on again what was taken off."""
    for mode in reversed(taken):
        _push_mode(mode)


def make_way(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """What a mode does where a tensor is of a type of its own: a compiler's trial run is not the script's, parameters that are
    not there yet have no bytes, and other types take themselves apart first.
    """
    if FakeTensor in types or any(issubclass(t, UninitializedTensorMixin) for t in types):
        return func(*args, **(kwargs or {}))
    return NotImplemented


class Forked(Protocol):
    """Who is told of a fork."""

    def forked(self) -> None:
        """This process is a child that inherited the interpreter."""


def tell_of_forks(listener: Forked) -> None:
    """Have forked children told; the interpreter keeps such a wish for ever, so it must not hold the listener."""
    known = weakref.ref(listener)

    def forked() -> None:
        found = known()
        if found is not None:
            found.forked()

    os.register_at_fork(after_in_child=forked)
