"""Law: of all operators that torch tests itself by, results and gradients have the same bits when they are watched or budgeted.

torch's list of operators (``torch.testing._internal``) is not for others' use and changes with its versions; where it is not
there, nothing is claimed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

import lowtide

methods = pytest.importorskip("torch.testing._internal.common_methods_invocations")

Bits = tuple[tuple[int, ...], bytes]
SHARDS = 8
ENOUGH = 300
"""Samples at least per shard, so that an empty list does not pass."""
REPEATS = 128
"""Plain runs, with other tensors beside them, after which a sample's bits are taken to be steady."""
UNSTEADY = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "linalg.lstsq"}
"""What these make is whatever lay in memory; of the last, bits depend on where its tensors lie, in plain runs, too."""


def _leaves(found: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(found) if isinstance(t, torch.Tensor)]


def _bits(tensor: torch.Tensor) -> Bits:
    """Elements as they are (a NaN is equal to itself), and how they lie: what is made of them may have other bits otherwise."""
    dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    return dense.stride(), dense.contiguous().resolve_conj().resolve_neg().numpy().tobytes()


def _given(tensor: torch.Tensor) -> torch.Tensor:
    return torch.randn(tensor.shape, dtype=tensor.dtype)


def _one(op: Any, sample: Any, twice: bool) -> list[Bits | None] | None:
    """Results, gradients, and gradients of those, of one sample; None where it fails, which is to be so in each run."""
    inputs = [t for t in _leaves((sample.input, sample.args, sample.kwargs)) if t.requires_grad]
    torch.manual_seed(0)
    try:
        out = op(sample.input, *sample.args, **sample.kwargs)
        if sample.output_process_fn_grad is not None:
            out = sample.output_process_fn_grad(out)
        outs = _leaves(out)
        found: list[Bits | None] = [_bits(t) for t in outs]
        ends = [t for t in outs if t.requires_grad and (t.is_floating_point() or t.is_complex())]
        if not ends or not inputs:
            return found
        given = [_given(t) for t in ends]
        grads = torch.autograd.grad(ends, inputs, given, allow_unused=True, create_graph=twice)
        found += [None if g is None else _bits(g) for g in grads]
        again = [g for g in grads if g is not None and g.requires_grad]
        if twice and again:
            seconds = torch.autograd.grad(again, inputs, [_given(g) for g in again], allow_unused=True)
            found += [None if g is None else _bits(g) for g in seconds]
    except (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError):
        return None
    return found


def _all(op: Any, samples: list[Any], around: Callable[[], AbstractContextManager[Any]] | None, twice: bool) -> list[Any]:
    if around is None:
        return [_one(op, sample, twice) for sample in samples]
    with around():
        return [_one(op, sample, twice) for sample in samples]


def _is_steady(op: Any, sample: Any, twice: bool) -> bool:
    """Whether the plain run has the same bits wherever its tensors lie (LAPACK's have not, for ``linalg.lstsq``)."""
    found, beside = set(), []
    for i in range(REPEATS):
        beside += [torch.zeros(i * 37 % 101 + 1) for _ in range(i % 16)]
        if i % 8 == 7:
            del beside[::3]
        found.add(tuple(_one(op, sample, twice) or ()))
    return len(found) == 1


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_operator_of_torch_s_own_list(shard: int, tmp_path: Path) -> None:
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
        for twice in (False, True) if op.supports_gradgrad else (False,):
            plain = _all(op, samples, None, twice)
            again = _all(op, samples, None, twice)
            for way, around in ways.items():
                watched = _all(op, samples, around, twice)
                otherwise.update(
                    f"{op.name} {op.variant_test_name}, {way}, {'twice' if twice else 'once'}"
                    for sample, a, b, c in zip(samples, plain, again, watched, strict=True)
                    if a == b and a != c and _is_steady(op, sample, twice)
                )
            seen += sum(bits is not None for bits in plain)
    assert seen > ENOUGH
    assert not otherwise, "\n".join(sorted(otherwise))
