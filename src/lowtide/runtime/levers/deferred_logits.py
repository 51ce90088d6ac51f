"""The loss of a language model without its logits: a wide linear layer and the cross entropy after it, piece by piece.

While the lever is on, the product of a wide linear layer is *deferred*: what the script gets is a tensor that knows its shape
and how to be made. Casts, slices of rows, views and scaling are noted; ``cross_entropy`` of what was noted runs over pieces of
the vocabulary, forward and backward, so that no more than one piece of the logits is ever there. Whatever else is asked of a
deferred tensor gets the plain one, made then and there, with its graph.

One module, as each operation that is noted is at once a rule of shapes, of versions and of the loss that takes it up: cut
apart they would have to be read together.
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

SAMPLES: Final = 64
"""Elements of a tensor by which a write that no counter shows is noticed."""
PIECE_BYTES: Final = 16 << 20
"""A piece of the logits is as large as this at most ..."""
PIECES: Final = 16
"""... and there are at least so many pieces."""
NARROWEST: Final = 64
"""Columns that a piece has at least: products with fewer are slow."""

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
    f"{LOSS}: the gradient of the logits is asked for after their loss was computed in pieces: run again without --allow "
    f"{LOSS}"
)
_GRADIENTS: Final = ("register_hook", "retain_grad", "grad", "backward")
"""Functions that ask for gradients of the logits themselves; by name, for some are wrapped while a budget is in force."""


def _node_getter() -> Any:
    return getattr(torch.Tensor, "grad_fn").__get__  # noqa: B009 - a getter, though its type says otherwise


_NODE: Final = _node_getter()


@dataclass(slots=True, weakref_slot=True, eq=False)
class _DeferredMatmul:
    """A deferred product and how it would be made.

    Attributes:
        rows: inputs, last dimension the features: shaped as the deferred tensor is in all but the last.
        weight: (outputs, features).
        bias: (outputs,) or None.
        dtype: in which autocast would multiply; None outside it.
        chain: what happens element by element after the product.
        turned: whether the classes stand in dimension 1.
        versions: of inputs, weight and bias when the product was asked for.
        make: makes the plain tensor; the plain call for the product itself, the noted operation on its parent for the rest.
        real: the plain tensor, once it was asked for.
        children: products that were made from this one.
        used: whether a loss was computed in pieces of it.
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
        """The product itself."""
        return self if self.parent is None else self.parent.root()


class Deferred(torch.Tensor):
    """A tensor without bytes; any use but those noted in :data:`_HANDLERS` makes the plain one."""

    _product: _DeferredMatmul

    @staticmethod
    def of(product: _DeferredMatmul, alike: torch.Tensor) -> Deferred:
        """A deferred tensor.

        Args:
            product: what it stands for.
            alike: has its size, strides and type (on the meta device).
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
        """One call of torch's interface."""
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        node = func in (_NODE, _node_getter())  # torch's, and as it is watched
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
        """Below autograd there is nothing that could be right."""
        raise LeverError(
            f"{LOSS}: {func} is called on logits that were deferred, from code that hides it from torch's Python interface: "
            f"run again without --allow {LOSS}"
        )


