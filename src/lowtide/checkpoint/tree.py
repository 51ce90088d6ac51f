"""Converts state to plain JSON and named arrays, and back; nothing is pickled, so a checkpoint cannot run code."""

from __future__ import annotations

import base64
import collections
import importlib
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from lowtide.base.errors import StateError
from lowtide.checkpoint.sharded import assembled, is_sharded, layout_of

TAG: Final = "!"
"""Key that marks a value of a type that JSON lacks."""
Arrays = dict[str, Any]


def torch() -> Any:
    """The torch module if the script has imported it; None otherwise."""
    return sys.modules.get("torch")


def loaded_torch() -> Any:
    """Import torch, which loading torch objects needs: a script may resume before it has imported torch itself."""
    return importlib.import_module("torch")


def pack(value: Any) -> tuple[Any, Arrays]:
    """Convert a tree of dicts, lists, numbers, tensors and arrays to JSON, and to a dict of its tensors and arrays by name.

    Tensors are not copied; two that show the same bytes with the same dtype, shape and strides get one name.

    Raises:
        StateError: naming the object that cannot be saved, and its place in the tree.
    """
    arrays: Arrays = {}
    known: dict[Any, str] = {}

    def named(kind: str, key: Any, array: Any) -> str:
        if key in known:
            return known[key]
        name = f"{kind}{len(arrays)}"
        arrays[name] = array
        known[key] = name
        return name

    def walk(value: Any, where: str) -> Any:
        if value is None or type(value) in {bool, int, str}:
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {TAG: "float", "value": repr(value)}
        if type(value) in {list, tuple, set, collections.deque}:
            items = sorted(value, key=repr) if type(value) is set else value
            made = [walk(item, f"{where}[{i}]") for i, item in enumerate(items)]
            if type(value) is list:
                return made
            found = {TAG: type(value).__name__, "value": made}
            return {**found, "most": value.maxlen} if type(value) is collections.deque else found
        if type(value) in _MAPPINGS.values():
            pairs = [[walk(k, f"{where}: a key"), walk(v, f"{where}[{k!r}]")] for k, v in value.items()]
            found = {TAG: type(value).__name__, "value": pairs}
            if type(value) is collections.defaultdict:
                name = getattr(value.default_factory, "__name__", "None")
                if _FACTORIES.get(name, name) is not value.default_factory:
                    raise StateError(f"{where} is a defaultdict of {name}, which cannot be saved: make it a dict")
                found["factory"] = name
            extra = getattr(value, "_metadata", None)  # module versions in a torch state dict
            return found if extra is None else {**found, "metadata": walk(extra, f"{where}._metadata")}
        if type(value) in {bytes, bytearray}:
            return {TAG: type(value).__name__, "value": base64.b64encode(value).decode()}
        if type(value) is complex:
            return {TAG: "complex", "value": [walk(value.real, where), walk(value.imag, where)]}
        found = _tensor(value, where, named, walk) or _array(value, where, named, walk)
        if found is None:
            raise StateError(
                f"{where} is of type {type(value).__module__}.{type(value).__qualname__}, which cannot be saved: "
                "turn it into numbers, strings, lists, dicts, tensors or arrays"
            )
        return found

    try:
        return walk(value, "state"), arrays
    except RecursionError:
        raise StateError("state contains itself, or is nested too deeply: make it a tree") from None


_MAPPINGS: Final[Mapping[str, type]] = {
    "dict": dict, "OrderedDict": collections.OrderedDict, "Counter": collections.Counter,
    "defaultdict": collections.defaultdict,
}  # fmt: skip


_FACTORIES: Final[Mapping[str, Any]] = {"None": None, **{kind.__name__: kind for kind in (int, float, str, list, dict, set)}}


def _tensor(value: Any, where: str, named: Callable[[str, Any, Any], str], walk: Callable[[Any, str], Any]) -> Any:
    t = torch()
    if t is None:
        return None
    if isinstance(value, t.Tensor):
        if is_sharded(value):
            return {TAG: "sharded", "value": walk(value.to_local(), where), "layout": layout_of(value, where)}
        if value.layout is not t.strided or value.is_quantized or value.is_meta:
            raise StateError(
                f"{where} is a {value.layout} tensor on {value.device}, {type(value).__name__}: only dense tensors can "
                "be saved; make it dense"
            )
        if type(value) not in {t.Tensor, t.nn.Parameter, t.nn.Buffer}:
            raise StateError(
                f"{where} is a {type(value).__module__}.{type(value).__qualname__}: everything but its values "
                "would be lost; save its parts instead"
            )
        plain = value.detach().resolve_conj().resolve_neg()
        if plain.dtype == t.complex128:  # safetensors lacks it
            return {TAG: "complex128", "value": walk(t.view_as_real(plain), where)}
        key = (plain.data_ptr() or id(value), plain.dtype, tuple(plain.shape), tuple(plain.stride()))
        order = sorted(range(plain.dim()), key=lambda d: -plain.stride(d))
        dense = plain.permute(order).is_contiguous() and plain.dim() > 1
        name = named("t", key, plain.permute(order) if dense else plain)
        return {TAG: "tensor", "value": name, "order": order} if dense else {TAG: "tensor", "value": name}
    if isinstance(value, (t.dtype, t.device)):
        return {TAG: f"torch.{type(value).__name__}", "value": str(value).removeprefix("torch.")}
    if isinstance(value, t.Size):
        return {TAG: "torch.Size", "value": list(value)}
    return None


