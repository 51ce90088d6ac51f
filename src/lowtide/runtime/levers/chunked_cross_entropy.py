"""Cross entropy of a linear layer over pieces of the classes: only one piece of the outputs exists at a time.

Forward keeps the inputs and two numbers per row: the highest output, and the logarithm of the sum of exponentials relative to
it. Backward recomputes the pieces from these, as FlashAttention does for attention. The gradient of each piece of the weight
is one product over all rows, as in the baseline; that of the inputs is summed over the pieces in the next wider type.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lowtide.base.errors import LeverError
from lowtide.base.lever_catalogue import LOSS

CAST_BYTES = 256 << 10
"""Bytes (in float64) of a product that are cast at a time, to be added to a sum."""

Step = tuple[Callable[..., torch.Tensor], tuple[Any, ...], dict[str, Any]]
"""An element-wise function of a tensor, with its other positional and keyword arguments."""


@dataclass(frozen=True, slots=True)
class LossArguments:
    """How the loss is computed.

    Attributes:
        chain: element-wise functions between product and loss.
        ignore: the class that does not count (``ignore_index``).
        reduction, smoothing: ``reduction`` and ``label_smoothing`` of ``torch.nn.functional.cross_entropy``.
        result: type of the loss.
        columns: number of classes in one piece.
    """

    chain: tuple[Step, ...]
    ignore: int
    reduction: str
    smoothing: float
    result: torch.dtype
    columns: int


class ChunkedLoss(torch.autograd.Function):
    """Cross entropy of a linear layer's outputs, over pieces of the classes."""

    of_lowtide = True

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor,
        classes: torch.Tensor | None, asked: LossArguments,
    ) -> torch.Tensor:
        """Compute the loss.

        Args:
            ctx: autograd's context.
            x: (rows, features).
            weight: (classes, features).
            bias: (classes,) or None.
            target: (rows,), int64.
            classes: (classes,), a weight per class; or None.
            asked: see :class:`LossArguments`.

        Raises:
            IndexError: if a target is not a class (on CUDA, a device-side assertion fails).
        """
        valid = target != asked.ignore
        _check(target, valid, weight.size(0))
        total, at_target, spread, safe = (torch.zeros(x.size(0), dtype=torch.float64, device=x.device) for _ in range(4))
        top = torch.full_like(total, -torch.inf)
        met = torch.zeros((), dtype=torch.float64, device=x.device)  # total weight of the classes so far
        for start in range(0, weight.size(0), asked.columns):
            z = _sums(_piece(x, weight, bias, start, asked), asked.chain)
            end = start + z.size(1)
            inside = (target >= start) & (target < end)
            here = z.gather(1, (target - start).clamp(0, z.size(1) - 1).unsqueeze(1)).squeeze(1)
            at_target = torch.where(inside, here, at_target)
            new = torch.maximum(top, z.amax(1))
            before, safe = safe, torch.where(new == -torch.inf, torch.zeros_like(new), new)  # -inf: only masked classes so far
            z.sub_(safe.to(z.dtype).unsqueeze(1))
            if asked.smoothing:
                more = z.sum(1) if classes is None else z @ classes[start:end].to(z.dtype)
                spread = spread + (before - safe) * met + more
                met = met + (z.size(1) if classes is None else classes[start:end].sum())
            total = total * (top - safe).exp() + z.exp_().sum(1)
            top = new
            del z
        below = total.log()
        heavy = _heaviness(target, valid, classes, below)
        rows = (top - at_target + below) * heavy
        if asked.smoothing:
            smooth = torch.where(valid, (top - safe + below) * met - spread, torch.zeros_like(below))
            rows = (1 - asked.smoothing) * rows + asked.smoothing / weight.size(0) * smooth
        # As in torch, the mean divides by the total weight of the rows that count, even if it is 0.
        share = heavy.sum() if asked.reduction == "mean" else None
        bias = None if bias is None else bias.detach().clone()  # the baseline does not save it, so it may be written
        wide = torch.float64 if x.dtype is torch.float64 else torch.float32
        ctx.save_for_backward(x, weight, bias, target, classes, top.to(wide), below.to(wide), share)
        ctx.asked, ctx.marks = asked, _marks(x, weight)
        if asked.reduction == "none":
            return rows.to(asked.result)
        loss = rows.sum()
        return (loss if share is None else loss / share).to(asked.result)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        """Gradients of the inputs, the weight and the bias.

        Raises:
            LeverError: if the gradients need a graph of their own (``create_graph``), or if ``x`` or the weight was written
                through ``.data`` since the forward.
        """
        if torch.is_grad_enabled():
            raise LeverError(
                f"{LOSS}: a backward with create_graph=True goes through the loss: run again without --allow "
                f"{LOSS}"
            )
        with torch.autocast(grad.device.type, enabled=False):
            return ChunkedLoss._gradients(ctx, grad)

    @staticmethod
    def _gradients(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, bias, target, classes, top, below, share = ctx.saved_tensors
        asked: LossArguments = ctx.asked
        if not torch.equal(ctx.marks, _marks(x, weight)):
            raise LeverError(
                f"{LOSS}: the weights or inputs of the loss are written (by .data) between forward and backward, which "
                f"recomputes the logits from them: run again without --allow {LOSS}"
            )
        valid = target != asked.ignore
        scale = (grad.double() if share is None else grad.double() / share).to(top.dtype)
        heavy = _heaviness(target, valid, classes, top)
        # If no row counts, the scale is infinite, and torch's gradient is 0.
        heavy = torch.where(heavy != 0, heavy * scale * (1 - asked.smoothing), torch.zeros_like(heavy))
        even = torch.where(valid, scale * asked.smoothing / weight.size(0), torch.zeros_like(top)) if asked.smoothing else None
        all_classes = weight.size(0) if classes is None else classes.sum().to(top.dtype)
        want_x, want_weight, want_bias = ctx.needs_input_grad[:3]
        wider = torch.float64 if x.dtype in (torch.float32, torch.float64) else torch.float32
        into_x = torch.zeros(x.shape, dtype=wider, device=x.device) if want_x else None
        into_weight = torch.empty_like(weight) if want_weight else None
        into_bias = torch.empty_like(bias) if want_bias and bias is not None else None
        for start in range(0, weight.size(0), asked.columns):
            raw = _piece(x, weight, bias, start, asked)
            end = start + raw.size(1)
            z = _sums(raw, asked.chain)
            p = z.sub_(top.unsqueeze(1)).sub_(below.unsqueeze(1)).exp_()
            if even is None:
                p.mul_(heavy.unsqueeze(1))
            else:
                p.mul_((heavy + even * all_classes).unsqueeze(1))
                p.sub_(even.unsqueeze(1) if classes is None else even.unsqueeze(1) * classes[start:end].to(p.dtype))
            inside = (target >= start) & (target < end)
            at = (target - start).clamp(0, raw.size(1) - 1).unsqueeze(1)
            p.scatter_add_(1, at, torch.where(inside, -heavy, torch.zeros_like(heavy)).unsqueeze(1))
            g = _through(raw, asked.chain, p)
            del p, z
            if into_x is not None:
                _add_product(into_x, g, _columns_of(weight, start, end, g.dtype))
            if into_weight is not None:
                into_weight[start:end] = g.t() @ x
            if into_bias is not None:
                into_bias[start:end] = g.sum(0)
            del g, raw
        return None if into_x is None else into_x.to(x.dtype), into_weight, into_bias, None, None, None


def _marks(*tensors: torch.Tensor) -> torch.Tensor:
    """A sum over the bytes of each tensor, exact in any order. It reveals writes to ``.data``; version counters do not."""
    marks = []
    for tensor in tensors:
        flat = tensor.detach().contiguous().view(-1)
        whole = flat.numel() // (8 // flat.element_size()) * (8 // flat.element_size())
        marks += [flat[:whole].view(torch.int64).sum(), flat[whole:].view(torch.uint8).sum()]
    return torch.stack(marks)


def _columns_of(weight: torch.Tensor, start: int, end: int, dtype: torch.dtype) -> torch.Tensor:
    return weight[start:end].to(dtype)


def _add_product(into: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add a product to a sum of a wider type: there are many pieces where the baseline has a single product."""
    if a.dtype is torch.float32:
        product = a @ b
        rows = max(1, CAST_BYTES // (8 * into.size(1)))
        for sums, more in zip(into.split(rows), product.split(rows), strict=True):
            sums.add_(more)  # on the CPU torch casts the addend into a temporary
    else:
        into.addmm_(a.to(into.dtype), b.to(into.dtype))


def _piece(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, start: int, asked: LossArguments) -> torch.Tensor:
    """The product for one piece of the classes: (rows, columns)."""
    end = min(start + asked.columns, weight.size(0))
    some = _columns_of(weight, start, end, x.dtype)
    return x @ some.t() if bias is None else torch.addmm(bias[start:end].to(x.dtype), x, some.t())


def _sums(z: torch.Tensor, chain: tuple[Step, ...]) -> torch.Tensor:
    """The input of the loss: the product after the chain, in float32 at least."""
    for func, args, kwargs in chain:
        z = func(z, *args, **kwargs)
    return z if z.dtype in (torch.float32, torch.float64) else z.float()


def _through(z: torch.Tensor, chain: tuple[Step, ...], grad: torch.Tensor) -> torch.Tensor:
    """The gradient before the chain, given the one after it. If the chain only casts, ``z`` may hold anything."""
    if all(func is torch.Tensor.to for func, _, _ in chain):
        return grad.to(z.dtype)
    with torch.enable_grad():
        leaf = z.detach().requires_grad_()
        found: torch.Tensor = torch.autograd.grad(_sums(leaf, chain), leaf, grad)[0]
    return found


def _heaviness(
    target: torch.Tensor, valid: torch.Tensor, classes: torch.Tensor | None, alike: torch.Tensor
) -> torch.Tensor:
    """The weight of each row in the loss: (rows,), in the type of ``alike``."""
    if classes is None:
        return valid.to(alike.dtype)
    return torch.where(valid, classes.to(alike.dtype)[target.clamp(0, classes.numel() - 1)], torch.zeros_like(alike))


def _check(target: torch.Tensor, valid: torch.Tensor, classes: int) -> None:
    """Reject targets that are not a class, as torch's loss does.

    Raises:
        IndexError: naming one; on CUDA an assertion fails on the device instead.
    """
    wrong = valid & ((target < 0) | (target >= classes))
    if target.is_cuda:  # only CUDA has a check that does not wait for the device
        torch._assert_async(~wrong.any())
    elif wrong.any():
        raise IndexError(f"Target {int(target[wrong][0])} is out of bounds.")
