"""Lets all ranks reach the same decision, through a gloo group of their own that takes no device memory."""

from __future__ import annotations

import atexit
import contextlib
from typing import Any

from lowtide.checkpoint.tree import torch

_ours: tuple[Any, Any] | None = None
"""The world group in which the ranks decide, and Lowtide's gloo group for it."""


def _group() -> Any:
    """The gloo group for decisions; None if there is only one process. The first call is a collective."""
    global _ours  # noqa: PLW0603 - one per process
    t = torch()
    if t is None or not t.distributed.is_available() or not t.distributed.is_initialized():
        return None
    if t.distributed.get_world_size() == 1:
        return None
    world = t.distributed.group.WORLD
    if _ours is None:
        atexit.register(_leave)
    if _ours is None or _ours[0] is not world:
        _ours = world, t.distributed.new_group(backend="gloo")
    return _ours[1]


def _leave() -> None:
    """Destroy Lowtide's group while the interpreter is still intact.

    A gloo thread that releases a collective's last tensor during interpreter shutdown aborts the process (see PyTorch pull
    request 179291). A script that does not destroy its own groups could be aborted because of Lowtide's group alone.
    """
    global _ours  # noqa: PLW0603
    if _ours is not None:
        with contextlib.suppress(ValueError, RuntimeError):  # the script has destroyed all groups, or a peer has gone
            torch().distributed.destroy_process_group(_ours[1])
        _ours = None  # dropping the last reference joins the group's threads


def rank() -> int:
    """This process's rank; 0 if there is only one process."""
    return 0 if _group() is None else int(torch().distributed.get_rank())


def world() -> int:
    """Number of ranks; 1 if there is only one process."""
    return 1 if _group() is None else int(torch().distributed.get_world_size())


def gather(value: Any) -> list[Any]:
    """The values of all ranks, in rank order. A collective: every rank must call it."""
    group = _group()
    if group is None:
        return [value]
    found: list[Any] = [None] * torch().distributed.get_world_size()
    torch().distributed.all_gather_object(found, value, group=group)
    return found


def highest_each(values: list[int]) -> list[int]:
    """The element-wise maximum over all ranks. A collective: every rank must call it."""
    group = _group()
    if group is None:
        return values
    t = torch()
    found = t.tensor(values, dtype=t.int64)
    t.distributed.all_reduce(found, op=t.distributed.ReduceOp.MAX, group=group)
    return [int(value) for value in found]


def highest(value: int) -> int:
    """The maximum over all ranks. A collective: every rank must call it."""
    return highest_each([value])[0]


def first(value: Any) -> Any:
    """The first rank's value. A collective: every rank must call it."""
    return gather(value)[0]