class _ConsumedNode:
    """The node of logits whose loss was computed in pieces: no gradient of that loss comes through it."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        if name.startswith("register_"):
            raise LeverError(TOO_LATE)
        return getattr(self._node, name)


def _astray(_: torch.Tensor) -> None:
    """A gradient has come to a deferred tensor itself: whoever used it got past all that makes the plain one."""
    raise LeverError(f"{LOSS}: deferred logits are used where their gradient would be lost: run again without --allow {LOSS}")


def _deferred(items: Any) -> list[Deferred]:
    """Deferred tensors among arguments."""
    return [i for i in flatten(items) if isinstance(i, Deferred)]


def _plain(item: Any) -> Any:
    """An argument with its deferred tensors made."""
    if isinstance(item, Deferred):
        return real(item)
    if type(item) in (list, tuple):
        return type(item)(_plain(i) for i in item)
    return item


def real(deferred: Deferred) -> torch.Tensor:
    """The plain tensor, made now.

    Raises:
        LeverError: if inputs or weight were changed since the script computed it.
    """
    product = deferred._product
    root = product.root()
    if product.real is None:
        _make_all(root)
    return _made(product)


def _make_all(product: _DeferredMatmul) -> None:
    """Make a product and all that was derived from it: a later write to one must find the others as they would be."""
    if product.real is None:
        if product.parent is None and _versions(product) != product.versions:
            raise LeverError(
                f"{LOSS}: the logits are read after the weights or inputs that they were computed from changed: read them "
                f"before the optimizer's step, or run again without --allow {LOSS}"
            )
        _made(product)
    for ref in product.children:
        child = ref()
        if child is not None:
            _make_all(child)


def _versions(product: _DeferredMatmul) -> tuple[Any, ...]:
    """What moves when inputs, weight or bias change: by a counted write, another storage, a write to ``.data`` (CPU only)."""
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
    """A deferred tensor made from another."""
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
    """The plain tensor of a product that may be made."""
    if product.real is None:
        with torch.inference_mode(mode=False), torch.enable_grad():
            product.real = product.make()
    return product.real


def _meta(of: Deferred) -> torch.Tensor:
    """A tensor without bytes of the same size, strides and type."""
    with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
        return torch.empty_strided(of.size(), of.stride(), dtype=of.dtype, device="meta")


def _on_meta(of: Deferred, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        found: torch.Tensor = func(_meta(of), *args, **kwargs)
    return found


def _shaped(of: Deferred, func: Any, args: Any, kwargs: Any) -> Deferred | None:
    """Views that keep the classes last, and whole."""
    if of._product.turned or any(isinstance(a, torch.dtype) for a in (*args, *kwargs.values())):
        return None
    alike = _on_meta(of, func, args, kwargs)
    if alike.dim() < 1 or alike.size(-1) != of.size(-1):
        return None
    rows = of._product.rows
    return _derived(of, func, args, kwargs, rows=rows.reshape(*alike.shape[:-1], rows.size(-1)), alike=alike)


def _indexed(of: Deferred, func: Any, args: Any, kwargs: Any) -> Deferred | None:
    """Rows picked by slices, numbers, or one mask or list of row numbers."""
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
    chosen = chosen.clone()  # the script may write to its own
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
    """(samples, positions, classes) to (samples, classes, positions), as ``cross_entropy`` has it."""
    if of._product.turned or of.dim() != 3 or kwargs:
        return None
    order = args[0] if len(args) == 1 else args
    order = [i % 3 for i in order]
    right = order == [0, 2, 1] if "permute" in func.__name__ else sorted(order) == [1, 2]
    return _derived(of, func, args, {}, alike=_on_meta(of, func, args, {}), turned=True) if right else None


def _cross_entropy(of: Deferred, _: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
    """The loss, in pieces; None for what is not known."""
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
        dtype=product.dtype,
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
    """The lever: defers wide products while it is on.

    Attributes:
        losses: how many losses were computed in pieces.
        at_losses: weights whose products led to one.
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
        global _current  # noqa: PLW0603 - what a tensor calls back has no other way to find it
        _current = self
        self._wraps.put(functional, "linear", self._linear)
        self._wraps.put(torch.Tensor, "__matmul__", self._matmul)
        self._wraps.put(torch.Tensor, "matmul", self._matmul)
        self._wraps.put(torch, "matmul", self._matmul)
        self._wraps.put(torch.autograd.Function, "apply", _applying)

    def remove(self) -> None:
        """Defer no more; deferred tensors stay good."""
        global _current  # noqa: PLW0603
        _current = None
        self._wraps.undo()

    def figures(self) -> list[LeverFigures]:
        """What became of the lever."""
        told = f"{self.losses} losses were computed in pieces"
        if not self.losses:
            told = "no wide linear layer led to a cross entropy"
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
        """The deferred product; None where the plain one is to be computed."""
        if type(weight) not in PLAIN_TYPES or type(x) is not torch.Tensor or weight.dim() != 2 or weight.size(0) < WIDE:
            return None
        size = x.numel() // max(1, weight.size(1)) * weight.size(0) * x.element_size()
        if size < LEAST_LOGITS_BYTES or x.dim() < 2 or not (torch.is_grad_enabled() and weight.requires_grad):
            return None
        if bias is not None and (type(bias) not in PLAIN_TYPES or bias.shape != weight.shape[:1]):
            return None
        if (bias is not None and bias.dtype is not weight.dtype) or torch.compiler.is_compiling() or torch._C._is_tracing():
            return None
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return None
        if _current is not self:  # the script has kept a function that was wrapped
            return None
        key = _key(weight)
        tried = self._tried.get(key, 0)
        again = torch._C._current_graph_task_id() != -1  # a forward that runs again in the backward does as it did
        if not again:
            self._wanted[key] = tried <= 1 or key in self.at_losses
        if not self._wanted.get(key, False):  # a layer whose outputs are used otherwise
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
    """Which weight it is from step to step: a parameter, or what is made of one in each forward."""
    return id(weight) if weight.is_leaf else (tuple(weight.shape), weight.dtype, weight.device)


def _as_now(make: Callable[[], torch.Tensor], device: str) -> Callable[[], torch.Tensor]:
    """Later, with autocast as it is now."""
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)

    def later() -> torch.Tensor:
        with torch.autocast(device, dtype=dtype, enabled=enabled):
            return make()

    return later


def _turned_parameter(item: Any) -> torch.Tensor | None:
    """The parameter whose transpose a matrix is; None if it is not one."""
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
    """Custom functions get plain tensors: their gradients must find their way."""
    function = original.__func__

    @functools.wraps(function)
    def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
        return function(kind, *(_plain(a) for a in args), **kwargs)

    return classmethod(apply)
