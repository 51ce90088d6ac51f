"""Runs the optimizer's own update on one parameter at a time.

The optimizers of torch in :data:`KNOWN` treat each parameter independently (``torch/optim``: the single-tensor, foreach and
fused kernels are element-wise), so the bits are those of the script's step.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.optim import optimizer as optim

import torch
from lowtide.runtime.tensors import states_of

KNOWN: Final = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta,
    torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam,
)
"""Optimizers that treat each parameter independently and read only its gradient and its state."""

MIXED: Final = (torch.optim.SGD, torch.optim.Adagrad)
"""Those whose foreach update goes entry by entry if one entry is new (has no buffer) or sparse (``torch/optim/sgd.py``)."""
LOW_PRECISION: Final = (torch.bfloat16, torch.float16)
"""Types in which an update entry by entry rounds differently from one of all entries at once."""


def bare(step: Any) -> Any:
    """An optimizer's step without the wrapper that calls its hooks."""
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step


_OWN = threading.local()


def is_updating_one(optimizer: Any) -> bool:
    """Whether this is the stand-in of :func:`update_one`, whose code reads one parameter's states only."""
    return getattr(_OWN, "optimizer", None) is optimizer


_STEPS: Final = {kind: bare(kind.step) for kind in KNOWN}
"""The steps as torch defines them: an optimizer whose step was replaced is not a known one."""


def update_one(optimizer: Any, group: dict[str, Any], parameter: torch.Tensor, states: Any = None) -> None:
    """Run the optimizer's own update of one parameter, which is in ``group``.

    Its code runs on a stand-in with the same attributes and states and this one parameter: a signal's handler, or another
    thread, may look at the optimizer meanwhile.

    Args:
        optimizer: the optimizer.
        group: a group of the optimizer, for its options.
        parameter: a tensor with a gradient.
        states: the states by parameter, in place of the optimizer's.
    """
    step = bare(type(optimizer).step)  # step hooks belong to the script's own call
    alone = object.__new__(type(optimizer))
    vars(alone).update(vars(optimizer))
    vars(alone)["param_groups"] = [{**group, "params": [parameter]}]
    if states is not None:
        vars(alone)["state"] = states
    outer, _OWN.optimizer = getattr(_OWN, "optimizer", None), alone
    try:
        with torch.no_grad(), _full_precision(parameter.device.type):
            step(alone)
    finally:
        _OWN.optimizer = outer


def _full_precision(device: str) -> AbstractContextManager[None]:
    """Turn autocast off if it is on: a script's step runs outside of it."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def parameters_of(optimizer: Any) -> Iterator[torch.Tensor]:
    """All parameters of an optimizer, group by group, but those of lazy modules that have no size yet."""
    return (p for group in optimizer.param_groups for p in group["params"] if not isinstance(p, UninitializedTensorMixin))


def scales(optimizer: Any) -> bool:
    """Whether the step gets scaled gradients and unscales them in place (``GradScaler`` with a fused optimizer)."""
    return getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None


def overlap(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether parameters have bytes in common: then it matters in which order they are updated, and whether together."""
    spans = sorted(_span(p) for p in parameters)
    return any(a[0] == b[0] and b[1] < a[2] for a, b in itertools.pairwise(spans))


def _span(parameter: torch.Tensor) -> tuple[int, int, int]:
    """A parameter's storage, and its first byte and the end of its last one there.

    A tensor that has no storage (a wrapper's) counts as one of its own.
    """
    try:
        storage = int(parameter.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return id(parameter), 0, 1
    size, first = parameter.element_size(), int(parameter.storage_offset())
    last = first + sum((n - 1) * s for n, s in zip(parameter.size(), parameter.stride(), strict=True))
    return storage, first * size, (last + 1) * size if parameter.numel() else first * size


def unfit(optimizer: Any) -> str:
    """Why an optimizer's parameters cannot be updated one by one; empty if they can."""
    if type(optimizer) not in KNOWN:
        return f"{type(optimizer).__name__} is not known to update each parameter independently"
    if bare(type(optimizer).step) is not _STEPS[type(optimizer)]:
        return "the optimizer's step was replaced"
    own = vars(optimizer).get("step")
    if own is not None and not getattr(own, "_wrapped_by_lr_sched", False):
        return "the optimizer's step was replaced"
    hooks = (
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks,
        optim._global_optimizer_pre_hooks, optim._global_optimizer_post_hooks,
    )
    if any(not _is_lowtides(hook) for some in hooks for hook in some.values()):
        return "the optimizer has step hooks"
    if any(group.get("differentiable") or group.get("capturable") for group in optimizer.param_groups):
        return "the optimizer is differentiable or capturable"
    if type(optimizer) in MIXED and any(_is_rounded(group) for group in optimizer.param_groups):
        return f"{type(optimizer).__name__}(foreach=None or True) rounds low precision depending on the rest of the group"
    return ""


def _is_lowtides(hook: Any) -> bool:
    """Whether a hook is Lowtide's own: the clock's (:class:`PhaseTracker`), or that of a probe that counts steps."""
    return str(getattr(hook, "__module__", "")).partition(".")[0] == "lowtide"


def _is_rounded(group: dict[str, Any]) -> bool:
    """Whether a group has low-precision parameters whose update takes another path for all if one has no buffer."""
    listed = group.get("foreach") is not False and bool(group.get("momentum", 1))
    return listed and any(p.dtype in LOW_PRECISION for p in group["params"])


def in_order(optimizer: Any, before: Sequence[Any] = ()) -> None:
    """Put states into the order in which the script's own step would have created them.

    Args:
        optimizer: the optimizer, whose step is over.
        before: the parameters that had states before it, in order; the others follow in the order of the groups.
    """
    states = states_of(optimizer)
    wanted = list({id(p): p for p in (*before, *parameters_of(optimizer)) if p in states}.values())
    if any(a is not b for a, b in zip(wanted, states, strict=False)):
        states.update([(p, states.pop(p)) for p in wanted])
