"""Defers a wide linear layer's logits, so that the cross entropy after it runs over pieces of the vocabulary.

While this memory optimization is on, the product of a wide linear layer is *deferred*: the script gets a tensor that knows its
shape and how to compute itself. Casts, slices of rows, views and scaling are noted. ``cross_entropy`` of such a tensor runs
over pieces of the vocabulary, forward and backward, so that only one piece of the logits exists at a time. Every other use of
a deferred tensor gets the plain tensor, computed at that moment, with its graph.

One module, as each noted operation is at once a rule about shapes, about versions, and about the loss that takes it up: split
up, the parts would still have to be read together.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, final

from torch.nn import functional

import torch
from lowtide.base.errors import LeverError
from lowtide.base.lever_catalogue import LEAST_LOGITS_BYTES, LOSS, WIDE
from lowtide.runtime.levers.chunked_cross_entropy import ChunkedLoss, LossArguments, Step
from lowtide.runtime.monkeypatch import Wraps, unwrapped
from lowtide.runtime.run_figures import LeverFigures
from lowtide.runtime.storage.arguments import PLAIN_TYPES, flatten
from lowtide.runtime.tensors import node_of
from lowtide.runtime.torch_state import within_transform

SAMPLES: Final = 64
"""About how many elements of a tensor are sampled, to notice a write that no version counter shows."""
PIECE_BYTES: Final = 16 << 20
"""Maximum size of a piece of the logits (in float32) ..."""
PIECES: Final = 16
"""... and minimum number of pieces."""
NARROWEST: Final = 64
"""Minimum number of columns in a piece, whatever these two say: narrower products are slow."""

_METADATA: Final = frozenset(
    getattr(torch.Tensor, name) for name in (
        "size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point", "is_complex", "is_contiguous",
        "stride", "storage_offset", "get_device", "__len__", "is_inference", "is_signed", "is_pinned",
    )
) | frozenset(
    getattr(torch.Tensor, name).__get__ for name in (
        "shape", "dtype", "device", "ndim", "requires_grad", "layout", "is_cuda", "is_cpu", "is_sparse", "is_quantized",
        "is_meta", "is_mkldnn", "is_nested", "is_xla", "is_mps", "itemsize", "nbytes",
    ) if hasattr(torch.Tensor, name)
)
_SHAPES: Final = frozenset((torch.Tensor.view, torch.Tensor.reshape, torch.reshape, torch.Tensor.flatten, torch.flatten))
_COPIES: Final = frozenset((torch.Tensor.contiguous, torch.Tensor.clone, torch.clone))
_CASTS: Final = frozenset((torch.Tensor.float, torch.Tensor.double, torch.Tensor.half, torch.Tensor.bfloat16, torch.Tensor.to,
                           torch.Tensor.type))
_TURNS: Final = frozenset((torch.Tensor.transpose, torch.transpose, torch.Tensor.permute, torch.permute))
_SCALES: Final = frozenset((
    torch.Tensor.mul, torch.mul, torch.Tensor.div, torch.div, torch.Tensor.__mul__, torch.Tensor.__rmul__,
    torch.Tensor.__truediv__, torch.Tensor.true_divide, torch.Tensor.multiply, torch.Tensor.divide,
))
_CURVES: Final = frozenset((torch.tanh, torch.Tensor.tanh))
TOO_LATE: Final = (
    f"{LOSS}: the gradient of the logits is requested after their loss was computed in chunks: run again without --allow "
    f"{LOSS}"
)
_GRADIENTS: Final = ("register_hook", "retain_grad", "grad", "backward")
"""Functions that ask for a gradient of the logits themselves; by name, as some are wrapped while a budget is in force."""


def _node_getter() -> Any:
    return getattr(torch.Tensor, "grad_fn").__get__  # noqa: B009 - a getter, though its type says otherwise


_NODE: Final = _node_getter()


@dataclass(slots=True, weakref_slot=True, eq=False)
class _DeferredMatmul:
    """A deferred product and how to compute it.

    Attributes:
        rows: inputs; the last dimension is the features, the others are those of the deferred tensor.
        weight: (outputs, features).
        bias: (outputs,) or None.
        dtype: type in which autocast would multiply; None outside autocast.
        chain: element-wise functions after the product.
        turned: whether the classes are in dimension 1.
        versions: state of inputs, weight and bias when the script called for the product (see :func:`_versions`).
        make: computes the plain tensor: by the original call for the product itself, by the noted operation on the parent's
            plain tensor for a derived one.
        parent: the product that this one was derived from; None for the product itself.
        real: the plain tensor, once it was computed.
        children: products that were derived from this one.
        used: whether a loss was computed from it in pieces; set on the root.
    """

    rows: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    dtype: torch.dtype | None
    chain: tuple[Step, ...]
    turned: bool
    versions: tuple[Any, ...]
    make: Callable[[], torch.Tensor]
    parent: _DeferredMatmul | None = None
    real: torch.Tensor | None = None
    children: list[weakref.ref[_DeferredMatmul]] = field(default_factory=list)
    used: bool = False

    def root(self) -> _DeferredMatmul:
        """The product itself, from which this one was derived."""
        return self if self.parent is None else self.parent.root()


class Deferred(torch.Tensor):
    """A tensor without bytes; every use except those in :data:`_HANDLERS` computes the plain tensor."""

    _product: _DeferredMatmul

    @staticmethod
    def of(product: _DeferredMatmul, alike: torch.Tensor) -> Deferred:
        """Create a deferred tensor.

        Args:
            product: the product that it stands for.
            alike: a tensor of its size, strides and type, on the meta device.
        """
        made: Deferred = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            Deferred, alike.size(), strides=alike.stride(), dtype=alike.dtype, device=product.rows.device, requires_grad=True
        )
        made._product = product
        with torch._C.DisableTorchFunctionSubclass():
            unwrapped(torch.Tensor.register_hook)(made, _astray)
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Handle one call of torch's Python interface.

        Raises:
            LeverError: if it asks for a gradient of logits whose loss was computed in pieces.
        """
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        node = func in (_NODE, _node_getter())  # torch's own, and Lowtide's wrapper of it
        asks = node or getattr(func, "__name__", "") in _GRADIENTS
        if asks and any(d._product.root().used for d in _deferred((*args, *kwargs.values()))):
            if node:
                return _ConsumedNode(node_of(real(args[0])))
            raise LeverError(TOO_LATE)
        first = args[0] if args else None
        if isinstance(first, Deferred) and first._product.real is None and torch.is_grad_enabled():
            handler = _HANDLERS.get(func)
            if handler is not None and not any(isinstance(a, Deferred) for a in (*args[1:], *kwargs.values())):
                found = handler(first, func, args[1:], kwargs)
                if found is not None:
                    return found
        return func(*(_plain(a) for a in args), **{k: _plain(v) for k, v in kwargs.items()})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse every operator: below autograd, nothing correct can be done with a deferred tensor.

        Raises:
            LeverError: always.
        """
        raise LeverError(
            f"{LOSS}: {func} is called on deferred logits by code that bypasses torch's Python interface: "
            f"run again without --allow {LOSS}"
        )


class _ConsumedNode:
    """The node of logits whose loss was computed in pieces: hooks are refused, as that loss's gradient bypasses it."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        if name.startswith("register_"):
            raise LeverError(TOO_LATE)
        return getattr(self._node, name)


