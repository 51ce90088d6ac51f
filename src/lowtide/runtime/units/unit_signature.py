"""What kind of unit a call begins: two of a kind are expected to run the same operators."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from lowtide.runtime.tensors import grad_of, modules_of


@dataclass(frozen=True, slots=True)
class UnitSignature:
    """What is known of a unit when it begins.

    Attributes:
        call: the module, what of it trains, and the shapes that it is given; nothing for a unit of plain functions.
        accumulates: whether gradients are there already.
        engaged: whether gradients are consumed within the backward.
        after: of several optimizers the one that stepped last: where the script is in its round.
    """

    call: tuple[Any, ...]
    accumulates: bool = False
    engaged: bool = False
    after: int = 0

    def siblings(self) -> tuple[UnitSignature, ...]:
        """Kinds that run nearly the same, nearest first."""
        other = replace(self, accumulates=not self.accumulates)
        return (other, replace(self, after=0), replace(other, after=0)) if self.after else (other,)


def kind_of(module: torch.nn.Module, args: Any, kwargs: Any, *, engaged: bool, after: int, turn: int) -> UnitSignature:
    """What kind of unit a root call begins.

    Where a module is called with tensors that take its parameters' places (the inner steps of meta-learning) and are others
    each time, it is told by itself, and by its turn: how many units came before in the step.
    """
    shapes: list[Any] = []
    _shapes((args, kwargs), shapes, 0)
    modules = modules_of(module)
    parameters = [p for m in modules for p in m._parameters.values() if p is not None]
    own = parameters and isinstance(parameters[0], torch.nn.Parameter)
    who = id(parameters[0]) if own else (id(module), turn if parameters else 0)
    modes = hash(tuple(m.training for m in modules))
    frozen = hash(tuple(p.requires_grad for p in parameters))
    device = parameters[0].device.type if parameters else "cpu"
    call = (type(module), who, modes, frozen, _autocast(device), tuple(shapes))
    return UnitSignature(call, any(grad_of(p) is not None for p in parameters), engaged, after)


def _autocast(device: str) -> tuple[Any, ...]:
    """What autocast does on the CPU and on a model's own device."""
    types = dict.fromkeys(("cpu", device))
    return tuple(torch.get_autocast_dtype(t) if t != "meta" and torch.is_autocast_enabled(t) else None for t in types)


def sizes_of(kind: UnitSignature) -> tuple[Any, tuple[int, ...]]:
    """A kind without the sizes of its tensors, and these sizes in a row."""
    *rest, shapes = kind.call
    alike = tuple((len(shape), dtype, grad) for shape, dtype, grad in shapes)
    skeleton = (*rest, alike, kind.accumulates, kind.engaged, kind.after)
    return skeleton, tuple(size for shape, _, _ in shapes for size in shape)


def is_smaller(kind: UnitSignature, other: UnitSignature) -> bool:
    """Whether a kind is another one but for sizes of its tensors, none of which is larger."""
    if kind == other or not (kind.call and other.call):
        return False
    (alike, sizes), (others, limits) = sizes_of(kind), sizes_of(other)
    numbers = all(type(size) is int for size in (*sizes, *limits))  # a nested tensor's are not
    return numbers and alike == others and all(map(operator.le, sizes, limits))


def _shapes(item: Any, found: list[Any], depth: int) -> None:
    if isinstance(item, torch.Tensor):
        found.append((tuple(item.shape), item.dtype, item.requires_grad))
    elif isinstance(item, dict):
        for key in item:
            _shapes(item[key], found, depth)
    elif isinstance(item, (list, tuple)) and depth < 4:
        for element in item:
            _shapes(element, found, depth + 1)

