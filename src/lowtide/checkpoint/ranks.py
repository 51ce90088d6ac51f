"""Several ranks decide together: through a gloo group of their own, so that no device memory is taken."""

from __future__ import annotations

import atexit
import contextlib
from typing import Any

from lowtide.checkpoint.tree import torch

_ours: tuple[Any, Any] | None = None
"""The world that decisions were made in, and our group in it."""


def _group() -> Any:
    """The group for decisions; None where this process is alone. The first call is a collective."""
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
    """End our group while the interpreter is whole.

    A gloo thread that drops a collective's last tensor once the interpreter shuts down aborts the process (PyTorch pull
    request 179291 tells how); a script that leaves its own groups to the end of the process would meet that with ours alone.
    """
    global _ours  # noqa: PLW0603
    if _ours is not None:
        with contextlib.suppress(ValueError, RuntimeError):  # the script has ended all groups, or a peer is gone
            torch().distributed.destroy_process_group(_ours[1])
        _ours = None  # the group's threads are joined once nothing holds it


def rank() -> int:
    """This process's rank; 0 where it is alone."""
    return 0 if _group() is None else int(torch().distributed.get_rank())


def world() -> int:
    """How many ranks take part."""
    return 1 if _group() is None else int(torch().distributed.get_world_size())


def gather(value: Any) -> list[Any]:
    """What each rank has, in their order: a collective, which every rank must call."""
    group = _group()
    if group is None:
        return [value]
    found: list[Any] = [None] * torch().distributed.get_world_size()
    torch().distributed.all_gather_object(found, value, group=group)
    return found


def highest_each(values: list[int]) -> list[int]:
    """The highest of all ranks' numbers, place by place: a collective, which every rank must call."""
    group = _group()
    if group is None:
        return values
    t = torch()
    found = t.tensor(values, dtype=t.int64)
    t.distributed.all_reduce(found, op=t.distributed.ReduceOp.MAX, group=group)
    return [int(value) for value in found]


def highest(value: int) -> int:
    """The highest of all ranks' numbers: a collective, which every rank must call."""
    return highest_each([value])[0]


def first(value: Any) -> Any:
    """What the first rank has: a collective, which every rank must call."""
    return gather(value)[0]
