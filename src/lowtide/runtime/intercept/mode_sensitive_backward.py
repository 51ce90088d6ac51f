"""ModeSensitiveBackward that torch computes another way while a dispatch mode is on: they run without ours.

Backward: ``prod`` divides by its factors where none is zero, and does not under a mode; ``masked_fill`` sums the gradient of
its value over what was filled, or over all; the second derivative of a determinant is solved otherwise: the bits differ.
``cumprod`` and ``binary_cross_entropy_with_logits`` with ``pos_weight`` take more memory, gradients of Householder products
lie in another order. Forward, of dual numbers: ``prod`` and the norms (``isTensorSubclassLike`` and
``areAnyTensorSubclassLike`` in ``torch/csrc/autograd/FunctionsManual.cpp``). That no other derivative has other bits is held
against torch's own list of operators by ``tests/slow/test_every_operator.py``.

Nodes are found before the engine runs; hooks take the mode off before such a node and put it on after it. The engine runs
every node with the dispatch state that its backward began with, so that a node that fails leaves nothing behind. In a level
of dual numbers, but for those of function transforms, which go the other way by themselves, no mode of ours is on.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple, Protocol, final

from torch._C._functorch import peek_interpreter_stack
from torch._functorch import predispatch
from torch.autograd import forward_ad

import torch
from lowtide.runtime.intercept.dispatch_mode import ours_alone, put_back, take_all
from lowtide.runtime.monkeypatch import Wraps
from lowtide.runtime.tensors import node_of


class _Otherwise(NamedTuple):
    """A type of node that runs otherwise.

    Attributes:
        times: how far memory rises in it at most, its result included, in bytes of the gradients that it is given and makes
            (measured: where factors are zero, ``prod`` multiplies all others up from both sides).
        saved: what it must have saved to be one; empty: it is one always.
    """

    times: float
    saved: str = ""


_SLICES: Final = "CopySlices"
"""The type of the node of an operator that writes into a view."""
_BACKWARD: Final = {
    "ProdBackward0": _Otherwise(7),
    "ProdBackward1": _Otherwise(7),
    "MaskedFillBackward1": _Otherwise(2),
    "CumprodBackward0": _Otherwise(5),
    "BinaryCrossEntropyWithLogitsBackward0": _Otherwise(3, "_raw_saved_pos_weight"),
    "OrmqrBackward0": _Otherwise(7),
    "LinalgHouseholderProductBackward0": _Otherwise(7),
    "LinalgDetBackward0": _Otherwise(7),
    _SLICES: _Otherwise(5),
}


class Unseen(NamedTuple):
    """A node that runs without the mode.

    Attributes:
        node: of autograd's graph.
        given: its gradients.
        made: its results, filled in at its end.
        most_bytes: how far memory rises in it at most.
    """

    node: Any
    given: tuple[Any, ...]
    made: list[Any]
    most_bytes: int


class UnseenListener(Protocol):
    """Who is told of what runs unseen."""

    def unseen(self, what: Unseen) -> contextlib.AbstractContextManager[None]:
        """Around what runs without the mode."""


@final
class ModeSensitiveBackward:
    """Around each run of autograd's engine, and around levels of dual numbers.

    Attributes:
        dual: whether a level of dual numbers is open, in which nothing is seen.
    """

    def __init__(self, listener: UnseenListener) -> None:
        """Nothing runs."""
        self.dual = False
        self._listener = listener
        self._open: list[tuple[list[Any], list[Any], contextlib.ExitStack]] = []
        self._levels: list[tuple[int, list[Any]]] = []
        self._wraps = Wraps()

    def install(self) -> None:
        """Learn of levels of dual numbers."""
        for name, wrapper in (("_enter_dual_level", self._entering), ("_exit_dual_level", self._leaving)):
            if hasattr(predispatch, name):
                self._wraps.put(predispatch, name, wrapper)

    def remove(self) -> None:
        """Learn of them no more; what was taken off for one that is open stays off."""
        self._wraps.undo()
        self._levels, self.dual = [], False

    def settle(self) -> None:
        """A mode was put on: within a level that is open already, it is taken off until its end."""
        if forward_ad._current_level >= 0 and peek_interpreter_stack() is None and not self._levels and ours_alone():
            self._levels.append((threading.get_ident(), take_all()))
            self.dual = True

    @contextlib.contextmanager
    def around(self, outputs: Iterable[Any], *, told: bool) -> Iterator[None]:
        """Run autograd's engine from some tensors, or edges of the graph; is the listener ``told`` of what runs unseen?"""
        hooks = [hook for node in _otherwise(outputs) for hook in self._hook(node, told)] if ours_alone() else []
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

    def _hook(self, node: Any, told: bool) -> tuple[Any, Any]:
        return node.register_prehook(functools.partial(self._before, node, told)), node.register_hook(self._after)

    def _before(self, node: Any, told: bool, given: tuple[Any, ...]) -> None:
        made: list[Any] = []
        around = contextlib.ExitStack()
        if told:
            around.enter_context(self._listener.unseen(Unseen(node, given, made, _most_bytes(node, given))))
        self._open.append((take_all(), made, around))

    def _after(self, given_back: tuple[Any, ...], _given: tuple[Any, ...]) -> None:
        modes, made, around = self._open.pop()
        put_back(modes)
        made += given_back
        around.close()

    def _fail(self, depth: int, *error: Any) -> None:
        """The engine ended with an error in a node that is open."""
        while len(self._open) > depth:
            _, _, around = self._open.pop()
            around.__exit__(*error)

    def _entering(self, original: Any) -> Any:
        @functools.wraps(original)
        def enter() -> Any:
            level = original()
            taken = take_all() if ours_alone() and peek_interpreter_stack() is None else []
            self._levels.append((threading.get_ident(), taken))
            self.dual = self.dual or peek_interpreter_stack() is None
            return level

        return enter

    def _leaving(self, original: Any) -> Any:
        @functools.wraps(original)
        def leave(*args: Any, **kwargs: Any) -> Any:
            left = original(*args, **kwargs)
            thread, taken = self._levels.pop() if self._levels else (0, [])  # one may have been entered before we began
            if thread == threading.get_ident():
                put_back(taken)
            self.dual = self.dual and bool(self._levels)
            return left

        return leave


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
    kind = type(node).__name__
    if kind == _SLICES:  # what it holds is not told, but for where its gradients go: a filling's value has no dimension
        return any(n is not None and not n._input_metadata[at].shape for n, at in node.next_functions[1:])
    known = _BACKWARD.get(kind)
    if known is None:
        return False
    return not known.saved or getattr(getattr(node, known.saved), "data", True) is not None  # older torch does not show it


def _most_bytes(node: Any, given: Iterable[Any]) -> int:
    """How far memory rises at most in a node that runs otherwise."""
    made = (n._input_metadata[at] for n, at in node.next_functions if n is not None)
    sizes = [math.prod(m.shape) * m.dtype.itemsize for m in made]
    sizes += [g.nbytes for g in given if isinstance(g, torch.Tensor)]
    return int(_BACKWARD[type(node).__name__].times * sum(sizes))
