"""Recognises what autograd does in place in a plain run but out of place under a dispatch mode.

The engine adds two gradients of one tensor in place if it alone holds one of them. Under a dispatch mode it allocates a third
tensor instead (``torch/csrc/autograd/input_buffer.cpp``, ``at::isTensorSubclassLike``). A sparse gradient becomes the
parameter's ``grad`` as it is, if nothing else holds the gradient or its parts
(``torch/csrc/autograd/functions/accumulate_grad.h``, case 1.2). Under a mode Python has seen them, which counts as a holder,
so the gradient is copied.

Lowtide must take, and a recording must show, the plain run's memory. So such sums and copies are recognised by the same
reference counts that the engine looks at. Those counts leave two things open. The first is whether Python holds a tensor:
under a mode every tensor has a Python object, so that object's own reference count is checked too. The second is whether the
engine makes the sum, or a node itself does (``torch.std_mean``, matrix decompositions, a ``Function`` in Python), which may
read the first gradient again afterwards. Where that is certain, because no Python code lies between the engine and the sum
and the node's derivative adds nothing, Lowtide makes the sum in place. Elsewhere a recording only counts it as taking no
memory: in a sum of the engine the first gradient has been waiting; in a sum of a node, the node has just made it.

Some derivatives fill a tensor of zeros in place in the plain run, and out of place under a dispatch mode
(``areAnyTensorSubclassLike`` in ``torch/csrc/autograd/FunctionsManual.cpp`` and ``aten/src/ATen/native``), which takes twice
the bytes. Lowtide runs them in place, as the plain run does.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from typing import Any, Final, NamedTuple

from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import _engine_run_backward
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import torch
from lowtide.runtime.intercept.dispatch_mode import Mode
from lowtide.runtime.storage.views import sole_owner
from lowtide.runtime.tensors import is_dense

_ATEN: Final = torch.ops.aten
_ADD: Final = _ATEN.add.Tensor
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

_ADDS_NOTHING: Final = frozenset({
    "Abs", "Acos", "AdaptiveAvgPool2D", "AdaptiveMaxPool2D", "Add", "Addmm", "Amax", "Amin", "AsStrided", "AvgPool2D",
    "AvgPool3D", "Baddbmm", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits", "Bmm", "Cat", "Clamp", "ClampMax",
    "ClampMin", "Clone", "ConstantPadNd", "Convolution", "Cos", "Cumsum", "Diagonal", "Div", "Elu", "Embedding", "Exp",
    "Expand", "Flip", "Gather", "Gelu", "Glu", "GridSampler2D", "Hardsigmoid", "Hardswish", "Hardtanh", "HuberLoss", "Im2Col",
    "Index", "IndexAdd", "IndexSelect", "LeakyRelu", "Log", "Log1P", "LogSigmoid", "LogSoftmax", "Logsumexp", "MaskedFill",
    "MaskedSelect", "Max", "MaxPool2DWithIndices", "MaxPool3DWithIndices", "Maximum", "Mean", "Min", "Minimum", "Mish", "Mm",
    "MseLoss", "Mul", "Mv", "NativeBatchNorm", "NativeDropout", "NativeLayerNorm", "Neg", "NllLoss", "NllLoss2D", "Permute",
    "PixelShuffle", "PixelUnshuffle", "PreluKernel", "Reciprocal", "ReflectionPad2D", "Relu", "Repeat", "ReplicationPad2D",
    "ReshapeAlias", "Roll", "Rsqrt", "Rsub", "ScaledDotProductEfficientAttention", "ScaledDotProductFlashAttention",
    "ScaledDotProductFlashAttentionForCpu", "Scatter", "ScatterAdd", "Select", "Sigmoid", "Silu", "Sin", "Slice",
    "SmoothL1Loss", "Softmax", "Softplus", "Sort", "Split", "SplitWithSizes", "Sqrt", "Squeeze", "Stack", "Sub", "Sum", "T",
    "Take", "Tanh", "Threshold", "ToCopy", "Topk", "Transpose", "Tril", "Triu", "Unbind", "Unfold", "UnsafeSplit",
    "UnsafeView", "Unsqueeze", "UpsampleBicubic2D", "UpsampleBilinear2D", "UpsampleNearest1D", "UpsampleNearest2D", "View",
    "Where",
})  # fmt: skip
"""Nodes whose derivatives (``tools/autograd/derivatives.yaml``) call no ``add``: each sum under them is the engine's."""
_PYTHONLESS: Final = _engine_run_backward.__code__
"""The frame below which only C++ runs until a hook or a ``Function`` is called."""


