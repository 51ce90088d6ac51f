"""Law: for all operators in torch's own test list, results and gradients have equal bits when recorded or budgeted.

torch's list of operators (``torch.testing._internal``) is not a public interface and changes with its versions; where it is
missing, nothing is claimed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import lowtide

methods = pytest.importorskip("torch.testing._internal.common_methods_invocations")

Bits = tuple[tuple[int, ...], bytes]
SHARDS = 8
MOST = 6
"""Samples of a module."""
ENOUGH = 300
"""Samples at least per shard, so that an empty list does not pass."""
REPEATS = 128
"""Plain runs, with other tensors beside them, after which a sample's bits are taken to be steady."""
UNSTEADY = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "linalg.lstsq"}
"""What these make is whatever lay in memory; of the last, bits depend on where its tensors lie, in plain runs, too."""


def _leaves(found: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(found) if isinstance(t, torch.Tensor)]


def _bits(tensor: torch.Tensor) -> Bits:
    """The elements as they are (a NaN equals itself) and their strides: with other strides, later results may have other bits.
    """
    dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    return dense.stride(), dense.contiguous().resolve_conj().resolve_neg().numpy().tobytes()


def _given(tensor: torch.Tensor) -> torch.Tensor:
    return torch.randn(tensor.shape, dtype=tensor.dtype)


def _backward(op: Any, sample: Any, *, twice: bool = False) -> list[Bits | None]:
    """Results, gradients, and gradients of those."""
    inputs = [t for t in _leaves((sample.input, sample.args, sample.kwargs)) if t.requires_grad]
    out = op(sample.input, *sample.args, **sample.kwargs)
    if sample.output_process_fn_grad is not None:
        out = sample.output_process_fn_grad(out)
    outs = _leaves(out)
    found: list[Bits | None] = [_bits(t) for t in outs]
    ends = [t for t in outs if t.requires_grad and (t.is_floating_point() or t.is_complex())]
    if not ends or not inputs:
        return found
    grads = torch.autograd.grad(ends, inputs, [_given(t) for t in ends], allow_unused=True, create_graph=twice)
    found += [None if g is None else _bits(g) for g in grads]
    again = [g for g in grads if g is not None and g.requires_grad]
    if twice and again:
        seconds = torch.autograd.grad(again, inputs, [_given(g) for g in again], allow_unused=True)
        found += [None if g is None else _bits(g) for g in seconds]
    return found


def _forward(op: Any, sample: Any) -> list[Bits | None]:
    """Results and tangents of dual numbers."""
    with forward_ad.dual_level():
        def dual(item: Any) -> Any:
            trained = isinstance(item, torch.Tensor) and item.requires_grad
            return forward_ad.make_dual(item.detach(), _given(item)) if trained else item

        first, args, kwargs = torch.utils._pytree.tree_map(dual, (sample.input, sample.args, sample.kwargs))
        outs = [t for t in _leaves(op(first, *args, **kwargs)) if t.is_floating_point() or t.is_complex()]
        parts = [part for t in outs for part in forward_ad.unpack_dual(t)]
        return [None if part is None or part._is_zerotensor() else _bits(part) for part in parts]


HOW: dict[str, Callable[[Any, Any], list[Bits | None]]] = {
    "once": _backward, "twice": functools.partial(_backward, twice=True), "forward": _forward,
}


def _one(op: Any, sample: Any, how: str) -> list[Bits | None] | None:
    """All results of one sample; None if it fails, which must then be so in every run."""
    torch.manual_seed(0)
    try:
        return HOW[how](op, sample)
    except (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError):
        return None


def _all(op: Any, samples: list[Any], around: Callable[[], AbstractContextManager[Any]], how: str) -> list[Any]:
    with around():
        return [_one(op, sample, how) for sample in samples]


