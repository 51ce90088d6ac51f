"""Tensors among the arguments of a call: found, replaced, and told by what the operator does to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from lowtide.runtime.storage.op_schema import OpInfo
from lowtide.runtime.tensors import on_storage

PLAIN_TYPES: Final = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
"""Types of tensors whose operators a mode may take as they are; others have a say of their own."""
NO_DISPATCH: Final = torch.Tensor.__torch_dispatch__
"""What types have that do not see operators themselves, subclasses made by ``as_subclass`` among them."""


def map_tensors(item: Any, at: int | str | None, visit: Callable[[torch.Tensor, int | str | None], Any]) -> Any:
    """An argument with ``visit`` applied to each tensor in it.

    Not a closure that calls itself: that would be a reference cycle, and would hold tensors until the collector runs.

    Args:
        item: the argument.
        at: its position or name; None for what lies inside a list.
        visit: told each tensor and ``at``.
    """
    if isinstance(item, torch.Tensor):
        return visit(item, at)
    if type(item) is list:
        return [map_tensors(x, None, visit) for x in item]
    if type(item) is tuple:
        return tuple(map_tensors(x, None, visit) for x in item)
    return item


def flatten(out: Any) -> list[Any]:
    """An operator's result as a flat list."""
    if isinstance(out, torch.Tensor):
        return [out]
    if isinstance(out, (list, tuple)):
        return [x for item in out for x in flatten(item)]
    return [out]


def written_by(info: OpInfo, args: Any, kwargs: Any) -> list[tuple[torch.Tensor, bool]]:
    """Tensors that an operator writes, in the order of its arguments, and whether it does so secretly."""
    found = [
        (t, i in info.secret_at)
        for i, a in enumerate(args) if i in info.writes_at or i in info.secret_at
        for t in flatten((a,)) if isinstance(t, torch.Tensor)
    ]
    return found + [(t, False) for k, v in kwargs.items() if k in info.writes_at
                    for t in flatten((v,)) if isinstance(t, torch.Tensor)]


def overwritten_by(info: OpInfo, args: Any, kwargs: Any) -> list[tuple[int, torch.Tensor, bool]]:
    """The same with their places, of each storage the first alone: it has one next version, however many views are written."""
    seen: set[int] = set()
    found = []
    for place, (tensor, secret) in enumerate(written_by(info, args, kwargs)):
        address = tensor.untyped_storage()._cdata if on_storage(tensor) else -1
        if address < 0 or address not in seen:
            found.append((place, tensor, secret))
            seen.add(address)
    return found