def in_place(func: Any, args: Any) -> Any:
    """The operator that the plain run calls here: the in-place variant in certain derivatives, otherwise ``func`` itself.

    To be called by a dispatch mode's ``__torch_dispatch__`` itself: the frame that called that one is looked at.
    """
    if func is _ADD:
        caller = sys._getframe(1).f_back
        of_engine = caller is None or caller.f_code is _PYTHONLESS  # a device's thread has no caller
        return _ATEN.add_.Tensor if of_engine and _engine_adds_in_place(args) else func
    found = _IN_PLACE.get(func)
    if found is None:
        return func
    node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
    if node is None or node.name().partition("Backward")[0] not in found[1]:
        return func
    target = args[0]
    alone = not target.requires_grad and target._base is None and sole_owner(target.untyped_storage(), 1)
    return found[0] if alone else func


def _engine_adds_in_place(args: Any) -> bool:
    """Whether the plain run's engine adds these two arguments in place, given that no Python code makes the sum."""
    if torch.is_grad_enabled() or not adds(args) or args[1].layout is not torch.strided:
        return False
    node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
    name, _, number = node.name().partition("Backward")  # derivatives of derivatives are named ...BackwardBackward0
    certain = isinstance(node, BackwardCFunction) or (name in _ADDS_NOTHING and number.isdigit())
    return certain and not _get_current_dispatch_mode_stack()  # under another mode the plain run is out of place, too


class _Probe(Mode):
    """Reads the reference counts when the engine sums, or copies, a tensor that nothing else holds."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: tuple[int, int, int] | None = None
        self.sparse: tuple[int, int] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ADD:
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


class _Alone(NamedTuple):
    """Reference counts that a mode sees where only the engine holds a gradient; None: this version of torch tells none."""

    dense: tuple[int, int, int] | None
    sparse: tuple[int, int] | None


@functools.cache
def _alone() -> _Alone:
    """The counts of a tensor that only the engine holds, measured in a thread of its own: no mode and no hook is on there."""
    probe = _Probe()
    if hasattr(torch.Tensor, "_use_count"):
        measuring = threading.Thread(target=_measure, args=(probe,))
        with contextlib.suppress(RuntimeError):  # no thread can be started any more, or none more
            measuring.start()
            measuring.join()
    return _Alone(probe.seen, probe.sparse)


def _measure(probe: _Probe) -> None:
    x = torch.ones(2, requires_grad=True, device="cpu")
    y = x * 1
    total = (y * 2).sum() + (y * 3).sum()
    with probe:
        torch.autograd.grad(total, x)
    weight = torch.ones(2, 1, requires_grad=True, device="cpu")
    loss = torch.nn.functional.embedding(torch.tensor([0, 1], device="cpu"), weight, sparse=True).square().sum()
    with probe:
        loss.backward()  # type: ignore[no-untyped-call]


def adds(args: Any) -> bool:
    """Whether the plain run adds these two arguments in place, provided that the engine makes the sum."""
    if torch._C._current_autograd_node() is None or len(args) != 2 or not isinstance(args[1], torch.Tensor):  # type: ignore[attr-defined]
        return False
    if args[0].is_nested or args[1].is_nested or args[0].layout is not torch.strided:
        return False  # the engine adds neither in place
    if args[0].size() != args[1].size() or args[0].dtype is not args[1].dtype:
        return False
    alone = _alone().dense
    return alone is not None and _references(args) == alone and is_dense(args[0])


def takes_over(args: Any) -> bool:
    """Whether a sparse gradient is copied that a parameter takes over as it is in the plain run."""
    node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
    if args[0].layout is not torch.sparse_coo or node is None or node.name() != "torch::autograd::AccumulateGrad":
        return False
    alone = _alone().sparse
    if alone is None or _sparse_references(args) != alone:  # naming the tensor would add a reference
        return False
    with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
        return bool(args[0]._indices().is_contiguous() and args[0]._values().is_contiguous())
