"""A training step that, when memory runs out, is done again in micro-batches with the same effective batch."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal, final, get_args

import numpy as np

import torch
from lowtide.base.errors import MicroBatchError
from lowtide.checkpoint import ranks
from lowtide.probe.catalogue import out_of_memory

Reduction = Literal["mean", "sum"]
_NORMS: Final = (torch.nn.modules.batchnorm._BatchNorm,)
_OTHERS: Final = 2
"""What a rank says whose own attempt went well, or failed for want of memory, or failed otherwise: 0, 1, 2."""


def micro_batched(
    loss_fn: Callable[..., Any] | None = None,
    *,
    model: torch.nn.Module | Iterable[torch.nn.Module],
    reduction: Reduction = "mean",
    count: Callable[..., float] | None = None,
    batch_norm: Literal["refuse", "warn", "allow"] = "refuse",
    dim: int = 0,
) -> Any:
    """Make a function that gives a loss into a step: forward and backward, in micro-batches where the whole does not fit.

    Used as a decorator, ``@micro_batched(model=model)``, or called with the function. What it gives is called with a whole
    batch; it runs the forward and the backward, adds to ``.grad`` what ``loss_fn(*batch).backward()`` would have added, and
    returns the loss of the whole batch, detached. When memory runs out, gradients and buffers are put back as they were,
    outside of any ``except`` block, and the batch is cut in two, again and again; the size that worked is remembered.

    Gradients equal those of the whole batch within the rounding of floating point: sums are added in another order, so they
    are **not** equal bit for bit, and dropout draws other masks.

    With ``torch.distributed``, all ranks agree on the outcome of every attempt and on the number of pieces; a
    ``DistributedDataParallel`` model's gradients are averaged once, after all ranks have succeeded.

    Args:
        loss_fn: takes tensors (or dicts, lists, tuples of tensors) of equal length along ``dim`` and gives a scalar loss.
        model: the module, or modules, that it trains: their gradients and buffers are put back after a failure.
        reduction: whether the loss is a mean over samples or a sum.
        count: takes the same arguments as ``loss_fn`` and gives what the mean divides by, where that is not the number of
            samples: tokens that are not ignored, the sum of class weights.
        batch_norm: what to do where a module in training mode normalises over the batch, so that micro-batches change its
            result: raise, warn once, or go on.
        dim: along which batches are cut.

    Raises:
        MicroBatchError: if one sample does not fit, if nothing can be cut, or on batch normalisation.
    """
    modules = (model,) if isinstance(model, torch.nn.Module) else tuple(model)

    def made(function: Callable[..., Any]) -> MicroBatched:
        return MicroBatched(function, modules, reduction, count, batch_norm, dim)

    return made if loss_fn is None else made(loss_fn)


@dataclass(slots=True)
class _Before:
    """What a failed attempt must not change."""

    grads: list[tuple[torch.Tensor, torch.Tensor | None]]
    buffers: list[tuple[torch.nn.Module, str, torch.Tensor, torch.Tensor]]


@final
class MicroBatched:
    """A loss function as a step. Made by `micro_batched`.

    Attributes:
        pieces: into how many micro-batches a batch is cut; 1 until memory runs out.
        size: samples of the largest micro-batch that worked; None before the first step.
        failures: attempts for which memory did not suffice.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        modules: Sequence[torch.nn.Module],
        reduction: Reduction,
        count: Callable[..., float] | None,
        batch_norm: str,
        dim: int,
    ) -> None:
        """Nothing was tried yet.

        Raises:
            ValueError: if a choice is none of those that there are.
        """
        if reduction not in get_args(Reduction):
            raise ValueError(f"reduction={reduction!r}: the loss is a 'mean' over the samples, or their 'sum'")
        if batch_norm not in ("refuse", "warn", "allow"):
            raise ValueError(f"batch_norm={batch_norm!r}: it is 'refuse', 'warn' or 'allow'")
        self._function, self._modules, self._reduction, self._count = function, modules, reduction, count
        self._batch_norm, self._dim = batch_norm, dim
        self.size: int | None = None
        self._limit: int | None = None
        self.pieces = 1
        self.failures = 0
        self.__doc__ = inspect.getdoc(function)

    def larger(self) -> None:
        """Try the whole batch again at the next step."""
        self._limit = None

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Forward and backward of a whole batch; its loss, detached.

        Raises:
            MicroBatchError: if one sample does not fit, if the batch cannot be cut, or on batch normalisation.
        """
        total = _length((*args, *kwargs.values()), self._dim)
        # ranks may have batches of different lengths: the number of pieces is what they share
        pieces = ranks.highest(1 if self._limit is None else math.ceil(total / self._limit))
        before = self._before((args, kwargs))
        try:
            loss, pieces = self._tried(args, kwargs, pieces, total, before)
        except BaseException:
            self._undo(before)
            for p, grad in before.grads:
                p.grad = grad
            raise
        self.pieces, self.size = pieces, math.ceil(total / pieces)
        if pieces > 1:
            self._limit = min(self.size, self._limit or self.size)
        self._finish(before)
        return loss

    def _tried(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], pieces: int, total: int, before: _Before
    ) -> tuple[torch.Tensor, int]:
        """The loss, and the number of pieces with which it was computed."""
        while True:
            if pieces > 1:
                self._check_norms()
            outcome, loss, error = self._attempt(args, kwargs, min(pieces, total), total)
            worst = ranks.highest(outcome)
            if not worst:
                assert loss is not None
                return loss, pieces
            del loss  # outside of any `except` block: no frame holds the attempt's tensors any more
            self._undo(before)
            if worst == _OTHERS:
                raise error or MicroBatchError("another rank failed in its step, and not for want of memory")
            self.failures += 1
            _empty()
            longest = ranks.highest(total)
            if pieces >= longest:
                raise MicroBatchError(
                    f"one sample at a time does not fit{_said(error)}: use a smaller model or input, or `lowtide run --budget`"
                ) from error
            pieces = min(2 * pieces, longest)

    # --- one attempt --------------------------------------------------------------------------------------------------

    def _attempt(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], pieces: int, total: int
    ) -> tuple[int, torch.Tensor | None, BaseException | None]:
        """Whether it went well, the loss, and the error, stripped of the frames that hold its tensors."""
        try:
            return 0, self._run(args, kwargs, pieces, total), None
        except Exception as error:
            found = error
        memory = out_of_memory(found) is not None
        if memory:
            _forget(found)
        return (1 if memory else _OTHERS), None, found

    def _run(self, args: Sequence[Any], kwargs: Mapping[str, Any], pieces: int, total: int) -> torch.Tensor:
        whole = float(total) if self._count is None else float(self._count(*args, **kwargs))
        loss: torch.Tensor | None = None
        with _unsynchronised(self._modules):
            for start, stop in _bounds(total, pieces):
                given, named = (args, kwargs) if pieces == 1 else _cut((args, kwargs), self._dim, start, stop)
                part = self._function(*given, **named)
                if pieces > 1 and self._reduction == "mean":
                    size = float(stop - start) if self._count is None else float(self._count(*given, **named))
                    if not size:  # a mean over nothing: it has no share in the whole
                        continue
                    part = part * (size / whole)
                part.backward()
                loss = part.detach() if loss is None else loss + part.detach()
        if loss is None:
            return torch.zeros(())
        return loss

    # --- before and after ---------------------------------------------------------------------------------------------

    def _before(self, batch: Any) -> _Before:
        """Set gradients aside (no copy is made) and keep the buffers' values."""
        leaves = [t for t in _tensors(batch) if t.requires_grad and t.is_leaf]
        found = [p for m in self._modules for p in m.parameters()]
        parameters = list({id(p): p for p in [*found, *leaves]}.values())
        grads: list[tuple[torch.Tensor, torch.Tensor | None]] = [(p, p.grad) for p in parameters]
        for p in parameters:
            p.grad = None
        owners = {id(m): m for root in self._modules for m in root.modules()}.values()
        buffers = [(m, name, b) for m in owners for name, b in m._buffers.items() if b is not None]
        return _Before(grads, [(m, name, b, b.detach().clone()) for m, name, b in buffers])

    def _undo(self, before: _Before) -> None:
        for p, _ in before.grads:
            p.grad = None
        with torch.no_grad():
            for module, name, buffer, value in before.buffers:
                buffer.copy_(value)
                module._buffers[name] = buffer  # forward may have put another in its place

    def _finish(self, before: _Before) -> None:
        """Average over ranks where the model asks for it, then add what was there before."""
        for module in self._modules:
            if isinstance(module, torch.nn.parallel.DistributedDataParallel):
                _average(module)
        for p, grad in before.grads:
            if grad is not None:
                p.grad = grad if p.grad is None else grad.add_(p.grad)

    def _check_norms(self) -> None:
        """Say that micro-batches change what batch normalisation computes.

        Raises:
            MicroBatchError: unless that was allowed.
        """
        names = [n for m in self._modules for n, x in m.named_modules() if x.training and _of_the_batch(x)]
        if not names or self._batch_norm == "allow":
            return
        text = (
            f"{', '.join(names[:3])}{' and more' if len(names) > 3 else ''} normalise over the batch, or change with each "
            "forward: in micro-batches gradients differ from the whole batch's"
        )
        if self._batch_norm == "refuse":
            raise MicroBatchError(f"{text}; use group normalisation, eval mode, or batch_norm='warn'")
        warnings.warn(text, stacklevel=4)
        self._batch_norm = "allow"


