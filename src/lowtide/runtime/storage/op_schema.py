"""Facts about an operator from its schema: which arguments it writes, and whether it may be replayed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Final

import torch

TORCH_NAMESPACES: Final = frozenset({"aten", "prims"})
"""Namespaces of torch's own operators.

Operators of other namespaces (collectives, extensions) are never replayed, as their side effects are unknown. They may draw
random numbers, so where one lacks memory and is run again, generators are set back.
"""

_COLLECTIVE_NAMESPACES: Final = frozenset({"c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd"})
"""Namespaces of the operators in which other ranks take part."""

_UNINITIALISED: Final = frozenset(
    {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided",
     "aten::empty_permuted", "aten::empty_quantized"}
)
"""Operators whose outputs hold whatever a later writer, possibly one that bypasses the dispatcher, puts there."""

_NEVER: Final = frozenset(
    {"aten::resize_", "aten::set_", "aten::_local_scalar_dense", "aten::item", "aten::record_stream",
     "aten::_cudnn_init_dropout_state", "aten::from_file", "aten::lift_fresh", "aten::lift"}
)
"""Operators that are never replayed: they change storages, reach outside torch, or return their input although the schema
declares a new result."""

_OVERWRITE_FULLY: Final = frozenset(
    {"aten::copy_", "aten::fill_", "aten::zero_", "aten::normal_", "aten::uniform_", "aten::bernoulli_",
     "aten::exponential_", "aten::random_", "aten::log_normal_", "aten::cauchy_", "aten::geometric_"}
)
"""Operators that write their first argument independently of its old contents."""

_DRAWS: Final = frozenset(
    {"aten::native_dropout", "aten::rrelu_with_noise", "aten::_fused_dropout", "aten::_cudnn_rnn", "aten::miopen_rnn",
     "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_for_cpu",
     "aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention",
     "aten::_flash_attention_forward", "aten::_efficient_attention_forward"}
)
"""Operators that may draw random numbers although they lack the tag ``nondeterministic_seeded``."""

_LIBRARIES: Final = ("mkldnn", "cudnn", "miopen", "rnn")
"""Parts of the names of operators that libraries run."""

_SECRET_WRITES: Final = ("running_mean", "running_var")
"""Names of arguments that operators update in place although their schema does not say so."""


@dataclass(frozen=True, kw_only=True)
class OpInfo:
    """Facts about one operator overload.

    Attributes:
        name: its name, such as ``aten.add.Tensor``.
        writes_at: positions and names of the arguments that it writes according to its schema.
        secret_at: positions of the arguments that it writes although its schema does not say so.
        seeded: whether it may draw from a random generator.
        replayable: whether it may be run again at all.
        uninitialised: whether its new outputs have undefined contents.
        overwrites_fully: whether it writes its first argument independently of the old contents.
        collective: whether other ranks take part: a retry on one rank alone would leave the others waiting.
    """

    name: str
    writes_at: frozenset[int | str]
    secret_at: frozenset[int]
    seeded: bool
    replayable: bool
    uninitialised: bool
    overwrites_fully: bool
    collective: bool = False

    @cached_property
    def mutates(self) -> bool:
        """Whether it writes an argument in place, declared in its schema or not."""
        return bool(self.writes_at or self.secret_at)

    @cached_property
    def opaque(self) -> bool:
        """Whether a library runs it and returns its workspace (a uint8 tensor), of unknown size and only partly written."""
        return any(part in self.name for part in _LIBRARIES)


@cache
def info_of(func: Any) -> OpInfo:
    """Facts about an operator. Higher-order operators, which have no schema, count as seeded and not replayable."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return OpInfo(name=str(func), writes_at=frozenset(), secret_at=frozenset(), seeded=True, replayable=False,
                      uninitialised=False, overwrites_fully=False)
    writes: set[int | str] = set()
    secret: set[int] = set()
    for i, argument in enumerate(schema.arguments):
        alias = argument.alias_info
        if alias is not None and alias.is_write:
            writes |= {i, argument.name}
        elif argument.name in _SECRET_WRITES:
            secret.add(i)
    name = schema.name
    foreign = name.split("::")[0] not in TORCH_NAMESPACES
    tags = getattr(func, "tags", ())
    bitwise = getattr(torch.Tag, "nondeterministic_bitwise", None)
    return OpInfo(
        name=str(func),
        writes_at=frozenset(writes),
        secret_at=frozenset(secret),
        seeded=torch.Tag.nondeterministic_seeded in tags or name in _DRAWS or foreign,
        replayable=(
            not foreign
            and name not in _NEVER
            and name not in _UNINITIALISED
            and (bitwise is None or bitwise not in tags)
        ),
        uninitialised=name in _UNINITIALISED,
        overwrites_fully=name in _OVERWRITE_FULLY,
        collective=name.split("::")[0] in _COLLECTIVE_NAMESPACES,
    )
