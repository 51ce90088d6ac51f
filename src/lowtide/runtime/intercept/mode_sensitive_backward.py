"""Runs without Lowtide's mode those derivatives that torch computes differently under a dispatch mode.

In backward, the bits of three derivatives differ: ``prod`` divides by its factors if none is zero, but not under a mode;
``masked_fill`` sums the gradient of its value over the filled elements, or over all; the second derivative of a determinant is
solved differently. ``cumprod`` and ``binary_cross_entropy_with_logits`` with ``pos_weight`` take more memory under a mode, and
gradients of Householder products have another memory layout. In forward-mode AD (dual numbers), ``prod`` and the norms are
computed differently. See ``isTensorSubclassLike`` and ``areAnyTensorSubclassLike`` in
``torch/csrc/autograd/FunctionsManual.cpp``. ``tests/slow/test_every_operator.py`` checks against torch's own list of operators
that no other derivative has different bits.

Such nodes are found before the engine runs; hooks take the mode off before the node and put it back after it. The engine runs
every node with the dispatch state that its backward began with, so a node that fails leaves nothing behind. Within a level of
forward-mode AD, none of Lowtide's modes is on, except in levels of function transforms, for which torch computes the
derivatives as under a mode in any case.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple, Protocol, final

from torch._functorch import predispatch
from torch.autograd import forward_ad

import torch
from lowtide.runtime.intercept.dispatch_mode import ours_alone, put_back, take_all
from lowtide.runtime.monkeypatch import Wraps
from lowtide.runtime.tensors import node_of, nodes_behind
from lowtide.runtime.torch_state import within_transform


class _Otherwise(NamedTuple):
    """A type of node that torch computes differently under a mode.

    Attributes:
        times: upper bound on how far memory rises in the node, results included, as a multiple of the bytes of the gradients
            that it receives and makes (measured: if factors are zero, ``prod`` multiplies all the others from both sides).
        saved: the attribute of a saved tensor without which the node is not affected; empty if it always is.
    """

    times: float
    saved: str = ""


_SLICES: Final = "CopySlices"
"""Type name of the node of an operator that writes into a view."""
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
        node: the node of autograd's graph.
        given: the gradients that it receives.
        made: the gradients that it returns, filled in when it ends.
        most_bytes: upper bound on how many bytes memory rises in it.
    """

    node: Any
    given: tuple[Any, ...]
    made: list[Any]
    most_bytes: int


class UnseenListener(Protocol):
    """Listener for nodes that run without the mode."""

    def unseen(self, what: Unseen) -> contextlib.AbstractContextManager[None]:
        """The context in which such a node runs."""


@final
class ModeSensitiveBackward:
    """Takes Lowtide's modes off for such nodes in each run of autograd's engine, and for levels of forward-mode AD.

    Attributes:
        dual: whether a forward-mode AD level is open for which the modes are off, so that no operator is seen.
    """

    def __init__(self, listener: UnseenListener) -> None:
        """Prepare the wrappers; nothing is patched yet."""
        self.dual = False
        self._listener = listener
        self._open: list[tuple[list[Any], list[Any], contextlib.ExitStack]] = []
        self._levels: list[tuple[int, list[Any]]] = []
        self._wraps = Wraps()

    def install(self) -> None:
        """Wrap the functions that enter and leave forward-mode AD levels."""
        for name, wrapper in (("_enter_dual_level", self._entering), ("_exit_dual_level", self._leaving)):
            if hasattr(predispatch, name):
                self._wraps.put(predispatch, name, wrapper)

    def remove(self) -> None:
        """Unwrap them; modes that were taken off for a level that is still open stay off."""
        self._wraps.undo()
        self._levels, self.dual = [], False

    def settle(self) -> None:
        """Call after putting a mode on: if a forward-mode AD level is already open, the mode comes off until it ends."""
        if forward_ad._current_level >= 0 and not within_transform() and not self._levels and ours_alone():
            self._levels.append((threading.get_ident(), take_all()))
            self.dual = True

    @contextlib.contextmanager
    def around(self, outputs: Iterable[Any], *, told: bool) -> Iterator[None]:
        """Surround a run of autograd's engine.

        Args:
            outputs: the tensors, or edges of the graph, from which the backward starts.
            told: whether the listener is told of the nodes that run without the mode.
        """
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
        """Close the contexts of nodes in which the engine ended with an error."""
        while len(self._open) > depth:
            _, _, around = self._open.pop()
            around.__exit__(*error)

    def _entering(self, original: Any) -> Any:
        @functools.wraps(original)
        def enter() -> Any:
            level = original()
            taken = take_all() if ours_alone() and not within_transform() else []
            self._levels.append((threading.get_ident(), taken))
            self.dual = self.dual or not within_transform()
            return level

        return enter

    def _leaving(self, original: Any) -> Any:
        @functools.wraps(original)
        def leave(*args: Any, **kwargs: Any) -> Any:
            left = original(*args, **kwargs)
            thread, taken = self._levels.pop() if self._levels else (0, [])  # the level may have been entered before `install`
            if thread == threading.get_ident():
                put_back(taken)
            self.dual = self.dual and bool(self._levels)
            return left

        return leave


def _otherwise(outputs: Iterable[Any]) -> list[Any]:
    """Nodes of a graph that torch computes differently under a mode."""
    heads = (node_of(o) if isinstance(o, torch.Tensor) else getattr(o, "node", None) for o in outputs)
    return [node for node in nodes_behind(heads) if _is_otherwise(node)]


def _is_otherwise(node: Any) -> bool:
    kind = type(node).__name__
    if kind == _SLICES:  # hides its inner node, but not where gradients go: the value of a `masked_fill` has no dimensions
        return any(n is not None and not n._input_metadata[at].shape for n, at in node.next_functions[1:])
    known = _BACKWARD.get(kind)
    if known is None:
        return False
    return not known.saved or getattr(getattr(node, known.saved), "data", True) is not None  # not in older torch


def _most_bytes(node: Any, given: Iterable[Any]) -> int:
    """Upper bound on how many bytes memory rises in a node that is computed differently under a mode."""
    made = (n._input_metadata[at] for n, at in node.next_functions if n is not None)
    sizes = [math.prod(m.shape) * m.dtype.itemsize for m in made]
    sizes += [g.nbytes for g in given if isinstance(g, torch.Tensor)]
    return int(_BACKWARD[type(node).__name__].times * sum(sizes))