def _astray(_: torch.Tensor) -> None:
    """Hook: a gradient reached a deferred tensor itself, so it was used without computing the plain tensor.

    Raises:
        LeverError: always.
    """
    raise LeverError(f"{LOSS}: deferred logits are used where their gradient would be lost: run again without --allow {LOSS}")


def _deferred(items: Any) -> list[Deferred]:
    """The deferred tensors among arguments."""
    return [i for i in flatten(items) if isinstance(i, Deferred)]


def _plain(item: Any) -> Any:
    """An argument with plain tensors in place of its deferred ones."""
    if isinstance(item, Deferred):
        return real(item)
    if type(item) in (list, tuple):
        return type(item)(_plain(i) for i in item)
    return item


def real(deferred: Deferred) -> torch.Tensor:
    """The plain tensor of a deferred one, computed now if it was not yet.

    Raises:
        LeverError: if inputs, weight or bias changed since the script called for the product.
    """
    product = deferred._product
    root = product.root()
    if product.real is None:
        _make_all(root)
    return _made(product)


def _make_all(product: _DeferredMatmul) -> None:
    """Compute a product and everything derived from it: a later write to one must affect the others as in the baseline."""
    if product.real is None:
        if product.parent is None and _versions(product) != product.versions:
            raise LeverError(
                f"{LOSS}: the logits are read after the weights or inputs they come from have changed: read them "
                f"before the optimizer's step, or run again without --allow {LOSS}"
            )
        _made(product)
    for ref in product.children:
        child = ref()
        if child is not None:
            _make_all(child)


