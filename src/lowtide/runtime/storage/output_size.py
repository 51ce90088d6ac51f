"""Bytes of an operator's outputs, predicted before it runs: for meters that cannot cap it."""

from __future__ import annotations

from typing import Any

import torch
from lowtide.runtime.storage.arguments import flatten, map_tensors
from lowtide.runtime.tensors import beneath_autograd, on_storage


def fresh_bytes(func: Any, args: Any, kwargs: Any) -> int | None:
    """Bytes of the storages that an operator will create, found by running it on the meta device; None if that fails."""
    given: set[int] = set()

    def without_data(tensor: torch.Tensor, _: int | str | None) -> torch.Tensor:
        alike = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
        given.add(alike.untyped_storage()._cdata)
        return alike

    try:
        with beneath_autograd():
            plain = [map_tensors(a, None, without_data) for a in args]
            named = {k: "meta" if k == "device" else map_tensors(v, None, without_data) for k, v in kwargs.items()}
            made = [t.untyped_storage() for t in flatten(func(*plain, **named)) if isinstance(t, torch.Tensor)]
    except (RuntimeError, NotImplementedError, TypeError, ValueError):  # no meta kernel, or it reads its data
        return None
    return _bytes_but(given, made)


def bytes_beside(out: Any, args: Any, kwargs: Any) -> int:
    """Bytes of the storages of an operator's results that are not storages of its arguments."""
    given = {t.untyped_storage()._cdata for t in (*flatten(args), *kwargs.values()) if isinstance(t, torch.Tensor)}
    return _bytes_but(given, [t.untyped_storage() for t in flatten(out) if isinstance(t, torch.Tensor) and on_storage(t)])


def _bytes_but(given: set[int], made: list[torch.UntypedStorage]) -> int:
    """Bytes of storages, each counted once, except those at the addresses ``given``."""
    return sum({s._cdata: s.nbytes() for s in made if s._cdata not in given}.values())