def _array(value: Any, where: str, named: Callable[[str, Any, Any], str], walk: Callable[[Any, str], Any]) -> Any:
    others = type(value).__module__.partition(".")[0] in {"jax", "jaxlib", "tensorflow", "keras"}
    if not isinstance(value, (np.ndarray, np.generic)) and not (others and hasattr(value, "__array__")):
        return None
    if isinstance(value, np.ndarray) and type(value) is not np.ndarray:
        raise StateError(
            f"{where} is a {type(value).__qualname__}: everything but its values would be lost; save its parts instead"
        )
    plain = np.asarray(value)
    if not plain.dtype.isnative:
        raise StateError(f"{where} is an array of {plain.dtype}, not in native byte order: convert it first")
    if plain.dtype == np.complex128:  # safetensors lacks it
        pairs = walk(np.stack([plain.real, plain.imag], axis=-1), where)
        return {TAG: "complex128", "value": pairs, "scalar": isinstance(value, np.generic)}
    if plain.dtype.kind not in "biufc" or plain.dtype.itemsize > 8:
        raise StateError(f"{where} is an array of {plain.dtype}, which cannot be saved: use numbers or booleans")
    key = (plain.__array_interface__["data"][0] if plain.size else id(value), plain.dtype.str, plain.shape, plain.strides)
    kind = "scalar" if isinstance(value, np.generic) else "array"
    order = "F" if plain.flags.f_contiguous and not plain.flags.c_contiguous else "C"
    return {TAG: kind, "value": named("n", (*key, kind), plain), "order": order}


def unpack(tree: Any, array: Callable[[str], Any]) -> Any:
    """Convert a packed tree back.

    Args:
        tree: the JSON tree from `pack`.
        array: returns a tensor or array by its name; called once per name, so objects that were shared are shared again.
    """
    known: dict[Any, Any] = {}

    def get(name: str, order: list[int] | None = None) -> Any:
        key = name, None if order is None else tuple(order)
        if key not in known:
            found = array(name) if order is None else get(name)
            known[key] = found if order is None else found.permute(sorted(range(len(order)), key=lambda d: order[d]))
        return known[key]

    def walk(tree: Any) -> Any:
        if isinstance(tree, list):
            return [walk(item) for item in tree]
        if not isinstance(tree, dict):
            return tree
        kind, value = tree[TAG], tree["value"]
        if kind in _MAPPINGS:
            made: Any = collections.defaultdict(_FACTORIES[tree["factory"]]) if kind == "defaultdict" else _MAPPINGS[kind]()
            for k, v in value:
                made[walk(k)] = walk(v)
            if "metadata" in tree:
                made._metadata = walk(tree["metadata"])
            return made
        return _LEAVES[kind](tree, value, walk, get)

    return walk(tree)


def _complex(pairs: Any) -> Any:
    if isinstance(pairs, np.ndarray):
        return np.ascontiguousarray(pairs).view(np.complex128)[..., 0]
    return loaded_torch().view_as_complex(pairs)


_LEAVES: Final[dict[str, Callable[[Any, Any, Any, Any], Any]]] = {
    "float": lambda _t, v, _w, _g: float(v),
    "tuple": lambda _t, v, w, _g: tuple(w(v)),
    "set": lambda _t, v, w, _g: set(w(v)),
    "deque": lambda t, v, w, _g: collections.deque(w(v), t["most"]),
    "bytes": lambda _t, v, _w, _g: base64.b64decode(v),
    "bytearray": lambda _t, v, _w, _g: bytearray(base64.b64decode(v)),
    "complex": lambda _t, v, w, _g: complex(*w(v)),
    "complex128": lambda t, v, w, _g: _complex(w(v))[()] if t.get("scalar") else _complex(w(v)),
    "tensor": lambda t, v, _w, g: g(v, t.get("order")),
    "sharded": lambda t, v, w, _g: assembled(t["layout"], w(v)),
    "torch.dtype": lambda _t, v, _w, _g: getattr(loaded_torch(), v),
    "torch.device": lambda _t, v, _w, _g: loaded_torch().device(v),
    "torch.Size": lambda _t, v, _w, _g: loaded_torch().Size(v),
    "array": lambda t, v, _w, g: np.asarray(g(v), order=t["order"]),
    "scalar": lambda _t, v, _w, g: g(v)[()],
}