def _versions(product: _DeferredMatmul) -> tuple[Any, ...]:
    """State of inputs, weight and bias that reveals counted writes, another storage, and (CPU only) writes to ``.data``."""
    found: list[Any] = []
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        for t in (product.rows, product.weight, product.bias):
            if t is not None:
                flat = t.detach().flatten() if t.is_contiguous() else t.detach()[..., :1].flatten()
                few = repr(flat[:: max(1, flat.numel() // SAMPLES)].tolist()) if t.device.type == "cpu" else ""
                found.append((t._version, t.data_ptr(), few))
    return tuple(found)


# --- what is noted ---------------------------------------------------------------------------------------------------


def _derived(
    of: Deferred, func: Any, args: Any, kwargs: Any, *, alike: torch.Tensor, rows: torch.Tensor | None = None,
    steps: tuple[Step, ...] = (), turned: bool = False,
) -> Deferred:
    """Derive a deferred tensor from another by an operation that is noted."""
    parent = of._product
    product = _DeferredMatmul(
        rows=parent.rows if rows is None else rows,
        weight=parent.weight,
        bias=parent.bias,
        dtype=parent.dtype,
        chain=(*parent.chain, *steps),
        turned=turned,
        versions=parent.versions,
        make=lambda: func(_made(parent), *args, **kwargs),
        parent=parent,
    )
    made = Deferred.of(product, alike)
    parent.children.append(weakref.ref(product))
    return made


def _made(product: _DeferredMatmul) -> torch.Tensor:
    """The plain tensor of a product, computed if necessary, without a check of versions."""
    if product.real is None:
        with torch.inference_mode(mode=False), torch.enable_grad():
            product.real = product.make()
    return product.real


def _meta(of: Deferred) -> torch.Tensor:
    """A meta tensor of the same size, strides and type."""
    with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
        return torch.empty_strided(of.size(), of.stride(), dtype=of.dtype, device="meta")


def _on_meta(of: Deferred, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        found: torch.Tensor = func(_meta(of), *args, **kwargs)
    return found


def _shaped(of: Deferred, func: Any, args: Any, kwargs: Any) -> Deferred | None:
    """Note a view that keeps the classes whole, in the last dimension; None for any other."""
    if of._product.turned or any(isinstance(a, torch.dtype) for a in (*args, *kwargs.values())):
        return None
    alike = _on_meta(of, func, args, kwargs)
    if alike.dim() < 1 or alike.size(-1) != of.size(-1):
        return None
    rows = of._product.rows
    return _derived(of, func, args, kwargs, rows=rows.reshape(*alike.shape[:-1], rows.size(-1)), alike=alike)


def _indexed(of: Deferred, func: Any, args: Any, kwargs: Any) -> Deferred | None:
    """Note rows picked by slices, by numbers, or by one mask or tensor of row numbers; None for any other index."""
    if of._product.turned:
        return None
    index = args[0] if type(args[0]) is tuple else (args[0],)
    if any(isinstance(i, torch.Tensor) for i in index):
        return _picked(of, func, index)
    if any(i is None or not isinstance(i, (slice, int, type(...))) or isinstance(i, bool) for i in index):
        return None
    if ... in index:
        at = index.index(...)
        index = (*index[:at], *[slice(None)] * (of.dim() - len(index) + 1), *index[at + 1:])
    if len(index) > of.dim() or (len(index) == of.dim() and index[-1] != slice(None)):
        return None
    alike = _on_meta(of, func, args, kwargs)
    if alike.dim() < 1 or alike.size(-1) != of.size(-1):
        return None
    return _derived(of, func, args, kwargs, rows=of._product.rows[args[0]], alike=alike)


def _picked(of: Deferred, func: Any, index: tuple[Any, ...]) -> Deferred | None:
    chosen = index[0]
    if len(index) != 1 or type(chosen) is not torch.Tensor or chosen.dtype not in (torch.bool, torch.int64):
        return None
    if chosen.dim() >= of.dim() if chosen.dtype is torch.bool else of.dim() < 2:
        return None
    chosen = chosen.clone()  # the script may write to its own later
    rows = of._product.rows[chosen]
    with torch._C._DisableTorchDispatch():
        alike = torch.empty(*rows.shape[:-1], of.size(-1), dtype=of.dtype, device="meta")
    return _derived(of, func, (chosen,), {}, rows=rows, alike=alike)


def _copied(of: Deferred, func: Any, args: Any, kwargs: Any) -> Deferred | None:
    if args or any(v is not torch.contiguous_format for v in kwargs.values()) or of._product.turned:
        return None
    return _derived(of, func, args, kwargs, alike=_on_meta(of, func, args, kwargs))


def _cast(of: Deferred, func: Any, args: Any, kwargs: Any) -> Deferred | None:
    if any(k not in ("dtype", "non_blocking", "copy") for k in kwargs) or len(args) > 1:
        return None
    wanted = (*args, kwargs.get("dtype"))[0]
    if isinstance(wanted, (str, torch.device)) and func is torch.Tensor.to:
        return of if torch.device(wanted) == of.device and not kwargs else None
    if func in (torch.Tensor.to, torch.Tensor.type) and not isinstance(wanted, torch.dtype):
        return None
    alike = _on_meta(of, func, args, kwargs)
    if not alike.is_floating_point():
        return None
    if alike.dtype == of.dtype and not kwargs.get("copy"):
        return of
    step: Step = (torch.Tensor.to, (alike.dtype,), {})
    return _derived(of, func, args, kwargs, alike=alike, steps=(step,), turned=of._product.turned)


def _scaled(of: Deferred, func: Any, args: Any, kwargs: Any) -> Deferred | None:
    if kwargs or len(args) != 1 or type(args[0]) not in (int, float):
        return None
    alike = _on_meta(of, func, args, {})
    return _derived(of, func, args, {}, alike=alike, steps=((func, args, {}),), turned=of._product.turned)


def _curved(of: Deferred, func: Any, args: Any, kwargs: Any) -> Deferred | None:
    if args or kwargs:
        return None
    return _derived(of, func, (), {}, alike=_on_meta(of, func, (), {}), steps=((func, (), {}),), turned=of._product.turned)


def _turned(of: Deferred, func: Any, args: Any, kwargs: Any) -> Deferred | None:
    """Note the transpose of (samples, positions, classes) to (samples, classes, positions), which ``cross_entropy`` takes."""
    if of._product.turned or of.dim() != 3 or kwargs:
        return None
    order = args[0] if len(args) == 1 else args
    order = [i % 3 for i in order]
    right = order == [0, 2, 1] if "permute" in func.__name__ else sorted(order) == [1, 2]
    return _derived(of, func, args, {}, alike=_on_meta(of, func, args, {}), turned=True) if right else None


def _cross_entropy(of: Deferred, _: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
    """The loss, computed in pieces; None if the arguments are not supported."""
    names = ("target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    target, weight = given.get("target"), given.get("weight")
    product = of._product
    reduction, smoothing = given.get("reduction", "mean"), float(given.get("label_smoothing", 0.0))
    known = (
        type(target) is torch.Tensor
        and target.dtype is torch.int64
        and target.device == of.device
        and (weight is None or (type(weight) in PLAIN_TYPES and not weight.requires_grad))
        and (weight is None or weight.shape == product.weight.shape[:1])
        and (weight is None or weight.dtype is of.dtype or torch.is_autocast_enabled(of.device.type))
        and given.get("size_average") is None
        and given.get("reduce") is None
        and reduction in ("mean", "sum", "none")
        and (product.turned or of.dim() == 2)
        and product.root().versions == _versions(product.root())
        and target.shape == product.rows.shape[:-1]
        and target.numel() > 0
    )
    if not known or target is None:
        return None
    x = product.rows.reshape(-1, product.rows.size(-1))
    if product.dtype is not None:
        x = x.to(product.dtype)
    autocast = torch.is_autocast_enabled(of.device.type)
    asked = LossArguments(
        chain=product.chain,
        ignore=int(given.get("ignore_index", -100)),
        reduction=reduction,
        smoothing=smoothing,
        result=torch.float32 if autocast and of.dtype is not torch.float64 else of.dtype,
        columns=_columns(x.size(0), len(product.weight)),
    )
    with torch.autocast(of.device.type, enabled=False):
        loss: torch.Tensor = ChunkedLoss.apply(x, product.weight, product.bias, target.reshape(-1), weight, asked)  # type: ignore[no-untyped-call]
    _used(product.root())
    return loss.view(target.shape) if reduction == "none" else loss


def _columns(rows: int, classes: int) -> int:
    most = min(PIECE_BYTES // (4 * max(rows, 1)), -(-classes // PIECES))
    return max(min(NARROWEST, classes), most)


_HANDLERS: Final[dict[Any, Callable[[Deferred, Any, Any, Any], Any]]] = {
    **dict.fromkeys(_SHAPES, _shaped),
    **dict.fromkeys(_COPIES, _copied),
    **dict.fromkeys(_CASTS, _cast),
    **dict.fromkeys(_SCALES, _scaled),
    **dict.fromkeys(_CURVES, _curved),
    **dict.fromkeys(_TURNS, _turned),
    torch.Tensor.__getitem__: _indexed,
    functional.cross_entropy: _cross_entropy,
}


# --- on and off ------------------------------------------------------------------------------------------------------

_current: DeferredLogits | None = None


def _used(product: _DeferredMatmul) -> None:
    product.used = True
    if _current is not None:
        _current.losses += 1
        _current.at_losses.add(_key(product.weight))


@final
class DeferredLogits:
    """The memory optimization: defers wide products while it is on.

    Attributes:
        losses: number of losses that were computed in pieces.
        at_losses: keys (:func:`_key`) of the weights whose products led to such a loss.
    """

    def __init__(self) -> None:
        """Wrap nothing yet."""
        self.losses = 0
        self.at_losses: set[Any] = set()
        self._wraps = Wraps()
        self._tried: dict[Any, int] = {}
        self._wanted: dict[Any, bool] = {}

    def install(self) -> None:
        """Begin to defer."""
        global _current  # noqa: PLW0603 - what a deferred tensor calls has no other way to find it
        _current = self
        self._wraps.put(functional, "linear", self._linear)
        self._wraps.put(torch.Tensor, "__matmul__", self._matmul)
        self._wraps.put(torch.Tensor, "matmul", self._matmul)
        self._wraps.put(torch, "matmul", self._matmul)
        self._wraps.put(torch.autograd.Function, "apply", _applying)

    def remove(self) -> None:
        """Stop deferring; existing deferred tensors stay valid."""
        global _current  # noqa: PLW0603
        _current = None
        self._wraps.undo()

    def figures(self) -> list[LeverFigures]:
        """Figures of this memory optimization, for the summary."""
        told = f"{self.losses} losses were computed in chunks"
        if not self.losses:
            told = "no wide linear layer feeds a cross entropy"
        return [LeverFigures(name=LOSS, used=bool(self.losses), text=told)]

    def _linear(self, original: Any) -> Any:
        @functools.wraps(original)
        def linear(input: Any, weight: Any, bias: Any = None) -> Any:  # noqa: A002 - torch's own name
            found = self._defer(input, weight, bias, lambda: original(input, weight, bias))
            return original(input, weight, bias) if found is None else found

        return linear

    def _matmul(self, original: Any) -> Any:
        @functools.wraps(original)
        def matmul(*args: Any, **kwargs: Any) -> Any:
            weight = _turned_parameter(args[1]) if len(args) == 2 and not kwargs else None
            if weight is not None:
                found = self._defer(args[0], weight, None, lambda: original(*args))
                if found is not None:
                    return found
            return original(*args, **kwargs)

        return matmul

    def _defer(self, x: Any, weight: Any, bias: Any, make: Callable[[], torch.Tensor]) -> Deferred | None:
        """The deferred product; None if the plain one must be computed."""
        if type(weight) not in PLAIN_TYPES or type(x) is not torch.Tensor or weight.dim() != 2 or weight.size(0) < WIDE:
            return None
        size = x.numel() // max(1, weight.size(1)) * weight.size(0) * x.element_size()
        if size < LEAST_LOGITS_BYTES or x.dim() < 2 or not (torch.is_grad_enabled() and weight.requires_grad):
            return None
        if bias is not None and (type(bias) not in PLAIN_TYPES or bias.shape != weight.shape[:1]):
            return None
        if (bias is not None and bias.dtype is not weight.dtype) or torch.compiler.is_compiling() or torch._C._is_tracing():
            return None
        if within_transform():
            return None
        if _current is not self:  # the script kept a wrapper that was removed since
            return None
        key = _key(weight)
        tried = self._tried.get(key, 0)
        again = torch._C._current_graph_task_id() != -1  # a forward recomputed in backward must decide as before
        if not again:
            self._wanted[key] = tried <= 1 or key in self.at_losses
        if not self._wanted.get(key, False):  # its outputs do not go into a cross entropy
            return None
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else None
        if x.size(-1) != weight.size(1) or (dtype is None and x.dtype is not weight.dtype):
            return None
        if dtype is not None and torch.float64 in (x.dtype, weight.dtype):
            return None
        if not again:
            self._tried[key] = tried + 1
        product = _DeferredMatmul(x, weight, bias, dtype, (), turned=False, versions=(), make=_as_now(make, x.device.type))
        product.versions = _versions(product)
        with torch._C._DisableTorchDispatch():
            alike = torch.empty(*x.shape[:-1], weight.size(0), dtype=dtype or x.dtype, device="meta")
        return Deferred.of(product, alike)


def _key(weight: torch.Tensor) -> Any:
    """Identifies a weight from step to step: a leaf by its id, one computed in each forward by shape, type and device."""
    return id(weight) if weight.is_leaf else (tuple(weight.shape), weight.dtype, weight.device)


def _as_now(make: Callable[[], torch.Tensor], device: str) -> Callable[[], torch.Tensor]:
    """A function that runs ``make`` later, under the autocast state of now."""
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)

    def later() -> torch.Tensor:
        with torch.autocast(device, dtype=dtype, enabled=enabled):
            return make()

    return later


def _turned_parameter(item: Any) -> torch.Tensor | None:
    """The parameter of which a matrix is the transpose; None if there is none."""
    if type(item) is not torch.Tensor or item.dim() != 2 or item._base is None:
        return None
    base = item._base
    turned = (
        isinstance(base, torch.nn.Parameter)
        and base.dim() == 2
        and item.shape == base.shape[::-1]
        and item.stride() == base.stride()[::-1]
        and item.storage_offset() == base.storage_offset()
    )
    return base if turned else None


def _applying(original: Any) -> Any:
    """Wrap ``Function.apply``: custom functions get plain tensors, so that their gradients reach the graph."""
    function = original.__func__

    @functools.wraps(function)
    def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
        return function(kind, *(_plain(a) for a in args), **kwargs)

    return classmethod(apply)
