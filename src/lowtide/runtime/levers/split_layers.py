"""Runs single layers in pieces, so that no operator works on all of a layer's data at once.

Recurrent layers run over pieces of the time, attention over samples, and the backwards of convolutions and batch norms over
samples and channels (:mod:`lowtide.runtime.levers.split_backward`).

oneDNN and cuDNN run a recurrent layer over the whole sequence as one operator, whose workspace and whose backward are as large
as the sequence. In pieces, the state is carried from one to the next, and each piece's saved values can be evicted and
recomputed independently of the others. Outputs have the baseline's bits up to the kernels' own rounding; gradients of weights
are summed in another order. Dropout between layers draws the same numbers as in the baseline.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, final

from torch.nn import functional

import torch
from lowtide.base.lever_catalogue import LEAST_PIECES_BYTES, SPLIT_OPS
from lowtide.runtime.levers.split_backward import Convolution, Norm, pieces_of
from lowtide.runtime.monkeypatch import Wraps
from lowtide.runtime.run_figures import LeverFigures
from lowtide.runtime.torch_state import within_transform

COUNT: Final = 10
"""Maximum number of pieces of a sequence ..."""
SHORTEST: Final = 4
"""... and minimum number of time steps in one; only the last may have fewer."""
MATH: Final = 0
"""Result of ``torch._fused_sdp_choice`` if the attention scores would be whole in memory (``SDPBackend.MATH``)."""


@final
class SplitLayers:
    """The memory optimization, for all layers of a process. Its attributes count every call of a layer.

    Attributes:
        layers: recurrent layers that ran in pieces.
        attentions: attentions that ran in pieces.
        convolutions: convolutions whose backward runs in pieces.
        norms: batch norms whose backward runs in pieces.
    """

    def __init__(self) -> None:
        """Wrap nothing yet."""
        self.layers = 0
        self.attentions = 0
        self.convolutions = 0
        self.norms = 0
        self._on = False
        self._wraps = Wraps()

    def install(self) -> None:
        """Wrap torch's recurrent layers, its attention, its convolutions and its batch norm."""
        for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
            self._wraps.put(torch._VF, name, self._recurrent)
        self._wraps.put_operator(functional, "scaled_dot_product_attention", self._attention)
        for sides in (1, 2, 3):
            for owner in (torch, functional):
                self._wraps.put_operator(owner, f"conv{sides}d", functools.partial(self._convolution, sides))
                self._wraps.put_operator(owner, f"conv_transpose{sides}d", functools.partial(self._transposed, sides))
        self._wraps.put_operator(torch, "batch_norm", self._norm)
        self._on = True

    def remove(self) -> None:
        """Restore the originals; a wrapper that the script has kept no longer splits anything."""
        self._on = False
        self._wraps.undo()

    def figures(self) -> list[LeverFigures]:
        """Figures of this memory optimization, for the summary."""
        counts = (
            (self.layers, "recurrent layers"), (self.attentions, "attentions"),
            (self.convolutions, "backwards of convolutions"), (self.norms, "backwards of batch norms"),
        )
        told = [f"{n} {what} ran in pieces" for n, what in counts if n]
        return [LeverFigures(name=SPLIT_OPS, used=bool(told), text=", ".join(told) or "nothing was found to split")]

    # --- recurrent layers --------------------------------------------------------------------------------------------

    def _recurrent(self, original: Any) -> Any:
        @functools.wraps(original)
        def layers(*args: Any, **kwargs: Any) -> Any:
            if not self._on or kwargs or not _is_plain_sequence(args):
                return original(*args, **kwargs)
            x, state, weights, biased, count, dropout, training, both, batch_first = args
            x = x.transpose(0, 1) if batch_first else x
            if not torch.is_grad_enabled() or (dropout and training and count > 1 and x.is_cuda) or x.size(0) < 2 * SHORTEST:
                return original(*args)
            directions = 2 if both else 1
            each = len(weights) // (count * directions)
            several = isinstance(state, (list, tuple))
            states = tuple(state) if several else (state,)
            last: list[tuple[torch.Tensor, ...]] = []
            for layer in range(count):
                outputs = []
                for direction in range(directions):
                    at = layer * directions + direction
                    begin = tuple(s[at : at + 1] for s in states)
                    mine = weights[at * each : (at + 1) * each]

                    def run(part: torch.Tensor, now: tuple[torch.Tensor, ...], mine: Any = mine) -> tuple[torch.Tensor, ...]:
                        given = now if several else now[0]
                        found: tuple[torch.Tensor, ...] = original(part, given, mine, biased, 1, 0.0, training, False, False)
                        return found

                    made, end = _over_time(x.flip(0) if direction else x, begin, run)
                    outputs.append(made.flip(0) if direction else made)
                    last.append(end)
                x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
                if dropout and training and layer < count - 1:
                    x = functional.dropout(x, dropout, training=True)
            self.layers += count
            ends = tuple(torch.cat(parts) for parts in zip(*last, strict=True))
            return (x.transpose(0, 1) if batch_first else x, *ends)

        return layers

    # --- attention ---------------------------------------------------------------------------------------------------

    def _attention(self, original: Any) -> Any:
        @functools.wraps(original)
        def attention(
            query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *args: Any, **kwargs: Any
        ) -> Any:
            q, k, v = query, key, value
            if not self._on or not _is_plain_attention(q, k, v, attn_mask) or dropout_p or not torch.is_grad_enabled():
                return original(q, k, v, attn_mask, dropout_p, *args, **kwargs)
            if torch._fused_sdp_choice(q, k, v, attn_mask, dropout_p, *args, **kwargs) != MATH:
                return original(q, k, v, attn_mask, dropout_p, *args, **kwargs)
            self.attentions += 1
            parts = []
            for i in range(q.size(0)):
                each = slice(i, i + 1)
                own = attn_mask is not None and attn_mask.dim() == 4 and attn_mask.size(0) > 1
                mask = attn_mask[each] if own else attn_mask
                parts.append(original(q[each], k[each], v[each], mask, dropout_p, *args, **kwargs))
            return torch.cat(parts)

        return attention

    # --- convolutions and batch norms --------------------------------------------------------------------------------

    def _convolution(self, sides: int, original: Any) -> Any:
        @functools.wraps(original)
        def convolution(
            input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1  # noqa: A002
        ) -> Any:
            if not self._on or isinstance(padding, str) or not _is_cut(input, sides, weight, bias):
                return original(input, weight, bias, stride, padding, dilation, groups)
            how = (_each(stride, sides), _each(padding, sides), _each(dilation, sides), False, [0] * sides, groups)
            return self._convolved(input, weight, bias, how)

        return convolution

    def _transposed(self, sides: int, original: Any) -> Any:
        @functools.wraps(original)
        def convolution(
            input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, output_padding: Any = 0,  # noqa: A002
            groups: int = 1, dilation: Any = 1,
        ) -> Any:
            if not self._on or not _is_cut(input, sides, weight, bias):
                return original(input, weight, bias, stride, padding, output_padding, groups, dilation)
            last = _each(output_padding, sides)
            how = (_each(stride, sides), _each(padding, sides), _each(dilation, sides), True, last, groups)
            return self._convolved(input, weight, bias, how)

        return convolution

    def _convolved(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, how: tuple[Any, ...]) -> Any:
        self.convolutions += 1
        given = (_as_cast(x), _as_cast(weight), None if bias is None else _as_cast(bias))
        with torch.autocast(x.device.type, enabled=False):
            return Convolution.apply(*given, how)  # type: ignore[no-untyped-call]

    def _norm(self, original: Any) -> Any:
        @functools.wraps(original)
        def norm(
            input: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool, momentum: float,  # noqa: A002
            eps: float, cudnn_enabled: bool,
        ) -> Any:
            plain = self._on and _is_plain_layer(input, input.dim() - 2, weight, bias)
            if not plain or input.device.type != "cpu" or not input.is_contiguous():
                return original(input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled)
            self.norms += 1
            return Norm.apply(input, weight, bias, running_mean, running_var, (training, momentum, eps))  # type: ignore[no-untyped-call]

        return norm


