"""Convolutions and batch norms whose backward runs in pieces: over the batch, or over the channels.

What the library allocates inside a backward (oneDNN: the input and the gradient in a layout of its own) is as large as what it
works on: for a 3x3 convolution, two fifths of everything resident at that moment. The forward is torch's own, bit for bit.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from lowtide.base.lever_catalogue import CHANNEL_PIECES, sample_pieces


def pieces_of(x: torch.Tensor) -> int:
    """Number of pieces that a convolution's batch is cut into; 1 if it stays whole."""
    return sample_pieces(x.size(0), x[0].numel(), x.dim())


class Convolution(torch.autograd.Function):
    """A convolution whose backward runs over pieces of the batch (:func:`pieces_of`)."""

    of_lowtide = True

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, how: tuple[Any, ...]
    ) -> torch.Tensor:
        """Run torch's convolution.

        Args:
            ctx: autograd's context.
            x: (samples, channels, sides...).
            weight: (output channels, channels / groups, kernel...), or a transposed convolution's layout.
            bias: (output channels,) or None.
            how: stride, padding, dilation, transposed, output padding, groups, as ``torch.convolution`` takes them.
        """
        ctx.save_for_backward(x, weight)
        ctx.how, ctx.bias_size = how, None if bias is None else bias.shape
        return torch.convolution(x, weight, bias, *how)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        """Gradients of input, weight and bias; not in pieces if they need a graph of their own (``create_graph``)."""
        x, weight = ctx.saved_tensors
        mask = ctx.needs_input_grad[:3]

        def part(g: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            found: tuple[torch.Tensor | None, ...] = torch.ops.aten.convolution_backward(
                g, x, weight, ctx.bias_size, *ctx.how, mask
            )
            return found

        with torch.autocast(grad.device.type, enabled=False):
            if torch.is_grad_enabled():
                return (*part(grad, x), None)
            into = torch.empty_like(x) if mask[0] else None
            sums: list[torch.Tensor | None] = [None, None]
            count = pieces_of(x)
            for g, piece, target in zip(
                *(t.tensor_split(count) for t in (grad, x, grad if into is None else into)), strict=True
            ):
                inner, *outer = part(g, piece)
                if into is not None:
                    assert inner is not None
                    target.copy_(inner)
                del inner
                for i, found in enumerate(outer):
                    if found is not None:
                        sums[i] = _added(sums[i], found)
        return (into, _as(sums[0], weight), _as(sums[1], weight), None)


class Norm(torch.autograd.Function):
    """A batch norm whose backward runs over pieces of the channels, which are independent of each other."""

    of_lowtide = True

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, mean: torch.Tensor | None,
        var: torch.Tensor | None, how: tuple[Any, ...],
    ) -> torch.Tensor:
        """Run torch's batch norm; the running statistics are updated once.

        Args:
            ctx: autograd's context.
            x: (samples, channels, sides...).
            weight: (channels,) or None; bias, mean and var likewise.
            bias: see weight.
            mean: running mean.
            var: running variance.
            how: training, momentum, epsilon.
        """
        out, here, scale = torch.native_batch_norm(x, weight, bias, mean, var, *how)
        kept = (None, None) if how[0] else (mean, var)
        ctx.save_for_backward(x, weight, *kept, here, scale)
        ctx.how = how
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        """Gradients of input, weight and bias; not in pieces if they need a graph of their own (``create_graph``)."""
        x, weight, mean, var, here, scale = ctx.saved_tensors
        training, _, epsilon = ctx.how
        mask = ctx.needs_input_grad[:3]

        def part(g: torch.Tensor, x: torch.Tensor, of: slice) -> tuple[torch.Tensor | None, ...]:
            own = [None if t is None else t if of == _ALL else t[of] for t in (weight, mean, var, here, scale)]
            found: tuple[torch.Tensor | None, ...] = torch.ops.aten.native_batch_norm_backward(
                g, x, *own, training, epsilon, mask
            )
            return found

        with torch.autocast(grad.device.type, enabled=False):
            if torch.is_grad_enabled():
                return (*part(grad, x, _ALL), None, None, None)
            into = torch.empty_like(x) if mask[0] else None
            sums: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
            step = -(-x.size(1) // CHANNEL_PIECES)
            for start in range(0, x.size(1), step):
                of = slice(start, start + step)
                inner, *outer = part(grad[:, of].contiguous(), x[:, of].contiguous(), of)
                if into is not None:
                    assert inner is not None
                    into[:, of].copy_(inner)
                del inner
                for found, all_ in zip(outer, sums, strict=True):
                    if found is not None:
                        all_.append(found)
        return (into, *(torch.cat(s) if s and m else None for s, m in zip(sums, mask[1:], strict=True)), None, None, None)


_ALL: Final = slice(None)


def _added(total: torch.Tensor | None, found: torch.Tensor) -> torch.Tensor:
    """Add to a running sum; bfloat16 and float16 are summed in float32."""
    if total is None:
        return found.float() if found.dtype in (torch.bfloat16, torch.float16) else found
    return total.add_(found)


def _as(total: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
    return None if total is None else total.to(like.dtype)