def _is_steady(op: Any, sample: Any, how: str) -> bool:
    """Whether the baseline has the same bits wherever its tensors lie in memory (LAPACK's ``linalg.lstsq`` has not)."""
    found, beside = set(), []
    for i in range(REPEATS):
        beside += [torch.zeros(i * 37 % 101 + 1) for _ in range(i % 16)]
        if i % 8 == 7:
            del beside[::3]
        found.add(tuple(_one(op, sample, how) or ()))
    return len(found) == 1


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_operator_in_torchs_list_keeps_its_bits(shard: int, tmp_path: Path) -> None:
    """Results, first and second derivatives, and forward-mode tangents; operators whose bits vary in baseline runs are left
    out.
    """
    ways: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "recorded": lambda: lowtide.record(tmp_path / "run.lowtide"),
        "budgeted": lambda: lowtide.budget("64GiB"),
    }
    seen = 0
    otherwise: set[str] = set()
    for op in methods.op_db[shard::SHARDS]:
        if op.name in UNSTEADY or op.name.startswith("jiterator") or torch.float32 not in op.supported_dtypes("cpu"):
            continue
        torch.manual_seed(1)
        try:
            samples = list(op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd))
        except (RuntimeError, ImportError, AssertionError):
            continue
        able = {"once": True, "twice": op.supports_gradgrad, "forward": op.supports_forward_ad}
        for how in (how for how in HOW if able[how]):
            plain = _all(op, samples, nullcontext, how)
            again = _all(op, samples, nullcontext, how)
            for way, around in ways.items():
                watched = _all(op, samples, around, how)
                otherwise.update(
                    f"{op.name} {op.variant_test_name}, {way}, {how}"
                    for sample, a, b, c in zip(samples, plain, again, watched, strict=True)
                    if a == b and a != c and _is_steady(op, sample, how)
                )
            seen += sum(bits is not None for bits in plain)
    assert seen > ENOUGH
    assert not otherwise, "\n".join(sorted(otherwise))


def _module(info: Any, given: Any, *, training: bool) -> list[Bits | None] | None:
    """Two steps of a module: results, gradients of its arguments and parameters, buffers."""
    torch.manual_seed(0)
    inputs = [t for t in _leaves((given.forward_input.args, given.forward_input.kwargs)) if t.requires_grad]
    found: list[Bits | None] = []
    try:
        module = info.module_cls(*given.constructor_input.args, **given.constructor_input.kwargs).train(training)
        for _ in range(2):
            outs = _leaves(module(*given.forward_input.args, **given.forward_input.kwargs))
            found += [_bits(t) for t in outs]
            ends = [t for t in outs if t.requires_grad]
            trained = [*inputs, *(p for p in module.parameters() if p.requires_grad)]
            if ends and trained:
                grads = torch.autograd.grad(ends, trained, [_given(t) for t in ends], allow_unused=True)
                found += [None if g is None else _bits(g) for g in grads]
        return found + [_bits(t) for t in module.buffers()]
    except (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError):
        return None


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("training", [False, True])
def test_every_module_in_torchs_list_keeps_its_bits(training: bool, tmp_path: Path) -> None:
    """Two steps of each: results, gradients and buffers."""
    modules = pytest.importorskip("torch.testing._internal.common_modules")
    ways: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "plain": nullcontext, "again": nullcontext, "recorded": lambda: lowtide.record(tmp_path / "run.lowtide"),
        "budgeted": lambda: lowtide.budget("64GiB"),
    }
    seen, otherwise = 0, set()
    for info in modules.module_db:
        torch.manual_seed(1)
        samples = info.module_inputs_func(info, "cpu", torch.float32, requires_grad=True, training=training)[:MOST]
        ran: dict[str, list[Any]] = {}
        for way, around in ways.items():
            with around():
                ran[way] = [_module(info, given, training=training) for given in samples]
        for a, b, c, d in zip(*ran.values(), strict=True):
            seen += a is not None
            if a == b and not a == c == d:
                otherwise.add(info.module_cls.__name__)
    assert seen > ENOUGH
    assert not otherwise
