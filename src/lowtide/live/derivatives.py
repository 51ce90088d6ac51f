"""Derivatives that torch computes another way while a dispatch mode is on: their nodes run without ours.

``prod`` divides by its factors where none is zero, and does not under a mode; ``masked_fill`` sums the gradient of its
value over what was filled, or over all: the bits differ. ``cumprod`` and ``binary_cross_entropy_with_logits`` with
``pos_weight`` take more memory (``isTensorSubclassLike`` and ``areAnyTensorSubclassLike`` in
``torch/csrc/autograd/FunctionsManual.cpp``; that no other derivative has other bits is held against torch's own list of
operators by ``tests/slow/test_every_operator.py``).

The nodes are found before the engine runs; hooks take the mode off before such a node and put it on after it. The engine
runs every node with the dispatch state that its backward began with, so that a node that fails leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple, Protocol, final

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

import torch
from lowtide.live.mode import Mode
from lowtide.live.tensors import node_of


class _Otherwise(NamedTuple):
    """A type of node that runs otherwise.

    Attributes:
        times: how far memory rises in it at most, its result included, in bytes of the gradients that it is given and makes
            (measured: where factors are zero, ``prod`` multiplies all others up from both sides).
        saved: what it must have saved to be one; empty: it is one always.
    """

    times: float
    saved: str = ""


_OTHERWISE: Final = {
    "ProdBackward0": _Otherwise(7),
    "ProdBackward1": _Otherwise(7),
    "MaskedFillBackward1": _Otherwise(2),
    "CumprodBackward0": _Otherwise(5),
    "BinaryCrossEntropyWithLogitsBackward0": _Otherwise(3, "_raw_saved_pos_weight"),
}


class Listener(Protocol):
    """Who is told of what runs unseen."""

    def unseen(self, node: Any, given: tuple[Any, ...], made: list[Any], /) -> contextlib.AbstractContextManager[None]:
        """Around a node that runs without the mode, given some gradients: those that it ``made`` are filled in at its end."""


@final
class Derivatives:
    """Around each run of autograd's engine."""

    def __init__(self, listener: Listener) -> None:
        """Nothing runs."""
        self._listener = listener
        self._open: list[tuple[list[Any], list[Any], contextlib.ExitStack]] = []

    @contextlib.contextmanager
    def around(self, outputs: Iterable[Any]) -> Iterator[None]:
        """Run autograd's engine from some tensors, or edges of the graph."""
        modes = _get_current_dispatch_mode_stack()
        if not modes or not all(isinstance(mode, Mode) for mode in modes):
            yield  # with a mode of the script's own, the plain run has one on, too
            return
        hooks = [hook for node in _otherwise(outputs) for hook in self._hook(node)]
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
        told.enter_context(self._listener.unseen(node, given, made))
        modes = [_pop_mode() for _ in _get_current_dispatch_mode_stack()]
        self._open.append((modes, made, told))

    def _after(self, given_back: tuple[Any, ...], _given: tuple[Any, ...]) -> None:
        modes, made, told = self._open.pop()
        for mode in reversed(modes):
            _push_mode(mode)
        made += given_back
        told.close()

    def _fail(self, depth: int, *error: Any) -> None:
        """The engine ended with an error in a node that is open."""
        while len(self._open) > depth:
            _, _, told = self._open.pop()
            told.__exit__(*error)


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
    known = _OTHERWISE.get(type(node).__name__)
    if known is None:
        return False
    return not known.saved or getattr(getattr(node, known.saved), "data", True) is not None  # older torch does not show it


def most_bytes(node: Any, given: Iterable[Any]) -> int:
    """How far memory rises at most in a node that runs otherwise."""
    made = (n._input_metadata[at] for n, at in node.next_functions if n is not None)
    sizes = [math.prod(m.shape) * m.dtype.itemsize for m in made]
    sizes += [g.nbytes for g in given if isinstance(g, torch.Tensor)]
    return int(_OTHERWISE[type(node).__name__].times * sum(sizes))