def _of_the_batch(module: torch.nn.Module) -> bool:
    """Whether what a module computes in training depends on how the batch is cut."""
    if isinstance(module, _NORMS):
        return True
    if isinstance(module, torch.nn.modules.instancenorm._InstanceNorm):
        return bool(module.track_running_stats)
    hooks = {type(hook).__name__ for hook in module._forward_pre_hooks.values()}  # the older kind is a hook
    return isinstance(module, torch.nn.utils.parametrizations._SpectralNorm) or "SpectralNorm" in hooks


def _average(module: torch.nn.parallel.DistributedDataParallel) -> None:
    """Average gradients over ranks, and take the first rank's buffers, as the module itself does in forward and backward."""
    group = module.process_group
    trained = [p for p in module.parameters() if p.requires_grad]
    used = ranks.highest_each([int(p.grad is not None) for p in trained])
    for p, some in zip(trained, used, strict=True):
        if some:
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            torch.distributed.all_reduce(grad, group=group)
            p.grad = grad.div_(torch.distributed.get_world_size(group))
    if module.broadcast_buffers:
        for buffer in module.buffers():
            torch.distributed.broadcast(buffer, group=group, group_src=0)


def _said(error: BaseException | None) -> str:
    return "" if error is None else f" ({str(error).splitlines()[0][:200]})"


