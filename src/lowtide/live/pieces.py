"""One layer in pieces, so that no operator works on all of it: recurrent layers over time, attention over samples.

oneDNN and cuDNN run a recurrent layer over the whole sequence as one operator, whose workspace and whose backward are as large
as the sequence. In pieces the state is carried from one to the next; each piece's saved values can be let go and made again
apart from the others. Outputs have the plain run's bits up to the kernels' own rounding; gradients of weights are summed in
another order. Dropout between layers draws what it draws in the plain run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, final

from torch.nn import functional

import torch
from lowtide.allowed import PIECES
from lowtide.live.outcome import LeverFigures
from lowtide.live.wraps import Wraps

COUNT: Final = 10
"""Pieces of a sequence ..."""
SHORTEST: Final = 4
"""... of so many time steps at least."""
MATH: Final = 0
"""``torch._fused_sdp_choice``: attention scores are whole in memory (``SDPBackend.MATH``)."""


@final
class Pieces:
    """The lever.

    Attributes:
        layers: how many recurrent layers ran in pieces.
        attentions: how many attentions did.
    """

    def __init__(self) -> None:
        """Wrap nothing yet."""
        self.layers = 0
        self.attentions = 0
        self._on = False
        self._wraps = Wraps()

    def install(self) -> None:
        """Wrap torch's recurrent layers and its attention."""
        for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
            self._wraps.put(torch._VF, name, self._recurrent)
        self._wraps.put(functional, "scaled_dot_product_attention", self._attention)
        self._on = True

    def remove(self) -> None:
        """Leave them as they were; what the script has taken of them meanwhile cuts no more."""
        self._on = False
        self._wraps.undo()

    def figures(self) -> list[LeverFigures]:
        """What became of the lever."""
        counts = ((self.layers, "recurrent layers"), (self.attentions, "attentions"))
        told = [f"{n} {what} ran in pieces" for n, what in counts if n]
        return [LeverFigures(name=PIECES, used=bool(told), text=", ".join(told) or "nothing was found to cut into pieces")]

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


def _is_plain_sequence(args: Any) -> bool:
    """Whether a call is (input, state, weights, biases?, layers, dropout, training, bidirectional?, batch first?)."""
    return (
        len(args) == 9
        and isinstance(args[2], (list, tuple))
        and isinstance(args[8], bool)
        and type(args[0]) is torch.Tensor
        and args[0].dim() == 3
        and not torch.compiler.is_compiling()
    )


def _is_plain_attention(q: Any, k: Any, v: Any, mask: Any) -> bool:
    """Whether a call is over several samples, each with its own queries, keys and values."""
    plain = all(type(t) is torch.Tensor and not t.is_nested and t.dim() == 4 and t.size(0) == q.size(0) for t in (q, k, v))
    if not plain or q.size(0) < 2 or torch.compiler.is_compiling() or torch._C._is_tracing():
        return False
    fits = mask is None or (mask.dim() <= 4 and (mask.dim() < 4 or mask.size(0) in (1, q.size(0))))
    return fits and torch._C._functorch.peek_interpreter_stack() is None


def _over_time(
    x: torch.Tensor, state: tuple[torch.Tensor, ...], run: Callable[..., tuple[torch.Tensor, ...]]
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """A layer over pieces of a sequence: (time, batch, features) -> outputs, and the last state."""
    parts = []
    for part in x.split(max(SHORTEST, -(-x.size(0) // COUNT))):
        output, *after = run(part, state)
        parts.append(output)
        state = tuple(after)
    return torch.cat(parts), state
