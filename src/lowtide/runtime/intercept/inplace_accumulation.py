"""Recognises what autograd does in place in a plain run but out of place under a dispatch mode.

The engine adds two gradients of one tensor in place if it alone holds one of them. Under a dispatch mode it allocates a third
tensor instead (``torch/csrc/autograd/input_buffer.cpp``, ``at::isTensorSubclassLike``). A sparse gradient becomes the
parameter's ``grad`` as it is, if nothing else holds the gradient or its parts
(``torch/csrc/autograd/functions/accumulate_grad.h``, case 1.2). Under a mode Python has seen them, which counts as a holder,
so the gradient is copied.

A recording must show the plain run's memory. So such sums and copies are recognised by the same reference counts that the
engine looks at, and count as taking no memory. Those counts leave two things open. The first is whether Python holds a tensor:
under a mode every tensor has a Python object, so that object's own reference count is checked too. The second is whether the
engine makes the sum, or a node itself does (``torch.std_mean``, matrix decompositions, a ``Function`` in Python). In a sum of
the engine the first gradient has been waiting; in a sum of a node, the node has just made it.

Some derivatives fill a tensor of zeros in place in the plain run, and out of place under a dispatch mode
(``areAnyTensorSubclassLike`` in ``torch/csrc/autograd/FunctionsManual.cpp`` and ``aten/src/ATen/native``), which takes twice
the bytes. Lowtide runs them in place, as the plain run does.
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
"""Operators that derivatives call under a mode: what the plain run calls instead, and in which nodes (without "Backward0")."""


def in_place(func: Any, args: Any) -> Any:
    """The operator that the plain run calls here: the in-place variant in certain derivatives, otherwise ``func`` itself."""
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
    """Reads the reference counts when the engine sums, or copies, a tensor that nothing else holds."""

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
    """Reference counts of an operator's first argument: of the tensor in C++, of its storage, of its Python object."""
    shared = torch._C._storage_Use_Count(args[0].untyped_storage()._cdata)  # type: ignore[attr-defined]
    return args[0]._use_count(), shared, sys.getrefcount(args[0])  # naming the tensor would add a reference


def _sparse_references(args: Any) -> tuple[int, int]:
    """Reference counts of an operator's first argument, a sparse tensor: in C++, and of its Python object."""
    return args[0]._use_count(), sys.getrefcount(args[0])


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements fill a contiguous range of memory, in any order of dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.size(), strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def running() -> int:
    """The sequence number of the autograd node that is running; -1 if none is."""
    node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
    return -1 if node is None else int(node._sequence_nr())


def graph_task() -> int:
    """The id of the running graph task; -1 if none is. A backward within a node is a separate task with a higher id."""
    return int(torch._C._current_graph_task_id())  # type: ignore[attr-defined]


def reaches_twice() -> bool:
    """Whether the running node passes two gradients to the same input: the engine then adds what the node has just made."""
    node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    return len(set(edges)) < len(edges)


@final
class InPlaceAccumulation:
    """Recognises sums of the engine that the plain run computes in place, and copies that the plain run does not make."""

    def __init__(self) -> None:
        """Measure the reference counts that a mode sees for a tensor that only the engine holds."""
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
        """Whether the plain run adds these two arguments in place, provided that the engine makes the sum."""
        if self._alone is None or len(args) != 2 or not isinstance(args[1], torch.Tensor):
            return False
        if args[0].size() != args[1].size() or args[0].dtype is not args[1].dtype:
            return False
        if torch._C._current_autograd_node() is None:  # type: ignore[attr-defined]
            return False
        return args[0].layout is torch.strided and _is_dense(args[0]) and _references(args) == self._alone

    def takes_over(self, args: Any) -> bool:
        """Whether a sparse gradient is copied that a parameter takes over as it is in the plain run."""
        if self._sparse_alone is None or args[0].layout is not torch.sparse_coo:
            return False
        node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
        if node is None or node.name() != "torch::autograd::AccumulateGrad":
            return False
        if _sparse_references(args) != self._sparse_alone:  # naming the tensor would add a reference
            return False
        with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
            return bool(args[0]._indices().is_contiguous() and args[0]._values().is_contiguous())
