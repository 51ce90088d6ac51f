"""A training step that, when memory runs out, runs again in micro-batches with the same effective batch."""

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
"""A rank's outcome of an attempt: 0 if it succeeded, 1 if memory ran out, 2 (this constant) if it failed otherwise."""


def micro_batched(
    loss_fn: Callable[..., Any] | None = None,
    *,
    model: torch.nn.Module | Iterable[torch.nn.Module],
    reduction: Reduction = "mean",
    count: Callable[..., float] | None = None,
    batch_norm: Literal["refuse", "warn", "allow"] = "refuse",
    dim: int = 0,
) -> Any:
    """Turn a loss function into a training step: forward and backward, in micro-batches if the whole batch does not fit.

    Use it as a decorator, ``@micro_batched(model=model)``, or call it with the function. The result is called with a whole
    batch. It runs the forward and the backward, adds to ``.grad`` what ``loss_fn(*batch).backward()`` would have added, and
    returns the loss of the whole batch, detached. When memory runs out, it restores gradients and buffers, outside of any
    ``except`` block, and halves the micro-batches until they fit; it remembers the size that worked.

    Gradients equal those of the whole batch up to floating-point rounding: sums are added in another order, so they are
    **not** equal bit for bit, and dropout draws other masks.

    With ``torch.distributed``, all ranks agree on the outcome of every attempt and on the number of micro-batches. The
    gradients of a ``DistributedDataParallel`` model are averaged once, after all ranks have succeeded.

    Args:
        loss_fn: takes tensors (or dicts, lists, tuples of tensors) of equal length along ``dim`` and returns a scalar loss.
        model: the module or modules to train: their gradients and buffers are restored after a failure.
        reduction: whether the loss is a mean over samples or a sum.
        count: takes the same arguments as ``loss_fn`` and returns what the mean divides by, if that is not the number of
            samples: the number of tokens that are not ignored, the sum of class weights.
        batch_norm: what to do if a module in training mode normalises over the batch, so that micro-batches change its
            result: raise, warn once, or continue.
        dim: the dimension along which batches are cut.

    Raises:
        MicroBatchError: when the step is called: if one sample does not fit, if the batch cannot be cut, or because of batch
            normalisation.
    """
    modules = (model,) if isinstance(model, torch.nn.Module) else tuple(model)

    def made(function: Callable[..., Any]) -> MicroBatched:
        return MicroBatched(function, modules, reduction, count, batch_norm, dim)

    return made if loss_fn is None else made(loss_fn)


@dataclass(slots=True)
class _Before:
    """Gradients and buffers from before a step, which a failed attempt must not change."""

    grads: list[tuple[torch.Tensor, torch.Tensor | None]]
    buffers: list[tuple[torch.nn.Module, str, torch.Tensor, torch.Tensor]]


