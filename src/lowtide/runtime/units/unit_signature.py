"""The signature of a unit, taken when it begins: two units of one kind are expected to run the same operators."""

from __future__ import annotations

import math
from collections import UserDict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from lowtide.runtime.tensors import grad_of, modules_of

DEEPEST: Final = 6
"""Containers within containers in which a call's tensors are looked for."""


@dataclass(frozen=True, slots=True)
class UnitSignature:
    """What is known about a unit when it begins.

    Attributes:
        call: the module, its training flags and trainable parameters, autocast, and the shapes of its inputs; empty for a
            unit of plain functions.
        accumulates: whether gradients exist already.
        engaged: whether a lever takes gradients away within the backward.
        after: where there are several optimizers, the one that stepped last (its ``id``), which says where the script is in
            its round; else 0.
        plain_checkpoints: whether the script's calls of ``torch.utils.checkpoint`` run their functions only once.
    """

    call: tuple[Any, ...]
    accumulates: bool = False
    engaged: bool = False
    after: int = 0
    plain_checkpoints: bool = False

    def siblings(self) -> tuple[UnitSignature, ...]:
        """Kinds that run nearly the same operators, nearest first."""
        other = replace(self, accumulates=not self.accumulates)
        return (other, replace(self, after=0), replace(other, after=0)) if self.after else (other,)


def kind_of(module: torch.nn.Module, args: Any, kwargs: Any, *, engaged: bool, after: int, turn: int) -> UnitSignature:
    """The kind of unit that a root call begins.

    A module is identified by its first parameter. Where other tensors stand in for its parameters (the inner steps of
    meta-learning), they differ each time: the module is then identified by itself and by its turn.

    Args:
        module: the root module.
        args: the call's positional arguments.
        kwargs: the call's keyword arguments.
        engaged: whether a lever takes gradients away within the backward.
        after: the ``id`` of the optimizer that stepped last, where there are several; else 0.
        turn: how many units came before in the step.
    """
    shapes: list[Any] = []
    _shapes((args, kwargs), shapes, 0)
    modules = modules_of(module)
    parameters = parameters_of(modules)
    own = parameters and isinstance(parameters[0], torch.nn.Parameter)
    who = id(parameters[0]) if own else (id(module), turn if parameters else 0)
    device = parameters[0].device.type if parameters else "cpu"
    call = (type(module), who, *_flags(modules, parameters), _autocast(device), tuple(shapes))
    return UnitSignature(call, any(grad_of(p) is not None for p in parameters), engaged, after)


def is_of(kind: UnitSignature, module: torch.nn.Module) -> bool:
    """Whether a unit of this kind would begin with a call of the module, which has parameters of its own."""
    modules = modules_of(module)
    parameters = parameters_of(modules)
    return bool(parameters) and kind.call[:4] == (type(module), id(parameters[0]), *_flags(modules, parameters))


def parameters_of(modules: Iterable[torch.nn.Module]) -> list[torch.nn.Parameter]:
    """The modules' own parameters, in order; shared ones several times."""
    return [p for m in modules for p in m._parameters.values() if p is not None]


def _flags(modules: Iterable[torch.nn.Module], parameters: Iterable[torch.nn.Parameter]) -> tuple[int, int]:
    """Digests of the modules' modes, and of which parameters are trained."""
    return hash(tuple(m.training for m in modules)), hash(tuple(p.requires_grad for p in parameters))


def _autocast(device: str) -> tuple[Any, ...]:
    """Autocast's data types on the CPU and on a model's own device; None where it is off."""
    types = dict.fromkeys(("cpu", device))
    return tuple(torch.get_autocast_dtype(t) if t != "meta" and torch.is_autocast_enabled(t) else None for t in types)


def sizes_of(kind: UnitSignature) -> tuple[Any, tuple[int, ...]]:
    """Split a kind into what is left without its tensors' sizes, and all these sizes in one tuple."""
    *rest, shapes = kind.call
    alike = tuple((len(shape), dtype, grad) for shape, dtype, grad in shapes)
    skeleton = (*rest, alike, kind.accumulates, kind.engaged, kind.after, kind.plain_checkpoints)
    return skeleton, tuple(size for shape, _, _ in shapes for size in shape)


def likeness(kind: UnitSignature) -> Any:
    """What a kind has in common with those that differ only in the sizes of their tensors."""
    return sizes_of(kind)[0] if kind.call else kind


def are_alike(kind: UnitSignature, other: UnitSignature) -> bool:
    """Whether two kinds differ only in the sizes of their tensors, or not at all."""
    if not (kind.call and other.call):
        return False
    (alike, sizes), (others, more) = sizes_of(kind), sizes_of(other)
    return alike == others and all(type(size) is int for size in (*sizes, *more))  # a nested tensor's sizes are not


def input_bytes(kind: UnitSignature) -> int:
    """Bytes of the tensors that are passed to a unit's first call."""
    shapes = kind.call[-1] if kind.call else ()
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype, _ in shapes)


def _shapes(item: Any, found: list[Any], depth: int) -> None:
    """Collect the shapes of the tensors in arguments. No other mappings are read: reading an item may load or draw it."""
    if isinstance(item, UserDict):  # what tokenizers return
        item = item.data
    if isinstance(item, torch.Tensor):
        ragged = item.is_nested and item.layout is torch.strided  # such a tensor has no shape
        shape = ("nested", item.numel()) if ragged else tuple(item.shape)
        found.append((shape, item.dtype, item.requires_grad))
    elif depth >= DEEPEST:
        return
    elif isinstance(item, dict):
        for key in item:
            _shapes(item[key], found, depth + 1)
    elif isinstance(item, (list, tuple)):
        for element in item:
            _shapes(element, found, depth + 1)
