"""Derivatives that torch computes another way while a dispatch mode is on: they run without ours.

Backward: ``prod`` divides by its factors where none is zero, and does not under a mode; ``masked_fill`` sums the gradient of
its value over what was filled, or over all; the second derivative of a determinant is solved otherwise: the bits differ.
``cumprod`` and ``binary_cross_entropy_with_logits`` with ``pos_weight`` take more memory, gradients of Householder products
lie in another order. Forward, of dual numbers: ``prod`` and the norms (``isTensorSubclassLike`` and
``areAnyTensorSubclassLike`` in ``torch/csrc/autograd/FunctionsManual.cpp``). That no other derivative has other bits is held
against torch's own list of operators by ``tests/slow/test_every_operator.py``; under function transforms the plain run goes
the other way itself.

Nodes are found before the engine runs; hooks take the mode off before such a node and put it on after it. The engine runs
every node with the dispatch state that its backward began with, so that a node that fails leaves nothing behind. Functions of
dual numbers are met by a function mode, which changes nothing by itself.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple, Protocol, final

from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

import torch
from lowtide.live.mode import ours_alone, put_back, take_all, without_modes
from lowtide.live.tensors import node_of, tensors_in
from lowtide.live.wraps import Wraps


class _Otherwise(NamedTuple):
    """A type of node that runs otherwise.

    Attributes:
        times: how far memory rises in it at most, its result included, in bytes of the gradients that it is given and makes
            (measured: where factors are zero, ``prod`` multiplies all others up from both sides).
        saved: what it must have saved to be one; empty: it is one always.
    """

    times: float
    saved: str = ""


_BACKWARD: Final = {
    "ProdBackward0": _Otherwise(7),
    "ProdBackward1": _Otherwise(7),
    "MaskedFillBackward1": _Otherwise(2),
    "CumprodBackward0": _Otherwise(5),
    "BinaryCrossEntropyWithLogitsBackward0": _Otherwise(3, "_raw_saved_pos_weight"),
    "OrmqrBackward0": _Otherwise(7),
    "LinalgHouseholderProductBackward0": _Otherwise(7),
    "LinalgDetBackward0": _Otherwise(7),
}
_FORWARD: Final = frozenset({
    "prod", "layer_norm", "group_norm", "instance_norm", "batch_norm", "native_layer_norm", "native_group_norm",
    "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "_batch_norm_with_update",
    "cudnn_batch_norm", "miopen_batch_norm", "_batch_norm_impl_index",
})
"""Functions whose tangents are computed otherwise, without the overload's name."""
_FORWARD_TIMES: Final = 8
"""How far memory rises in one of those at most, in bytes of its arguments."""


class Unseen(NamedTuple):
    """What runs without the mode.

    Attributes:
        name: of the function, or of the node's type.
        node: of autograd's graph; None in a forward.
        given: its arguments, or gradients.
        made: its results, filled in at its end.
        most_bytes: how far memory rises in it at most.
    """

    name: str
    node: Any
    given: tuple[Any, ...]
    made: list[Any]
    most_bytes: int


class Listener(Protocol):
    """Who is told of what runs unseen."""

    def unseen(self, what: Unseen) -> contextlib.AbstractContextManager[None]:
        """Around what runs without the mode."""


@final
class Derivatives:
    """Around each run of autograd's engine, and in levels of dual numbers."""

    def __init__(self, listener: Listener) -> None:
        """Nothing runs."""
        self._listener = listener
        self._open: list[tuple[list[Any], list[Any], contextlib.ExitStack]] = []
        self._levels: list[_Duals | None] = []
        self._wraps = Wraps()

    def install(self) -> None:
        """Learn of levels of dual numbers."""
        self._wraps.put(forward_ad, "enter_dual_level", self._entering)
        self._wraps.put(forward_ad, "exit_dual_level", self._leaving)

    def remove(self) -> None:
        """Learn of them no more."""
        self._wraps.undo()

    @contextlib.contextmanager
    def around(self, outputs: Iterable[Any]) -> Iterator[None]:
        """Run autograd's engine from some tensors, or edges of the graph."""
        hooks = [hook for node in _otherwise(outputs) for hook in self._hook(node)] if ours_alone() else []
        if not hooks:
            yield
            return
        depth = len(self._open)
        try:
            with contextlib.ExitStack() as failed:
                failed.push(functools.partial(self._fail, depth))
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _hook(self, node: Any) -> tuple[Any, Any]:
        return node.register_prehook(functools.partial(self._before, node)), node.register_hook(self._after)

    def _before(self, node: Any, given: tuple[Any, ...]) -> None:
        made: list[Any] = []
        told = contextlib.ExitStack()
        told.enter_context(self._listener.unseen(Unseen(type(node).__name__, node, given, made, _most_bytes(node, given))))
        self._open.append((take_all(), made, told))

    def _after(self, given_back: tuple[Any, ...], _given: tuple[Any, ...]) -> None:
        modes, made, told = self._open.pop()
        put_back(modes)
        made += given_back
        told.close()

    def _fail(self, depth: int, *error: Any) -> None:
        """The engine ended with an error in a node that is open."""
        while len(self._open) > depth:
            _, _, told = self._open.pop()
            told.__exit__(*error)

    def _entering(self, original: Any) -> Any:
        @functools.wraps(original)
        def enter() -> Any:
            level = original()
            duals = _Duals(self._listener) if ours_alone() and peek_interpreter_stack() is None else None
            if duals is not None:
                duals.__enter__()  # type: ignore[no-untyped-call]
            self._levels.append(duals)
            return level

        return enter

    def _leaving(self, original: Any) -> Any:
        @functools.wraps(original)
        def leave(*args: Any, **kwargs: Any) -> Any:
            duals = self._levels.pop() if self._levels else None  # one may have been entered before we began
            if duals is not None:
                duals.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            return original(*args, **kwargs)

        return leave


class _Duals(TorchFunctionMode):
    """Functions of dual numbers."""

    def __init__(self, listener: Listener) -> None:
        super().__init__()
        self._listener = listener

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One function."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").partition(".")[0]
        if name not in _FORWARD or not ours_alone():
            return func(*args, **kwargs)
        given = tuple(tensors_in((args, kwargs)))
        what = Unseen(name, None, given, [], _FORWARD_TIMES * sum(t.nbytes for t in given))
        with self._listener.unseen(what), without_modes():
            out = func(*args, **kwargs)
            for tensor in tensors_in(out):
                what.made.extend(t for t in forward_ad.unpack_dual(tensor) if t is not None)
        return out


def _otherwise(outputs: Iterable[Any]) -> list[Any]:
    """Nodes of a graph whose derivatives are computed otherwise under a mode."""
    stack = [node_of(o) if isinstance(o, torch.Tensor) else getattr(o, "node", None) for o in outputs]
    seen: set[Any] = set()
    found = []
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if _is_otherwise(node):
            found.append(node)
        stack += [following for following, _ in node.next_functions if following not in seen]
    return found


def _is_otherwise(node: Any) -> bool:
    known = _BACKWARD.get(type(node).__name__)
    if known is None:
        return False
    return not known.saved or getattr(getattr(node, known.saved), "data", True) is not None  # older torch does not show it


def _most_bytes(node: Any, given: Iterable[Any]) -> int:
    """How far memory rises at most in a node that runs otherwise."""
    made = (n._input_metadata[at] for n, at in node.next_functions if n is not None)
    sizes = [math.prod(m.shape) * m.dtype.itemsize for m in made]
    sizes += [g.nbytes for g in given if isinstance(g, torch.Tensor)]
    return int(_BACKWARD[type(node).__name__].times * sum(sizes))