@final
class MicroBatched:
    """A loss function as a training step, created by `micro_batched`.

    Attributes:
        pieces: number of micro-batches in the latest step; 1 until memory runs out.
        size: samples per micro-batch in the latest step (the last one may be smaller); None before the first step.
        failures: attempts for which memory ran out, on this rank or another.
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
        """Begin with the whole batch.

        Raises:
            ValueError: if ``reduction`` or ``batch_norm`` is not one of its choices.
        """
        if reduction not in get_args(Reduction):
            raise ValueError(f"reduction={reduction!r}: it must be 'mean' or 'sum' (over the samples)")
        if batch_norm not in ("refuse", "warn", "allow"):
            raise ValueError(f"batch_norm={batch_norm!r}: it must be 'refuse', 'warn' or 'allow'")
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
        """Run the forward and the backward of a whole batch; return its loss, detached.

        Raises:
            MicroBatchError: if one sample does not fit, if the batch cannot be cut, or because of batch normalisation.
        """
        total = _length((*args, *kwargs.values()), self._dim)
        # Ranks may have batches of different lengths, so they agree on the number of pieces, not on their size.
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
        """Double the number of pieces until an attempt succeeds; return the loss and that number."""
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
                raise error or MicroBatchError("another rank failed in its step, and not for lack of memory")
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
        """Run once; return the outcome (see `_OTHERS`), the loss, and the error.

        An out-of-memory error loses its tracebacks: their frames hold the attempt's tensors.
        """
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
                    if not size:  # a mean over nothing, which adds nothing to the whole
                        continue
                    part = part * (size / whole)
                part.backward()
                loss = part.detach() if loss is None else loss + part.detach()
        if loss is None:
            return torch.zeros(())
        return loss

    # --- before and after ---------------------------------------------------------------------------------------------

    def _before(self, batch: Any) -> _Before:
        """Set gradients aside without copying them, and copy the buffers."""
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
                module._buffers[name] = buffer  # forward may have replaced it by another tensor

    def _finish(self, before: _Before) -> None:
        """Average the gradients of ``DistributedDataParallel`` models over ranks, then add those from before the step."""
        for module in self._modules:
            if isinstance(module, torch.nn.parallel.DistributedDataParallel):
                _average(module)
        for p, grad in before.grads:
            if grad is not None:
                p.grad = grad if p.grad is None else grad.add_(p.grad)

    def _check_norms(self) -> None:
        """Raise or warn if micro-batches change what a module computes in training mode.

        Raises:
            MicroBatchError: if so, with ``batch_norm="refuse"``.
        """
        names = [n for m in self._modules for n, x in m.named_modules() if x.training and _of_the_batch(x)]
        if not names or self._batch_norm == "allow":
            return
        text = (
            f"{', '.join(names[:3])}{' and more' if len(names) > 3 else ''} normalise over the batch, or change with each "
            "forward: micro-batches give other gradients than the whole batch"
        )
        if self._batch_norm == "refuse":
            raise MicroBatchError(f"{text}; use group normalisation, eval mode, or batch_norm='warn'")
        warnings.warn(text, stacklevel=4)
        self._batch_norm = "allow"


def _of_the_batch(module: torch.nn.Module) -> bool:
    """Whether a module's result in training mode depends on how the batch is cut."""
    if isinstance(module, _NORMS):
        return True
    if isinstance(module, torch.nn.modules.instancenorm._InstanceNorm):
        return bool(module.track_running_stats)
    hooks = {type(hook).__name__ for hook in module._forward_pre_hooks.values()}  # the older spectral_norm is a hook
    return isinstance(module, torch.nn.utils.parametrizations._SpectralNorm) or "SpectralNorm" in hooks


def _average(module: torch.nn.parallel.DistributedDataParallel) -> None:
    """Average gradients over ranks and broadcast the first rank's buffers, as the module does in backward and forward."""
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
    """Remove the tracebacks of an error and of its causes: their frames hold the attempt's tensors."""
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__


def _empty() -> None:
    """Release the device's cached blocks, so that micro-batches of another size find room."""
    kind = torch.accelerator.current_accelerator()
    if kind is not None:
        torch.get_device_module(kind).empty_cache()


@contextmanager
def _unsynchronised(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Run without ``DistributedDataParallel``'s collectives: a rank that fails must not leave the others waiting in one."""
    with ExitStack() as stack:
        for module in modules:
            if isinstance(module, torch.nn.parallel.DistributedDataParallel):
                stack.enter_context(module.no_sync())
                module.require_forward_param_sync = False  # no_sync() does not cover forward's broadcast of buffers
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
    """Number of samples in a batch: the length of its tensors along ``dim``.

    Raises:
        MicroBatchError: if lengths differ, if the batch is empty, or if it holds per-sample data that is not in tensors.
    """
    lengths = {t.shape[dim] if t.dim() > dim else -1 for t in _tensors(arguments) if t.dim()}
    lengths = lengths.union(*map(_others, arguments))
    if len(lengths) != 1:
        raise MicroBatchError(
            f"the batch has {sorted(lengths) or 'no'} lengths along dimension {dim} (-1: not a tensor, or no such "
            "dimension): all tensors must have the same length; "
            "pass anything that is not per sample by a closure, not as an argument"
        )
    found = int(lengths.pop())
    if found < 1:
        raise MicroBatchError("the batch is empty, or its tensors have no dimension along which to split it")
    return found


def _others(tree: Any) -> set[int]:
    """``{-1}`` if arguments hold data that may be per sample and cannot be cut, because it is not a tensor; else empty.

    An array could broadcast against a micro-batch of one sample and give a wrong loss without an error. So could a list that
    the loss function turns into a tensor; names in a list would be matched with the wrong samples.
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
    """Start and stop of each piece; all have the same size, except that the last may be smaller."""
    size = math.ceil(total / pieces)
    for start in range(0, total, size):
        yield start, min(start + size, total)
