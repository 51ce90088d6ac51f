"""Finds and replaces the tensors among an operator's arguments, and says which of them it writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from lowtide.runtime.storage.op_schema import OpInfo
from lowtide.runtime.tensors import on_storage

PLAIN_TYPES: Final = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
"""Tensor types whose operators a mode handles directly; other types may intercept operators themselves."""
NO_DISPATCH: Final = torch.Tensor.__torch_dispatch__
"""``__torch_dispatch__`` of types that do not intercept operators, including subclasses made by ``as_subclass``."""


def map_tensors(item: Any, at: int | str | None, visit: Callable[[torch.Tensor, int | str | None], Any]) -> Any:
    """An argument with each tensor in it replaced by the result of ``visit``; lists and tuples are searched.

    This is no recursive closure: a closure that calls itself is a reference cycle and holds tensors until the collector runs.

    Args:
        item: the argument.
        at: its position or name; None for an element of a list or tuple.
        visit: called with each tensor and its ``at``.
    """
    if isinstance(item, torch.Tensor):
        return visit(item, at)
    if type(item) is list:
        return [map_tensors(x, None, visit) for x in item]
    if type(item) is tuple:
        return tuple(map_tensors(x, None, visit) for x in item)
    return item


def flatten(out: Any) -> list[Any]:
    """An operator's result, with nested lists and tuples, as one flat list."""
    if isinstance(out, torch.Tensor):
        return [out]
    if isinstance(out, (list, tuple)):
        return [x for item in out for x in flatten(item)]
    return [out]


def written_by(info: OpInfo, args: Any, kwargs: Any) -> list[tuple[torch.Tensor, bool]]:
    """Tensors that an operator writes, in argument order, each with whether the write is secret (missing in the schema)."""
    found = [
        (t, i in info.secret_at)
        for i, a in enumerate(args) if i in info.writes_at or i in info.secret_at
        for t in flatten((a,)) if isinstance(t, torch.Tensor)
    ]
    return found + [(t, False) for k, v in kwargs.items() if k in info.writes_at
                    for t in flatten((v,)) if isinstance(t, torch.Tensor)]


def overwritten_by(info: OpInfo, args: Any, kwargs: Any) -> list[tuple[int, torch.Tensor, bool]]:
    """Like `written_by`, with each tensor's position in that list, and only the first tensor of each storage.

    A storage gets one new version, however many views of it the operator writes.
    """
    seen: set[int] = set()
    found = []
    for place, (tensor, secret) in enumerate(written_by(info, args, kwargs)):
        address = tensor.untyped_storage()._cdata if on_storage(tensor) else -1
        if address < 0 or address not in seen:
            found.append((place, tensor, secret))
            seen.add(address)
    return found
