"""What autograd's engine does otherwise while a dispatch mode is on.

The engine adds two gradients of one tensor in place where it alone holds one of them, unless a dispatch mode is on: then it
makes a third tensor (``torch/csrc/autograd/input_buffer.cpp``, ``at::isTensorSubclassLike``). A sparse gradient becomes a
parameter's where nobody else holds it or its parts (``torch/csrc/autograd/functions/accumulate_grad.h``, case 1.2); what
Python has seen of them counts as a holder, so that under a mode it is copied. What a recording shows is the plain run's
memory, so such sums and copies are recognised, by the same counts of references that the engine looks at, and counted as
taking nothing. Those counts do not tell what Python holds, as under a mode every tensor has its object there: the object's own
are looked at, too. Nor do they tell the engine's sums from those of a node itself (``torch.std_mean``, decompositions of
matrices, a ``Function`` in Python): in the former the first gradient has waited, in the latter the node has just made it.

Some derivatives fill a tensor of zeros in place where the plain run is on, and out of place where a dispatch mode is
(``areAnyTensorSubclassLike`` in ``torch/csrc/autograd/FunctionsManual.cpp`` and ``aten/src/ATen/native``), which takes twice
the bytes: those are run in place as the plain run does.
"""

from __future__ import annotations

import sys
from typing import Any, Final, final

import torch
from lowtide.runtime.intercept.dispatch_mode import Mode
from lowtide.runtime.storage.views import sole_owner

_ATEN: Final = torch.ops.aten
_SELECTING: Final = frozenset({"Max", "Min", "Kthvalue", "Median", "Nanmedian", "Mode", "Topk", "Sort"})
_IN_PLACE: Final[dict[Any, tuple[Any, frozenset[str]]]] = {
    _ATEN.scatter_add.default: (_ATEN.scatter_add_.default, frozenset({"Gather", "Cummax", "Cummin"})),
    _ATEN.scatter.src: (_ATEN.scatter_.src, _SELECTING),
    _ATEN.index_add.default: (_ATEN.index_add_.default, frozenset({"IndexSelect"})),
    _ATEN.put.default: (_ATEN.put_.default, frozenset({"Take"})),
    _ATEN.masked_scatter.default: (_ATEN.masked_scatter_.default, frozenset({"MaskedSelect"})),
    _ATEN.index_put.default: (_ATEN.index_put_.default, frozenset({"Index"})),
}
"""What derivatives run out of place under a mode: what the plain run has instead, and in which nodes (without "Backward0")."""


def in_place(func: Any, args: Any) -> Any:
    """The operator that the plain run has in place of another: the same, or, in a derivative, that in place."""
    found = _IN_PLACE.get(func)
    if found is None:
        return func
    node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
    if node is None or node.name().partition("Backward")[0] not in found[1]:
        return func
    target = args[0]
    alone = not target.requires_grad and target._base is None and sole_owner(target.untyped_storage(), 1)
    return found[0] if alone else func


class _Probe(Mode):
    """Looks at the references of one sum that the engine makes of tensors that nobody else holds."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: tuple[int, int, int] | None = None
        self.sparse: tuple[int, int] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add.Tensor:
            self.seen = _references(args)
        elif func is torch.ops.aten.clone.default:
            self.sparse = _sparse_references(args)
        return func(*args, **(kwargs or {}))


def _references(args: Any) -> tuple[int, int, int]:
    """Holders of a tensor that is an operator's first argument, of its bytes, and of it in Python."""
    shared = torch._C._storage_Use_Count(args[0].untyped_storage()._cdata)  # type: ignore[attr-defined]
    return args[0]._use_count(), shared, sys.getrefcount(args[0])  # a name for the tensor here would be one more


def _sparse_references(args: Any) -> tuple[int, int]:
    """Holders of a sparse tensor that is an operator's argument, in C++ and in Python."""
    return args[0]._use_count(), sys.getrefcount(args[0])


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements lie side by side, in any order of dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.size(), strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def running() -> int:
    """The number of the node that runs; -1 for none."""
    node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
    return -1 if node is None else int(node._sequence_nr())


def graph_task() -> int:
    """The graph task that runs: a backward within a node is one of its own, with a higher number; -1 for none."""
    return int(torch._C._current_graph_task_id())  # type: ignore[attr-defined]


def reaches_twice() -> bool:
    """Whether the node that runs gives two gradients to the same: then the engine adds what it has just made."""
    node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    return len(set(edges)) < len(edges)


@final
class InPlaceAccumulation:
    """Knows a sum of the engine that the plain run makes in place, and a copy that it does not make."""

    def __init__(self) -> None:
        """Learn how many references to a tensor there are in a mode when only the engine holds it."""
        self._alone: tuple[int, int, int] | None = None
        self._sparse_alone: tuple[int, int] | None = None
        if hasattr(torch.Tensor, "_use_count"):
            x = torch.ones(2, requires_grad=True)
            y = x * 1
            total = (y * 2).sum() + (y * 3).sum()
            with _Probe() as probe:
                torch.autograd.grad(total, x)
            self._alone = probe.seen
            weight = torch.ones(2, 1, requires_grad=True)
            loss = torch.nn.functional.embedding(torch.tensor([0, 1]), weight, sparse=True).square().sum()
            with _Probe() as probe:
                loss.backward()  # type: ignore[no-untyped-call]
            self._sparse_alone = probe.sparse

    def adds(self, args: Any) -> bool:
        """Whether the plain run adds these two in place, if the sum is the engine's."""
        if self._alone is None or len(args) != 2 or not isinstance(args[1], torch.Tensor):
            return False
        if args[0].size() != args[1].size() or args[0].dtype is not args[1].dtype:
            return False
        if torch._C._current_autograd_node() is None:  # type: ignore[attr-defined]
            return False
        return args[0].layout is torch.strided and _is_dense(args[0]) and _references(args) == self._alone

    def takes_over(self, args: Any) -> bool:
        """Whether the plain run makes a sparse gradient a parameter's as it is, where it is copied now."""
        if self._sparse_alone is None or args[0].layout is not torch.sparse_coo:
            return False
        node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
        if node is None or node.name() != "torch::autograd::AccumulateGrad":
            return False
        if _sparse_references(args) != self._sparse_alone:  # a name for the tensor here would be one more
            return False
        with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
            return bool(args[0]._indices().is_contiguous() and args[0]._values().is_contiguous())
