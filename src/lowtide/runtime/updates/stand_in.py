"""Learns from an optimizer's own update of a stand-in parameter which states it makes, and whether it writes to gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from lowtide.runtime.storage.views import bytes_of
from lowtide.runtime.tensors import beneath_autograd, grad_of, states_of
from lowtide.runtime.updates.single_update import update_one

STAND_IN: Final = 3
"""Elements of the stand-in."""
MOST_STATES: Final = 4
"""No optimizer that updates one parameter at a time makes more states of a parameter's size."""
_DECIDING: Final = ("momentum", "amsgrad", "centered", "nesterov", "maximize", "weight_decay", "fused")
"""Options of a group on which it depends what an update does."""


@dataclass(frozen=True, slots=True)
class _Shown:
    """What two updates of a stand-in showed: bytes of states per byte of the parameter, and whether its gradient changed."""

    states: float
    writes_gradient: bool


@final
class StandIns:
    """What updates do, by optimizer and options; each is tried once."""

    def __init__(self, is_away: Callable[[torch.Tensor], bool] = lambda _: False) -> None:
        """Know no optimizer yet; ``is_away`` says whether a parameter's gradient is offloaded."""
        self._is_away = is_away
        self._shown: weakref.WeakKeyDictionary[Any, dict[Any, _Shown]] = weakref.WeakKeyDictionary()

    def states_exceed(self, optimizer: Any, room_bytes: int) -> bool:
        """Whether the states that an optimizer's next step allocates take more than ``room_bytes``."""
        groups = [(group, self._without_state(optimizer, group)) for group in optimizer.param_groups]
        if room_bytes >= MOST_STATES * sum(bytes_of(p) for _, new in groups for p in new):
            return False
        return room_bytes < self.state_bytes(optimizer)

    def state_bytes(self, optimizer: Any) -> int:
        """Bytes of the states that an optimizer's next step allocates."""
        total = 0.0
        for group in optimizer.param_groups:
            new = self._without_state(optimizer, group)
            size = sum(bytes_of(p) for p in new)
            if size:
                total += size * self._show(optimizer, group, new[0]).states
        return int(total)

    def writes_gradient(self, optimizer: Any, group: dict[str, Any], like: torch.Tensor) -> bool:
        """Whether an update writes to the gradient, as foreach SGD does with Nesterov momentum (no version counter tells)."""
        return self._show(optimizer, group, like).writes_gradient

    def _without_state(self, optimizer: Any, group: dict[str, Any]) -> list[torch.Tensor]:
        """A group's parameters that will be updated and have no state yet; states of sparse gradients may be sparse, too."""
        states = states_of(optimizer)
        return [p for p in group["params"] if not states.get(p) and (self._is_away(p) or _is_strided(grad_of(p)))]

    def _show(self, optimizer: Any, group: dict[str, Any], like: torch.Tensor) -> _Shown:
        known = self._shown.setdefault(optimizer, {})
        key = (like.dtype, like.device, group.get("foreach"), *(bool(group.get(name)) for name in _DECIDING))
        if key not in known:
            known[key] = _updated(optimizer, group, like)
        return known[key]


def _is_strided(grad: torch.Tensor | None) -> bool:
    return grad is not None and grad.layout is torch.strided


def _updated(optimizer: Any, group: dict[str, Any], like: torch.Tensor) -> _Shown:
    """What two updates of a parameter like ``like`` show; the second one finds states.

    An optimizer that makes its states beforehand (Adagrad) has none for a stand-in: the worst is assumed.
    """
    with beneath_autograd():
        stand_in = torch.nn.Parameter(torch.ones(STAND_IN, dtype=like.dtype, device=like.device))
        given = torch.ones_like(stand_in)
        gradient = stand_in.grad = given.clone()
    try:
        with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
            update_one(optimizer, group, stand_in)
            update_one(optimizer, group, stand_in)
            same = torch.equal(gradient, given)
    except KeyError:
        return _Shown(0.0, writes_gradient=True)
    finally:
        states = states_of(optimizer).pop(stand_in, {}).values()
    size = sum(bytes_of(s) for s in states if isinstance(s, torch.Tensor) and s.dim())
    return _Shown(size / bytes_of(stand_in), writes_gradient=not same)
