"""Clips and unscales gradients one by one while some are offloaded, so that they are not all resident at once.

``torch.nn.utils.clip_grad_norm_`` lists all gradients, and scales them by a norm of their norms. The norm of each gradient
depends on that gradient alone, on the CPU whether it comes from a list or not, so taking them one at a time gives the same
bits (``torch/nn/utils/clip_grad.py``). ``GradScaler.unscale_`` multiplies each by one number, and looks for values that are
not finite. Where gradients differ in type or device, which torch groups, the script's call runs as it is, with all gradients
resident.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Final, final

from torch.nn.utils import clip_grad
from torch.utils._foreach_utils import _has_foreach_support

import torch
from lowtide.runtime.device.accelerator import HOST
from lowtide.runtime.monkeypatch import Wraps
from lowtide.runtime.updates.offloaded_gradients import OffloadedGradients
from lowtide.runtime.updates.single_update import parameters_of
from lowtide.runtime.updates.streamed_update import StreamedUpdate
from lowtide.runtime.updates.streamed_values import Buffers

_SCALE: Final = "_clip_grads_with_norm_"
_UNSCALE: Final = "_unscale_grads_"


@final
class ClippedGradients:
    """Wraps torch's functions that clip or unscale gradients."""

    def __init__(self, gradients: OffloadedGradients, streamed: StreamedUpdate) -> None:
        """Wrap nothing yet; ``gradients`` knows which are offloaded, ``streamed`` changes them slice by slice."""
        self._gradients, self._streamed = gradients, streamed
        self._wraps = Wraps()

    def install(self) -> None:
        """Wrap the functions, before a script imports them by name."""
        wrappers: dict[str, Callable[[Any], Any]] = {
            "clip_grad_norm_": self._norm, "clip_grad_value_": self._one_by_one, "clip_grads_with_norm_": self._one_by_one,
        }
        for name, wrapper in wrappers.items():
            for owner in (torch.nn.utils, clip_grad):
                if hasattr(owner, name) and hasattr(clip_grad, _SCALE):
                    self._wraps.put(owner, name, wrapper)

        if hasattr(torch.amp.GradScaler, _UNSCALE):
            self._wraps.put(torch.amp.GradScaler, _UNSCALE, self._unscaling)

    def remove(self) -> None:
        """Restore torch's functions."""
        self._wraps.undo()

    def _listed(self, parameters: Any) -> list[torch.Tensor]:
        return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)

    def _apply(self, listed: Iterable[Any]) -> bool:
        """Whether some of these gradients are offloaded, and all are of one kind, on the CPU."""
        gradients = self._gradients
        if not gradients.engaged or torch.compiler.is_compiling() or not all(isinstance(p, torch.Tensor) for p in listed):
            return False
        kinds = {kind for p in listed if (kind := gradients.kind_of(p)) is not None}
        return len(kinds) == 1 and next(iter(kinds))[0] == "cpu" and any(gradients.is_away(p) for p in listed)

    def _one_by_one(self, original: Any) -> Any:
        @functools.wraps(original)
        def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            listed = self._listed(parameters)
            if not self._apply(listed):
                return original(listed, *args, **kwargs)
            with self._streamed.buffers():
                for parameter in listed:
                    self._change(parameter, lambda p: original([p], *args, **kwargs))
            return None

        return clip

    def _unscaling(self, original: Any) -> Any:
        @functools.wraps(original)
        def unscale(scaler: Any, optimizer: Any, inverse: torch.Tensor, found: torch.Tensor, allow_fp16: Any) -> Any:
            listed = list(parameters_of(optimizer))
            if not self._apply(listed) or any(self._gradients.kind_of(p) == ("cpu", torch.float16) for p in listed):
                return original(scaler, optimizer, inverse, found, allow_fp16)
            per_device: dict[torch.device, torch.Tensor] = {}

            def unscale_one(parameter: torch.Tensor) -> None:
                alone = types.SimpleNamespace(param_groups=[{"params": [parameter]}])
                per_device.update(original(scaler, alone, inverse, found, allow_fp16))

            with self._streamed.buffers():
                for parameter in listed:
                    self._change(parameter, unscale_one)
            return per_device

        return unscale

    def _norm(self, original: Any) -> Any:
        @functools.wraps(original)
        def clip_grad_norm_(
            parameters: Any, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False,  # noqa: FBT002
            foreach: bool | None = None,
        ) -> Any:
            listed = self._listed(parameters)
            if not listed and isinstance(parameters, types.GeneratorType):
                warnings.warn("`parameters` is an empty generator, no gradient clipping will occur.", stacklevel=2)
            if not self._apply(listed):
                return original(listed, max_norm, norm_type, error_if_nonfinite, foreach)
            with torch.no_grad(), self._streamed.buffers() as buffers:
                norms = [n for p in listed if (n := self._norm_of(p, float(norm_type), foreach, buffers)) is not None]
            with torch.no_grad(), self._streamed.buffers():
                total = torch.linalg.vector_norm(torch.stack(norms), float(norm_type))
                if error_if_nonfinite and not total.isfinite():  # torch's own call raises the error
                    return original(listed, max_norm, norm_type, error_if_nonfinite, foreach)
                if torch.clamp(float(max_norm) / (total + 1e-6), max=1.0) != 1 or not _keeps_small_numbers():
                    for parameter in listed:
                        self._change(parameter, lambda p: getattr(clip_grad, _SCALE)([p], max_norm, total, foreach))
            return total

        return clip_grad_norm_

    def _change(self, parameter: torch.Tensor, change: Callable[[torch.Tensor], object]) -> None:
        """Change one gradient element by element, slice by slice if it is offloaded."""
        if not self._streamed.change_gradient(parameter, change):
            change(parameter)

    def _norm_of(
        self, parameter: torch.Tensor, norm_type: float, foreach: bool | None, buffers: Buffers
    ) -> torch.Tensor | None:
        """The norm of one gradient, as torch takes it; None without a gradient."""
        grad = self._gradients.peek(parameter, lambda size: buffers.take(0, size))
        if grad is None:
            return None
        if foreach or (foreach is None and _has_foreach_support([grad], grad.device)):
            norm: torch.Tensor = torch._foreach_norm([grad], norm_type)[0]
            return norm
        found: torch.Tensor = torch.linalg.vector_norm(grad, norm_type)
        return found


def _keeps_small_numbers() -> bool:
    """Whether multiplying by 1 changes nothing; with ``torch.set_flush_denormal`` it makes the smallest numbers zero."""
    return bool(torch.full((1,), 1e-40, dtype=torch.float32, device=HOST) * 1.0 != 0)
