"""Where autograd's engine sums two gradients of one tensor.

The engine adds in place where it alone holds one of the two, unless a dispatch mode is on: then it makes a third tensor
(``torch/csrc/autograd/input_buffer.cpp``, ``at::isTensorSubclassLike``). What a recording shows is the plain run's memory, so
such sums are recognised, by the same counts of references that the engine looks at, and counted as in place.
"""

from __future__ import annotations

from typing import Any, final

from torch.utils._python_dispatch import TorchDispatchMode

import torch


class _Probe(TorchDispatchMode):
    """Looks at the references of one sum that the engine makes of tensors that nobody else holds."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: tuple[int, int] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add.Tensor:
            self.seen = _references(args[0])
        return func(*args, **(kwargs or {}))


def _references(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return tensor._use_count(), torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements lie side by side, in any order of dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.size(), strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


@final
class Engine:
    """Knows a sum of the engine that the plain run makes in place."""

    def __init__(self) -> None:
        """Learn how many references to a tensor there are in a mode when only the engine holds it."""
        self._alone: tuple[int, int] | None = None
        if hasattr(torch.Tensor, "_use_count"):
            x = torch.ones(2, requires_grad=True)
            y = x * 1
            total = (y * 2).sum() + (y * 3).sum()
            with _Probe() as probe:
                torch.autograd.grad(total, x)
            self._alone = probe.seen

    def adds(self, args: Any) -> bool:
        """Whether the plain run adds these two in place."""
        if self._alone is None or len(args) != 2 or not isinstance(args[1], torch.Tensor):
            return False
        a, b = args
        if a.size() != b.size() or a.dtype is not b.dtype or torch._C._current_autograd_node() is None:  # type: ignore[attr-defined]
            return False
        return any(t.layout is torch.strided and _is_dense(t) and _references(t) == self._alone for t in (a, b))
