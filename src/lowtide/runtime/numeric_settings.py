"""Numeric settings that change an operator's bits and that a script may change between forward and backward.

A replayed operator must run under the settings of its first run: the precision of matrix products, the allowed libraries and
kernels, the number of threads (it decides how sums are split), the default dtype, and whether the processor flushes denormal
numbers. The settings are read again only after one of their setters was called, so :func:`current` is fast.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch
from lowtide.runtime.monkeypatch import Wraps

_FLAGS: Final = (
    "float32_matmul_precision", "mkldnn_enabled", "mkldnn_deterministic", "nnpack_enabled", "cudnn_enabled",
    "cudnn_benchmark", "cudnn_deterministic", "cudnn_allow_tf32", "cublas_allow_tf32",
    "cublas_allow_fp16_reduced_precision_reduction", "cublas_allow_bf16_reduced_precision_reduction",
    "cublas_allow_fp16_accumulation", "cpu_allow_fp16_reduced_precision_reduction", "math_sdp_allow_fp16_bf16_reduction",
    "blas_preferred_backend", "linalg_preferred_backend", "deterministic_fill_uninitialized_memory",
)
"""Settings behind ``torch._C._get_NAME`` and ``_set_NAME``; those that this torch lacks are skipped."""
_PRECISIONS: Final = tuple((b, o) for b in ("generic", "cuda", "mkldnn") for o in ("all", "matmul", "conv", "rnn"))
"""Backends and operators of ``torch._C._get_fp32_precision_getter``, which only newer versions of torch have."""

_C: Any = torch._C


def _flushes() -> bool:
    """Whether this thread's arithmetic treats denormal numbers as zero."""
    return sys.float_info.min * 0.5 == 0.0


def _determinism() -> tuple[bool, bool]:
    return bool(_C._get_deterministic_algorithms()), bool(_C._get_deterministic_algorithms_warn_only())


def _determine(setting: tuple[bool, bool]) -> None:
    _SET_DETERMINISTIC(setting[0], warn_only=setting[1])


def _set(setter: Callable[..., None], setting: Any) -> None:
    setter(*setting) if isinstance(setting, tuple) else setter(setting)


_SET_DETERMINISTIC: Final = _C._set_deterministic_algorithms
_SETTINGS: Final[tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...]] = (
    (_determinism, _determine),
    (torch.get_default_dtype, _C._set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (_flushes, torch.set_flush_denormal),
    *(
        (getattr(_C, f"_get_{name}"), functools.partial(_set, getattr(_C, f"_set_{name}")))
        for name in _FLAGS if hasattr(_C, f"_get_{name}") and hasattr(_C, f"_set_{name}")
    ),
    *(
        (functools.partial(_C._get_fp32_precision_getter, *which), functools.partial(_C._set_fp32_precision_setter, *which))
        for which in _PRECISIONS if hasattr(_C, "_get_fp32_precision_getter")
    ),
)
"""Pairs of getter and setter. These are torch's own setters: only the script's calls are watched, not Lowtide's."""
_SETTERS: Final = (
    (torch, "set_num_threads"), (torch, "set_flush_denormal"), (_C, "_set_default_dtype"),
    (_C, "_set_deterministic_algorithms"), (_C, "_set_fp32_precision_setter"),
    *((_C, f"_set_{name}") for name in _FLAGS),
)
"""Where scripts, and torch's Python code, look the setters up: :func:`watch` wraps these."""

Numerics = tuple[Any, ...]
"""All settings, in the order of their getters; None for a setting whose getter raises."""


def _read() -> Numerics:
    return tuple(_told(get) for get, _ in _SETTINGS)


def _told(get: Callable[[], Any]) -> Any:
    try:
        return get()
    except RuntimeError:  # an older getter raises once the newer settings that it summarizes differ
        return None


_known: list[Numerics] = []
_AS_THEY_ARE: Final = nullcontext()


def current() -> Numerics:
    """The settings in force now."""
    return _known[0] if _known else _read()


def watch(wraps: Wraps) -> None:
    """Track every change from now on, until ``wraps`` is undone."""
    _known[:] = [_read()]
    wraps.also(_known.clear)
    for owner, name in _SETTERS:
        if hasattr(owner, name):
            wraps.put(owner, name, _setting)


def _setting(original: Any) -> Any:
    @functools.wraps(original)
    def changed(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        finally:
            if _known:
                _known[0] = _read()

    return changed


def under(settings: Numerics) -> AbstractContextManager[None]:
    """Context in which operators run under settings that :func:`current` returned earlier; it restores the present ones."""
    now = current()
    return _AS_THEY_ARE if settings is now or settings == now else _changed(settings)


@contextmanager
def _changed(settings: Numerics) -> Iterator[None]:
    changed = []
    for (get, change), wanted in zip(_SETTINGS, settings, strict=True):
        found = _told(get)
        if wanted is not None and found is not None and found != wanted:
            change(wanted)
            changed.append((change, found))
    try:
        yield
    finally:
        for change, former in reversed(changed):
            change(former)