def _is_cut(x: Any, sides: int, weight: Any, bias: Any) -> bool:
    """Whether a convolution's backward runs in pieces."""
    return _is_plain_layer(x, sides, weight, bias) and pieces_of(x) > 1


def _is_plain_layer(x: Any, sides: int, weight: Any, bias: Any) -> bool:
    """Whether a call is on a batch of samples, seen by autograd, outside any transform, and large enough to be cut."""
    if _is_traced() or torch.autograd.forward_ad._current_level >= 0:
        return False
    types = (torch.Tensor, torch.nn.Parameter)
    given = [t for t in (x, weight, bias) if t is not None]
    if type(x) is not torch.Tensor or any(type(t) not in types for t in given) or x.device.type not in ("cpu", "cuda"):
        return False
    if x.dim() != sides + 2 or x.layout is not torch.strided or x.nbytes < LEAST_PIECES_BYTES:
        return False
    return torch.is_grad_enabled() and any(t.requires_grad for t in given) and x.is_floating_point()


def _is_traced() -> bool:
    """Whether a compiler, a tracer or a transform is active: it must see torch's own operators."""
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return True
    return within_transform()


def _each(item: Any, sides: int) -> list[int]:
    """One number per spatial dimension."""
    found = list(item) if isinstance(item, (tuple, list)) else [item]
    return found * sides if len(found) == 1 else found


def _as_cast(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in the type to which autocast, if it is on, casts a convolution's arguments."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or tensor.dtype is torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))


def _is_plain_sequence(args: Any) -> bool:
    """Whether a call is on a sequence that is not packed.

    Its arguments are then input, state, weights, whether there are biases, number of layers, dropout, training, whether it is
    bidirectional, and whether the batch comes first.
    """
    return (
        len(args) == 9
        and isinstance(args[2], (list, tuple))
        and isinstance(args[8], bool)
        and type(args[0]) is torch.Tensor
        and args[0].dim() == 3
        and not _is_traced()
    )


def _is_plain_attention(q: Any, k: Any, v: Any, mask: Any) -> bool:
    """Whether a call is on several samples, each with its own queries, keys and values, in four dimensions."""
    plain = all(type(t) is torch.Tensor and not t.is_nested and t.dim() == 4 and t.size(0) == q.size(0) for t in (q, k, v))
    if not plain or q.size(0) < 2 or _is_traced():
        return False
    return mask is None or (mask.dim() <= 4 and (mask.dim() < 4 or mask.size(0) in (1, q.size(0))))


def _over_time(
    x: torch.Tensor, state: tuple[torch.Tensor, ...], run: Callable[..., tuple[torch.Tensor, ...]]
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Run a layer over pieces of a sequence, (time, batch, features); return the outputs and the last state."""
    parts = []
    for part in x.split(max(SHORTEST, -(-x.size(0) // COUNT))):
        output, *after = run(part, state)
        parts.append(output)
        state = tuple(after)
    return torch.cat(parts), state