def _forget(error: BaseException) -> None:
    """Take the frames off an error: they hold the attempt's tensors."""
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__


def _empty() -> None:
    """Give cached device memory back, so that pieces of other sizes find room."""
    kind = torch.accelerator.current_accelerator()
    if kind is not None:
        torch.get_device_module(kind).empty_cache()


@contextmanager
def _unsynchronised(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Without the collectives of backward: a rank that fails must not leave the others waiting in one."""
    with ExitStack() as stack:
        for module in modules:
            if isinstance(module, torch.nn.parallel.DistributedDataParallel):
                stack.enter_context(module.no_sync())
                module.require_forward_param_sync = False  # nor those of forward
        yield


# --- batches --------------------------------------------------------------------------------------------------------------


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _tensors(value)


def _length(arguments: Sequence[Any], dim: int) -> int:
    """Samples of a batch.

    Raises:
        MicroBatchError: if its tensors differ.
    """
    lengths = {t.shape[dim] if t.dim() > dim else -1 for t in _tensors(arguments) if t.dim()}
    lengths = lengths.union(*map(_others, arguments))
    if len(lengths) != 1:
        raise MicroBatchError(
            f"the batch has {sorted(lengths) or 'no'} lengths along dimension {dim} (-1: what is no tensor, or has no such "
            "dimension): tensors of one and the same length are needed; "
            "leave what is not per sample out of the arguments (a closure can hold it)"
        )
    found = int(lengths.pop())
    if found < 1:
        raise MicroBatchError("the batch is empty, or its tensors have no dimension along which it could be cut")
    return found


def _others(tree: Any) -> set[int]:
    """Lengths of what is per sample but no tensor; -1 where it could not be cut.

    Arrays could be broadcast against a piece of one sample and give a wrong loss without an error, and so could lists that a
    loss function makes tensors of; the names in a list would be taken for those of other samples.
    """
    if isinstance(tree, np.ndarray):
        return {-1} if tree.ndim else set()
    if isinstance(tree, Mapping):
        return set().union(*map(_others, tree.values())) if tree else set()
    if isinstance(tree, (list, tuple)):
        plain = len(tree) > 0 and not any(isinstance(x, (torch.Tensor, np.ndarray, Mapping, list, tuple)) for x in tree)
        return {-1} if plain else set().union(*map(_others, tree))
    return set()


def _cut(tree: Any, dim: int, start: int, stop: int) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.narrow(dim, start, stop - start) if tree.dim() > dim else tree
    if isinstance(tree, Mapping):
        return {key: _cut(value, dim, start, stop) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_cut(value, dim, start, stop) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(_cut(value, dim, start, stop) for value in tree)
    return tree


def _bounds(total: int, pieces: int) -> Iterator[tuple[int, int]]:
    """Cuts into pieces of equal size, but for the last."""
    size = math.ceil(total / pieces)
    for start in range(0, total, size):
        yield start, min(start + size, total)
